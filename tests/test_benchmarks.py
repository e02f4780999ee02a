"""The benchmarks run on a folder of CSVs; the numbers here are synthetic, only the way counts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SIZES = 2 ** np.arange(3, 11)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("published")
    step = np.maximum(0.02, 0.003 + 5e-4 * SIZES)
    rows = [
        {
            "source": "adaptdl-synthetic",
            "model": "net",
            "hardware": "t4",
            "nodes": nodes,
            "devices": nodes,
            "homogeneous": 1,
            "local_batch_size": size,
            "step_time_s": seconds + 0.01 * np.log2(nodes),
            "sync_time_s": 0.01 * np.log2(nodes),
        }
        for nodes in (1, 2, 4, 8, 16)
        for size, seconds in zip(SIZES, step, strict=True)
    ]
    pd.DataFrame(rows).to_csv(path / "step_times.csv", index=False)
    pd.DataFrame(
        {
            "hardware": "v100",
            "task": "digits/net",
            "global_batch_size": SIZES,
            "epoch_time_s": 1e5 / SIZES * step,
        }
    ).to_csv(path / "epoch_times.csv", index=False)
    pd.DataFrame(
        {
            "source": "zeus-nsdi23",
            "task": "digits/net",
            "version_or_target": 0.9,
            "global_batch_size": SIZES,
            "epochs_to_target": 10 * (1 + SIZES / 100),
            "std": 0.1,
            "runs_total": 4,
            "runs_reached": 4,
        }
    ).to_csv(path / "convergence.csv", index=False)
    pd.DataFrame(
        {
            "source": "x",
            "model": "net",
            "local_batch_size": SIZES,
            "peak_memory_bytes": 2**30 + SIZES * 2**24,
        }
    ).to_csv(path / "memory.csv", index=False)
    return path


def run(script: str, *options: str | Path) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_accuracy_prints_every_claim_and_writes_markdown(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "accuracy.md"
    text = run("accuracy.py", "--data", folder, "--markdown", page)
    for claim in (
        "step time, between",
        "step time, beyond",
        "step time, nodes {1,4,16}",
        "peak memory, beyond",
        "epochs to target, inside",
        "time to target, unseen size",
        "Regret of the recommended batch size",
    ):
        assert claim in text
        assert claim in page.read_text(encoding="utf-8")


def test_a_folder_without_tables_is_said(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "accuracy.py"), "--data", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "holds none of step_times.csv" in done.stderr


@pytest.mark.slow
def test_search_curve_compares_four_orders(folder: Path, tmp_path: Path) -> None:
    figure = tmp_path / "regret.png"
    text = run("search_curve.py", "--data", folder, "--plot", figure, "--max-sizes", "6")
    assert all(order in text for order in ("adaptive", "geometric", "ends first", "random"))
    assert figure.stat().st_size > 10_000


@pytest.mark.slow
def test_knee_rules_compares_both(folder: Path) -> None:
    text = run("knee_rules.py", "--data", folder)
    assert "kneedle" in text
    assert "diminishing_returns" in text


@pytest.mark.slow
def test_logging_speed_prints_a_row_a_store(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "logging_speed.py"), "--repeats", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    # 1: slower than the limit, which a busy machine may be.
    assert done.returncode in (0, 1), done.stderr
    assert "| sqlite | " in done.stdout
    assert "| http | " in done.stdout
