"""The project's files agree with the code: MLproject, conda.yaml, docs, the floor plan."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import click
import pytest
import yaml

from mlflow_tula import __version__
from mlflow_tula.cli import COMMANDS, tula

ROOT = Path(__file__).resolve().parent.parent
ENTRY_POINTS = ["main", "demo", "profile", "fit", "register", "recommend", "train", "compare"]
SCRIPTS = ["paper"]
"""Entry points that are scripts of the checkout (tests/test_paper.py)."""


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["MLproject", "conda.yaml", "docs/cli.md", "README.md"])
def test_generated_files_are_up_to_date(generate: ModuleType, name: str) -> None:
    assert (ROOT / name).read_text() == generate.FILES[name](), "run `make docs`"


def test_mlproject_entry_points_are_commands() -> None:
    project = yaml.safe_load((ROOT / "MLproject").read_text())
    assert list(project["entry_points"]) == [*ENTRY_POINTS, *SCRIPTS]
    for name in ENTRY_POINTS:
        entry = project["entry_points"][name]
        command = tula.get_command(click.Context(tula), name)
        assert command is not None
        known = {option.name for option in command.params} - {"as_json"}
        assert set(entry["parameters"]) == known
        # MLflow shows an empty default as '' and its commands go through str.format.
        assert all(parameter["default"] for parameter in entry["parameters"].values())
        assert set(re.findall(r"{(\w+)}", entry["command"])) == known


def test_mlproject_runs_in_the_current_environment() -> None:
    project = yaml.safe_load((ROOT / "MLproject").read_text())
    assert project["databricks_spark_job"] == {}
    assert not {"conda_env", "python_env", "docker_env"} & set(project)


def test_conda_agrees_with_pyproject() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    conda = yaml.safe_load((ROOT / "conda.yaml").read_text())
    packages = next(part["pip"] for part in conda["dependencies"] if isinstance(part, dict))
    assert packages == [*wanted, "-e ."]


def test_no_package_is_pinned_and_no_registry_is_named() -> None:
    for name in ("pyproject.toml", "conda.yaml"):
        text = (ROOT / name).read_text()
        assert "index-url" not in text
        assert not re.search(r'"[a-z-]+==', text)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_option_has_help_and_a_default(name: str) -> None:
    command = tula.get_command(click.Context(tula), name)
    assert command is not None
    assert command.get_short_help_str()
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help, option.name
            assert option.default not in (None, ""), option.name
            assert option.show_default, option.name


def test_every_command_is_documented() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    assert all(f"\n## tula {name}\n" in text for name in COMMANDS)


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__


def test_no_module_is_longer_than_400_lines() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in (ROOT / "mlflow_tula").rglob("*.py")
    }
    assert not {name: length for name, length in lengths.items() if length > 400}


def test_architecture_names_every_room() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rooms = {path.name for path in (ROOT / "mlflow_tula").iterdir() if path.name[0] not in "_."}
    rooms = {
        name for name in rooms if name.endswith(".py") or (ROOT / "mlflow_tula" / name).is_dir()
    }
    assert not sorted(name for name in rooms if f"{name}" not in text)


def test_readme_says_how_to_install_and_test() -> None:
    text = (ROOT / "README.md").read_text()
    assert "pip install -e . && mlflow run . -P model=vgg11" in text
    last_command = (ROOT / ".ci" / "run").read_text().strip().splitlines()[-1]
    assert last_command in text, "CI runs the README's own test command"
