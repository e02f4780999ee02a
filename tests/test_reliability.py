"""The reliability campaign's own scripts, in their short form; docs/reliability.md has the full."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parent.parent / "benchmarks" / "reliability"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(CAMPAIGN / script), *arguments],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


@pytest.mark.long
def test_every_command_survives_a_kill(tmp_path):
    done = run("crash.py", "--short", "--seed", "3", "--results", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "crash.jsonl").read_text().splitlines()]
    killed = {one["case"].split(",")[0]: one for one in lines if "case" in one}
    assert set(killed) == {"main", "profile", "train", "register"}
    assert all(one["survived"] == 1 for one in killed.values())


@pytest.mark.long
@pytest.mark.parametrize("case", ["store_of_an_older_schema", "output_cannot_be"])
def test_a_store_or_folder_that_cannot_be_used(case, tmp_path):
    done = run("stores.py", "--short", "--only", case, "--results", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_the_other_cases_of_stores_and_the_soak(tmp_path):
    for script in ("stores.py", "soak.py"):
        done = run(script, "--short", "--results", str(tmp_path))
        assert done.returncode == 0, done.stdout + done.stderr


OUTCOME = {
    "part": "crash",
    "case": "train, SIGKILL",
    "injected": 2,
    "survived": 2,
    "lost": 0,
    "detail": "",
    "kind": "fault",
}
HEAD = {
    "header": True,
    "part": "crash",
    "short": False,
    "seed": 0,
    "date": "2026-01-01 00:00 UTC",
    "machine": "m",
    "python": "3.11",
    "versions": {"mlflow": "3"},
}
END = {"end": True, "seconds": 3.0, "broken": ""}


@pytest.mark.parametrize(
    ("lines", "code", "words"),
    [
        ([HEAD, OUTCOME, OUTCOME, END], 0, "| crash: train, SIGKILL | 4 | 4 | 0 |"),
        ([HEAD, OUTCOME | {"survived": 1, "lost": 1, "detail": "a | b"}, END], 1, "| a / b |"),
        ([HEAD, OUTCOME], 1, "broke off: it did not come to its end"),
        ([HEAD, OUTCOME | {"kind": "input", "injected": 9, "survived": 9}, END], 0, "| inputs |"),
    ],
)
def test_the_report_adds_up_and_says_what_was_lost(lines, code, words, tmp_path):
    (tmp_path / "crash.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run("report.py", "--folder", str(tmp_path), "--markdown", str(tmp_path / "page.md"))
    assert done.returncode == code, done.stderr
    assert words in done.stdout
    assert words in (tmp_path / "page.md").read_text()


def test_an_empty_campaign_is_no_success(tmp_path):
    done = run("report.py", "--folder", str(tmp_path))
    assert done.returncode == 1
    assert "make reliability" in done.stderr
