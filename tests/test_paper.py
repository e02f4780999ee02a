"""The paper's figures: what is offered, how claims are judged, and one figure through `mlflow run`.

The numbers that the rules are tried on are made up; only which way they fall counts.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PAPER = ROOT / "examples" / "paper"
ISSUE = ("1", "2", "4", "5", "6", "7", "8", "9", "10", "11", "table1")
"""What is to be reproduced."""


@pytest.fixture(scope="module")
def load() -> Callable[[str], ModuleType]:
    """Import a script of examples/paper by its name."""
    if str(PAPER) not in sys.path:
        sys.path.append(str(PAPER))

    def by_name(name: str) -> ModuleType:
        return importlib.import_module(name)

    return by_name


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """run.py, under a name that no other module has."""
    spec = importlib.util.spec_from_file_location("paper_run", PAPER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings_of(script: ModuleType, *words: str) -> Any:
    """What the command line makes of these words."""
    from reproduction.settings import make_settings

    values = dict(script.command.make_context("paper", list(words)).params)
    del values["as_json"]
    return make_settings(values, script.RECORDS)


def test_every_figure_of_the_paper_has_its_script(script: ModuleType) -> None:
    assert tuple(script.SCRIPTS) == ISSUE
    found = {path.stem for path in PAPER.glob("*_*.py")}
    assert found == set(script.SCRIPTS.values())


@pytest.mark.parametrize("name", ISSUE)
def test_a_script_says_claim_and_rule(
    name: str, script: ModuleType, load: Callable[[str], ModuleType]
) -> None:
    paper = load(script.SCRIPTS[name]).PAPER
    assert paper.name == name
    assert paper.subject
    assert len(paper.claim) > 40
    assert "held" in paper.rule.lower()


def test_an_unknown_figure_ends_with_2_and_the_list(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlflow_tula.cli import run

    assert run(["--figure", "3"], script.command) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "'3' is not one of all, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, table1" in said


def test_all_and_lists_of_figures_come_in_the_papers_order(script: ModuleType) -> None:
    figures = script.Figures()
    assert figures.convert("all", None, None) == ISSUE
    assert figures.convert("Table1, 2,11", None, None) == ("2", "11", "table1")


def test_mlproject_has_the_entry_point_with_the_scripts_options(script: ModuleType) -> None:
    entry = yaml.safe_load((ROOT / "MLproject").read_text())["entry_points"]["paper"]
    known = {one.name for one in script.command.params} - {"as_json"}
    assert set(entry["parameters"]) == known
    assert entry["command"].startswith("python examples/paper/run.py ")
    assert all(parameter["default"] for parameter in entry["parameters"].values())


def test_every_option_has_help_and_a_default(script: ModuleType) -> None:
    for one in script.command.params:
        assert isinstance(one, click.Option)
        assert one.help, one.name
        assert one.default not in (None, ""), one.name


def test_models_may_have_data_of_their_own(
    script: ModuleType, load: Callable[[str], ModuleType]
) -> None:
    load("reproduction.settings")
    found = settings_of(script, "--models", "vgg11,resnet50@cifar100", "--dataset", "cifar10")
    assert found.models == (("vgg11", "cifar10"), ("resnet50", "cifar100"))
    paper = settings_of(script, "--scale", "paper")
    assert [model for model, _ in paper.models] == [
        "resnet50", "vgg11", "alexnet", "mobilenet_v3_large",
    ]  # fmt: skip
    assert paper.request != found.request


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--large-batches", "16,512"), "--large-batches must be above --reference-batch"),
        (("--large-batches", "512"), "at least two --large-batches"),
        (("--batch-sizes", "8,16"), "three --batch-sizes"),
        (("--models", "vgg11,,resnet18"), "empty name"),
        (("--models", "vgg11,vgg11@cifar10"), "vgg11 twice"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_measured(
    words: tuple[str, ...],
    what: str,
    script: ModuleType,
    load: Callable[[str], ModuleType],
) -> None:
    from mlflow_tula.errors import InvalidInputError

    load("reproduction.settings")
    with pytest.raises(InvalidInputError, match=what):
        settings_of(script, *words)


LEVEL = (0.981, 0.979, 0.980)
"""Accuracies by seed of something good, and below them of something bad."""
LOW = (0.951, 0.949, 0.950)


def _choice(load: Callable[[str], ModuleType], **facts: Any) -> Any:
    return load("figure_9").Choice(**facts)


CASES: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = [
    ("figure_1", "held", ({"a": [8.0, 4.0, 3.0, 2.9]},), {}),
    ("figure_1", "held in part", ({"a": [8.0, 4.0, 3.0, 2.9], "b": [8.0, 7.9, 6.0, 1.0]},), {}),
    ("figure_1", "did not hold", ({"a": [1.0, 1.0, 1.0, 0.99]},), {}),
    ("figure_2", "held", ({32: LEVEL, 64: (0.97,) * 3, 512: LOW},), {}),
    ("figure_2", "held in part", ({32: LEVEL, 64: (0.94,) * 3, 128: (0.99,) * 3, 512: LOW},), {}),
    ("figure_2", "did not hold", ({32: LOW, 64: (0.97,) * 3, 512: LEVEL},), {}),
    ("figure_4", "held", ({"a": ([8, 16, 32], [80.0, 160.0, 321.0])},), {}),
    ("figure_4", "did not hold", ({"a": ([8, 16, 32], [80.0, 80.0, 321.0])},), {}),
    ("figure_4", "did not hold", ({"a": ([8, 16, 32], [500.0, 580.0, 740.0])},), {}),
    ("figure_5", "held", ({32: ([9.0] + [1.0] * 9, [3, 2, 1], [30, 20, 10])},), {}),
    ("figure_5", "held in part", ({32: ([0.5] + [1.0] * 9, [3, 2, 1], [30, 20, 10])},), {}),
    ("figure_5", "did not hold", ({32: ([0.5] + [1.0] * 9, [3, 2, 1], [1, 2, 3])},), {}),
    ("figure_6", "held", ({32: ([3.0, 2.0, 1.0], [9.0, 4.0, 0.1])},), {}),
    ("figure_6", "did not hold", ({32: ([1.0, 2.0, 3.0], [9.0, 4.0, 0.1])},), {}),
    ("figure_7", "held", ({1.0: LOW, 4.0: LEVEL, 16.0: LOW}, {1.0: 1.0, 4.0: 4.0}), {}),
    ("figure_7", "held in part", ({1.0: LOW, 4.0: LEVEL, 16.0: LOW}, {1.0: 4.0, 4.0: 1.0}), {}),
    ("figure_7", "did not hold", ({1.0: LEVEL, 4.0: LOW}, {1.0: 4.0, 4.0: 1.0}), {}),
    ("figure_8", "held", ({0.1: LOW, 0.5: LEVEL}, {0.1: 0.2, 0.5: 0.9}),
     {"plain": LOW, "static": LOW}),
    ("figure_8", "held in part", ({0.1: LOW, 0.5: LEVEL}, {0.1: 0.2, 0.5: 0.9}),
     {"plain": LOW, "static": LEVEL}),
    ("figure_8", "did not hold", ({0.1: LOW, 0.5: LEVEL}, {0.1: 0.2, 0.5: 0.9}),
     {"plain": LEVEL, "static": LEVEL}),
    ("figure_10", "held", ({"a": (512, 256, -0.1), "b": (512, 512, 0.0)},), {}),
    ("figure_10", "held in part", ({"a": (512, 256, -0.1), "b": (256, 512, -0.1)},), {}),
    ("figure_10", "did not hold", ({"a": (512, 512, 0.0)},), {}),
    ("figure_11", "held", ({("a", "partial"): (0.05, 0.01), ("a", "full"): (0.04, 0.01)},), {}),
    ("figure_11", "held in part",
     ({("a", "partial"): (0.15, 0.01), ("a", "full"): (0.04, 0.01)},), {}),
    ("figure_11", "did not hold", ({("a", "partial"): (0.05, 0.20)},), {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "held", "numbers", "more"), CASES)
def test_a_rule_decides(
    name: str,
    held: str,
    numbers: tuple[Any, ...],
    more: dict[str, Any],
    load: Callable[[str], ModuleType],
) -> None:
    module = load(name)
    verdict = module.judge(*numbers, **more)
    assert verdict.held == held
    words = load("reproduction.facts").sentence(module.PAPER, verdict)
    assert words.startswith(f"{module.PAPER.label}: the paper's claim {held} here: ")
    assert "nan" not in words
    assert all(isinstance(value, (int, float)) for value in verdict.numbers.values())


@pytest.mark.parametrize(
    ("fastest", "knee", "held"), [(3, 2, "held"), (3, 0, "did not hold"), (0, 2, "did not hold")]
)
def test_figure_9_asks_for_the_knee_and_the_fastest(
    fastest: int, knee: int, held: str, load: Callable[[str], ModuleType]
) -> None:
    choice = _choice(load, times=(8.0, 4.0, 3.1, 3.0), fastest=fastest, knee=knee)
    assert load("figure_9").judge({"a": choice}).held == held


@pytest.mark.parametrize(
    ("ags", "rival", "held"),
    [(LEVEL, LOW, "held"), (LEVEL, (0.99,) * 3, "held in part"), (LOW, LOW, "did not hold")],
)
def test_table_1_asks_for_the_gap_and_the_rivals(
    ags: Any, rival: Any, held: str, load: Callable[[str], ModuleType]
) -> None:
    found = {"plain": LOW, "lars": LEVEL, "post_local_sgd": rival, "linear_scaling": rival,
             "ags": ags, "auto": LEVEL}  # fmt: skip
    assert load("table_1").judge({512: found}).held == held


def test_partial_search_is_replayed_within_full_search(
    table: Any, load: Callable[[str], ModuleType]
) -> None:
    profiles = load("reproduction.profiles")
    few = profiles.partial_search(table)
    assert 3 <= len(few.ok) <= len(table.ok)
    assert set(few.measurements) <= set(table.measurements)
    left = profiles.unmeasured(table, few)
    assert len(left) + len(few.ok) == len(table.ok)


def test_a_figure_is_drawn_from_panels(tmp_path: Path, load: Callable[[str], ModuleType]) -> None:
    facts, drawing = load("reproduction.facts"), load("reproduction.drawing")
    series = facts.Series(name="a", x=[8, 16], y=[1.0, 2.0], spread=[0.1, 0.1])
    star = facts.Series(name="b", x=[16], y=[2.0], style="star", color=facts.CHOICE)
    panels = [
        facts.Panel(title="t", x_label="x", y_label="y", series=[series, star], batch_axis=True,
                    log_y=True, level=(1.5, "here"))
    ] * 2  # fmt: skip
    drawing.draw(tmp_path, "title", "a sentence " * 30, panels)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "figure.html").read_text()
    assert "Plotly.newPlot" in page
    assert "http" not in page.split("</script></head>")[1]


SMALL = {
    "figure": "4",
    "models": "squeezenet1_1",
    "batch_sizes": "4,8,16",
    "world_sizes": "1",
    "max_steps": "2",
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A store of its own, and an environment that is activated."""
    folder = tmp_path_factory.mktemp("paper")
    known = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    return {
        **known,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{known['PATH']}",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "FOLDER": str(folder),
    }


