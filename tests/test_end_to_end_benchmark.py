"""The scripts on gains and on the cost of profiling run on small input; only the way counts."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner, Result

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def script(name: str) -> ModuleType:
    """A benchmark as a module, with its neighbours within reach."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def end_to_end() -> ModuleType:
    return script("end_to_end")


@pytest.fixture(scope="module")
def profiling_cost() -> ModuleType:
    return script("profiling_cost")


def ran(module: ModuleType, *words: object) -> Result:
    done = CliRunner().invoke(module.main, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done


def lines_of(way: str, seconds: float, *, reached: bool = True) -> list[dict[str, object]]:
    """Records of one way, three seeds."""
    return [
        {
            "piece": "train",
            "way": way,
            "seed": seed,
            "reached": reached,
            "command_s": seconds,
            "training_s": seconds - 10,
            "cpu_s": 1.5 * seconds,
            "others_cpu_s": 0.1 * seconds,
            "epochs": 5,
            "steps": 50,
            "epochs_planned": 5,
            "batch_size": 256,
            "devices": 1,
            "validation_accuracy": 0.9,
            "test_accuracy": 0.89,
        }
        for seed in (0, 1, 2)
    ]


def write(folder: Path, rows: list[dict[str, object]]) -> None:
    known = [
        {"piece": "largest", "batch_size": 8192, "peak_memory_bytes": {"8192": 2**30}},
        {"piece": "profile", "profile_s": 60, "recommend_s": 3, "batch_size": 256, "devices": 1},
    ]
    text = "\n".join(json.dumps(row) for row in (*known, *rows))
    (folder / "fashion_mnist.jsonl").write_text(text + "\n")


def test_gains_and_when_profiling_pays(end_to_end: ModuleType, tmp_path: Path) -> None:
    rows = [*lines_of("small", 60), *lines_of("largest", 160, reached=False)]
    write(tmp_path, [*rows, *lines_of("tula", 40)])
    page, short = tmp_path / "page.md", tmp_path / "gains.md"
    words = ["--results", tmp_path, "--markdown", page, "--gains", short]
    ran(end_to_end, "report", "--task", "fashion_mnist", *words)
    text = page.read_text()
    assert "1.50 times sooner than batch 32, at least 4.00 times than the largest batch" in text
    assert "0.67 times the better one's time" in text
    assert "**hold**" in text
    # 60 s of profiling, 20 s saved a job, 4 s an epoch
    assert "after 3.0 such jobs, or 15 epochs" in text
    assert "takes 1.67 times as long" in text
    assert "| 90.0 | 89.0 | 5% |" in text
    assert "| at least 4.0 times | 0.67 | 60 s once |" in short.read_text()


def test_a_decision_that_is_no_better_says_so(end_to_end: ModuleType, tmp_path: Path) -> None:
    rows = [*lines_of("small", 60), *lines_of("largest", 160), *lines_of("tula", 64)]
    write(tmp_path, rows)
    done = ran(end_to_end, "report", "--task", "fashion_mnist", "--results", tmp_path)
    assert "**do not hold**" in done.output
    assert "It does not pay for itself here" in done.output


def test_missing_runs_are_named(end_to_end: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, lines_of("small", 60))
    words = ["report", "--task", "fashion_mnist", "--results", str(tmp_path)]
    done = CliRunner().invoke(end_to_end.main, words)
    assert done.exit_code != 0
    assert "lacks runs of largest" in done.output


def test_the_order_of_the_ways_rotates(end_to_end: ModuleType, tmp_path: Path) -> None:
    words = ["run", "--plan", "--task", "fashion_mnist", "--results", tmp_path, "--work", tmp_path]
    lines = ran(end_to_end, *words).output.splitlines()
    assert lines[:2] == ["fashion_mnist: largest batch that fits", "fashion_mnist: profile"]
    first = [line.split()[1] for line in lines[2::3]]
    assert first == ["small,", "largest,", "tula,"]


@pytest.mark.long
def test_three_ways_on_small_input(end_to_end: ModuleType, tmp_path: Path) -> None:
    place = ["--task", "tiny", "--results", tmp_path / "results", "--work", tmp_path / "work"]
    ran(end_to_end, "run", *place)
    rows = [json.loads(line) for line in (tmp_path / "results" / "tiny.jsonl").open()]
    assert [row["piece"] for row in rows] == ["largest", "profile", *["train"] * 3]
    chosen = next(row for row in rows if row["piece"] == "profile")["batch_size"]
    batches = {row["way"]: row["batch_size"] for row in rows if row["piece"] == "train"}
    assert batches == {"small": 32, "largest": 256, "tula": chosen}
    assert all(0 <= row["test_accuracy"] <= 1 for row in rows if row["piece"] == "train")
    # nothing is run twice, and --next says that nothing is left
    done = CliRunner().invoke(end_to_end.main, ["run", "--next", *map(str, place)])
    assert (done.exit_code, done.output) == (3, "")


@pytest.mark.long
def test_cost_of_profiling_on_small_input(profiling_cost: ModuleType, tmp_path: Path) -> None:
    place = ["--results", tmp_path, "--models", "squeezenet1_1"]
    small = ["--largest", 32, "--world-sizes", "1"]
    ran(profiling_cost, "measure", "--next", *place, *small)
    assert [path.name for path in tmp_path.iterdir()] == ["squeezenet1_1-partial.json"]
    done = CliRunner().invoke(profiling_cost.main, ["report", *map(str, place)])
    assert "squeezenet1_1-full.json is not there: run `measure` first" in done.output
    ran(profiling_cost, "measure", *place, *small)
    text = ran(profiling_cost, "report", *place).output
    assert "of full search; mean regret of the fastest" in text
    assert "| squeezenet1_1 |" in text
