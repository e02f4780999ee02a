from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import netns
import pytest
from click.testing import CliRunner

ROOT = Path(__file__).parents[1]
WHY_NOT = netns.missing()


@pytest.fixture(scope="module")
def distributed():
    """The script as a module."""
    path = ROOT / "benchmarks" / "distributed.py"
    spec = importlib.util.spec_from_file_location("distributed_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_recorded_rounds_give_the_page(distributed, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    done = CliRunner().invoke(distributed.main, ["report", "--markdown", str(page)])
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert "| two-node probes of other sizes | 1Gbit/s | 16 |" in text
    assert "| communication probe and one node | 200Mbit/s | 8 |" in text
    assert "The communication probe took" in text
    assert "beyond their limit: 0 step times, 0 choices, 0 probes" in done.output


def test_records_that_are_missing_are_named(distributed, tmp_path: Path) -> None:
    done = CliRunner().invoke(distributed.main, ["report", "--records", str(tmp_path)])
    assert done.exit_code != 0
    assert "holds no resnet18-alone-*.json: run `measure` first" in str(done.output)


def test_the_recorded_rounds_of_fsdp_give_their_page(tmp_path: Path) -> None:
    """Its exit code says whether every figure is within its limit: the page does as well."""
    page = tmp_path / "page.md"
    script = ROOT / "benchmarks" / "sharded.py"
    done = subprocess.run(
        [sys.executable, str(script), "--markdown", str(page)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "beyond their limit: " in done.stdout, done.stderr
    text = page.read_text()
    assert "| communication probe and one node | 200Mbit/s | 8 |" in text
    assert "Allocated MB of a rank" in text


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there are namespaces")
@pytest.mark.long
@pytest.mark.parametrize(("kind", "rows"), [("fsdp", 1), ("options", 4)])
def test_a_small_measurement_of_another_kind(
    distributed, tmp_path: Path, kind: str, rows: int
) -> None:
    words = ["measure", "--piece", "1Gbit", "--model", "squeezenet1_1", "--sizes", "4"]
    done = CliRunner().invoke(
        distributed.main, [*words, "--kind", kind, "--records", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / f"squeezenet1_1-{kind}-1Gbit-1.json").read_text())
    found = record["table"]["measurements"]
    assert [row["nodes"] for row in found] == [2] * rows
    assert {row.get("status", "ok") for row in found} == {"ok"}


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there are namespaces")
@pytest.mark.slow
def test_a_small_measurement_runs(distributed, tmp_path: Path) -> None:
    words = ["measure", "--piece", "1Gbit", "--model", "squeezenet1_1", "--sizes", "4,8"]
    done = CliRunner().invoke(distributed.main, [*words, "--records", str(tmp_path)])
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "squeezenet1_1-1Gbit-1.json").read_text())
    assert [row["nodes"] for row in record["table"]["measurements"]] == [2, 2]
    assert len(record["link_probe_s"]) == 1