@pytest.mark.slow
def test_a_figure_through_mlflow_run_and_again(environment: dict[str, str]) -> None:
    from mlflow import MlflowClient

    words = [f"-P{name}={value}" for name, value in SMALL.items()]
    out = f"-Poutput_dir={environment['FOLDER']}/out"
    said = []
    for _ in range(2):
        done = subprocess.run(
            ["mlflow", "run", ".", "-e", "paper", *words, out],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        said.append(done.stdout.strip().splitlines()[-1])
    assert all(line.startswith("Figure 4: the paper's claim ") for line in said)
    assert "made already" in said[1]

    client = MlflowClient(environment["MLFLOW_TRACKING_URI"], environment["MLFLOW_TRACKING_URI"])
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
    second, first = runs
    assert second.data.tags["tula.paper.made_in"] == first.info.run_id
    for run in runs:
        assert run.info.status == "FINISHED"
        sentence = run.data.tags["tula.paper.claim"]
        assert run.data.tags["mlflow.note.content"].splitlines()[0] == sentence
        assert said[0].startswith(sentence)
        names = {one.path for one in client.list_artifacts(run.info.run_id)}
        assert {"figure.png", "figure.html", "table.json"} <= names
        text = Path(client.download_artifacts(run.info.run_id, "table.json")).read_text()
        assert "activation_memory_bytes" in json.loads(text)["columns"]


@pytest.mark.long
def test_figures_in_one_run_share_their_profile_and_the_report_reads_them(
    environment: dict[str, str], tmp_path: Path
) -> None:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    command = [sys.executable, str(PAPER / "run.py"), *words, "--figure=1,4", "--json"]
    done = subprocess.run(
        [*command, f"--output-dir={tmp_path}"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    figures = json.loads(done.stdout)["figures"]
    assert [one["figure"] for one in figures] == ["1", "4"]
    assert figures[0]["inputs"] == figures[1]["inputs"]
    assert len(list((tmp_path / "paper" / "profiles").glob("*.json"))) == 1

    page = tmp_path / "page.md"
    report = subprocess.run(
        [sys.executable, str(PAPER / "report.py"), f"--output-dir={tmp_path}", "--markdown", page],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert report.returncode == 0, report.stderr
    assert page.read_text().count("| [Figure ") == 2


@pytest.mark.long
def test_all_figures(environment: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, str(PAPER / "run.py"), "--figure=all", f"--output-dir={tmp_path}",
            "--models=squeezenet1_1,resnet18", "--batch-sizes=4,8,16,32", "--max-steps=3",
            "--large-batches=128,512", "--epochs=5", "--seeds=2",
        ],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=850, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("the paper's claim ") == len(ISSUE)
    assert len(list((tmp_path / "paper").glob("*/figure.png"))) == len(ISSUE)
