"""The campaign of failing ranks and links (benchmarks/reliability/ranks.py), shortened."""

import json
import subprocess
import sys
from pathlib import Path

import netns
import pytest

from mlflow_tula.hardware import detect

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "reliability" / "ranks.py"
TWO_RANKS = pytest.mark.skipif(
    detect("cpu").devices_per_node < 2, reason="two ranks need two cores"
)


def outcomes(folder: Path, *arguments: str) -> list[dict[str, object]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments, "--results", str(folder)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (folder / "ranks.jsonl").read_text().splitlines()]
    return [line for line in lines if "case" in line]


@TWO_RANKS
@pytest.mark.long
def test_a_killed_rank_is_a_row_and_the_sweep_goes_on(tmp_path: Path) -> None:
    (found,) = outcomes(tmp_path, "--only", "profile: kill on one of 2")
    assert (found["survived"], found["lost"]) == (1, 0)
    assert "rank 1: killed by SIGKILL" in str(found["detail"])


@TWO_RANKS
@pytest.mark.long
@pytest.mark.skipif(bool(netns.missing()), reason=netns.missing() or "there are namespaces")
def test_kills_and_a_cut_link_end_clean(tmp_path: Path) -> None:
    found = outcomes(tmp_path, "--short")
    assert [row["lost"] for row in found] == [0, 0, 0]
