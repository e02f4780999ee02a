"""What is published: versions agree, and the wheel holds the package, all of it and no more."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from mlflow_tula import __version__

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md")


def shipped() -> set[str]:
    """Every file of the package as it lies in the source tree, caches left out."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "mlflow_tula").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


# ---- versions


def test_changelog_begins_with_this_version() -> None:
    headings = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == __version__


def test_pyproject_has_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__


@pytest.mark.parametrize(
    "name", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
)
def test_pages_name_no_other_version(name: str) -> None:
    text = (ROOT / name).read_text()
    found = re.findall(r"mlflow[-_]tula(?:[ =~>]+|-)v?(\d+\.\d+\.\d+)", text)
    assert set(found) <= {__version__}


def test_the_command_says_this_version(capsys: pytest.CaptureFixture[str]) -> None:
    from mlflow_tula.cli import run

    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"tula, version {__version__}\n"


# ---- what is declared


def test_every_kind_of_data_file_is_declared() -> None:
    """A file that is no module must match a pattern of package-data, or the wheel lacks it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["mlflow_tula"]
    package = ROOT / "mlflow_tula"
    declared = {
        path.relative_to(ROOT).as_posix()
        for pattern in patterns
        for path in package.glob(pattern)
        if path.is_file()
    }
    assert declared == {name for name in shipped() if not name.endswith(".py")}
    assert {"mlflow_tula/py.typed", "mlflow_tula/demo/recording.json"} <= declared


# ---- wheel and sdist


def built(folder: Path) -> tuple[Path, Path]:
    """Wheel and sdist of a copy of the sources, with this environment's own tools."""
    for name in ("build", "setuptools", "twine"):
        pytest.importorskip(name, reason=f"needs {name} (the dev extra)")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        shutil.copy(ROOT / name, source)
    left_out = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "mlflow_tula", source / "mlflow_tula", ignore=left_out)
    # what must not get into a wheel, where it lies about
    (source / "mlflow_tula" / "__pycache__").mkdir()
    (source / "mlflow_tula" / "__pycache__" / "old.cpython-311.pyc").write_bytes(b"")
    (source / "tests").mkdir()
    (source / "tests" / "test_nothing.py").write_text("")
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source))
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def call(*words: str, where: Path | None = None, **more: str) -> str:
    """Run a command that must succeed; what it printed."""
    known = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    done = subprocess.run(
        words,
        cwd=where,
        env={**known, "MLFLOW_DISABLE_TELEMETRY": "true", **more},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return built(tmp_path_factory.mktemp("dist"))


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(published: tuple[Path, Path]) -> None:
    wheel, _ = published
    assert wheel.name == f"mlflow_tula-{__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    about = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert names - about == shipped()
    assert f"mlflow_tula-{__version__}.dist-info/licenses/LICENSE" in about


@pytest.mark.slow
def test_the_wheel_names_command_and_plugins(published: tuple[Path, Path]) -> None:
    wheel, _ = published
    text = zipfile.ZipFile(wheel).read(f"mlflow_tula-{__version__}.dist-info/entry_points.txt")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "tula = mlflow_tula.cli:main" in text.decode()
    for group in declared["entry-points"]:
        assert f"[{group}]" in text.decode()


@pytest.mark.slow
def test_the_sdist_builds_the_same(published: tuple[Path, Path]) -> None:
    _, sdist = published
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert shipped() <= names
    assert {"CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests")]


@pytest.mark.slow
def test_twine_finds_nothing_wrong(published: tuple[Path, Path]) -> None:
    out = call(sys.executable, "-m", "twine", "check", "--strict", *map(str, published))
    assert out.count("PASSED") == 2


@pytest.mark.slow
def test_the_unpacked_wheel_runs_the_demo(published: tuple[Path, Path], tmp_path: Path) -> None:
    unpacked = tmp_path / "site"
    zipfile.ZipFile(published[0]).extractall(unpacked)
    where = {"PYTHONPATH": str(unpacked), "PYTHONDONTWRITEBYTECODE": "1"}
    code = "import mlflow_tula; print(mlflow_tula.__file__)"
    assert call(sys.executable, "-c", code, where=tmp_path, **where).startswith(str(unpacked))
    out = call(sys.executable, "-m", "mlflow_tula", "demo", where=tmp_path, **where)
    assert "choice: global batch size" in out
    assert (tmp_path / "tula-demo" / "mlflow.db").is_file()


@pytest.mark.long
def test_a_wheel_in_an_empty_environment_runs_the_demo(
    published: tuple[Path, Path], tmp_path: Path
) -> None:
    call(sys.executable, "-m", "venv", str(tmp_path / "v"))
    programs = tmp_path / "v" / "bin"
    call(str(programs / "pip"), "install", "--quiet", str(published[0]))
    out = call(str(programs / "tula"), "demo", where=tmp_path)
    assert "choice: global batch size" in out
    assert call(str(programs / "tula"), "--version") == f"tula, version {__version__}\n"
