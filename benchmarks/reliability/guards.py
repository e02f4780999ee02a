"""Take each complaint's guard out, and see its test fail.

    python benchmarks/reliability/guards.py [--short] [--only composer]

A copy of the repository is changed at one guard at a time (guard_list.py), and the test named after
the thread is run there. A test that passes without its guard is worth nothing, and counts as lost.
tests/test_complaints_threads.py checks that every change still finds its place.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from facts import FOLDER, Outcome, Recorder
from guard_list import GUARDS, Guard

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("mlflow_tula", "tests", "MLproject", "conda.yaml", "pyproject.toml", "README.md", "docs")


def missing(root: Path) -> list[str]:
    """Guards whose place is no longer there, or is there more than once."""
    found = []
    for one in GUARDS:
        for name, old, _ in one.changes:
            count = (root / name).read_text(encoding="utf-8").count(old)
            if count != 1:
                found.append(f"{one.thread}: {count} times in {name}: {old[:60]!r}")
    return found


def try_one(one: Guard, copy: Path, timeout_s: float) -> Outcome:
    """Change the copy, run the test, put the copy back."""
    before = {name: (copy / name).read_text(encoding="utf-8") for name, _, _ in one.changes}
    try:
        for name, old, new in one.changes:
            text = (copy / name).read_text(encoding="utf-8")
            (copy / name).write_text(text.replace(old, new), encoding="utf-8")
        code, told = run_test(one, copy, timeout_s)
    finally:
        for name, text in before.items():
            (copy / name).write_text(text, encoding="utf-8")
    failed = code == 1
    return Outcome(
        part="guards",
        case=one.thread,
        kind="check",
        survived=int(failed),
        lost=int(not failed),
        detail=told if failed else f"the test passed, or did not run (exit {code}): {told}",
    )


def run_test(one: Guard, copy: Path, timeout_s: float) -> tuple[int, str]:
    """Exit code of pytest, and the first line of the failure; a hang is a failure too."""
    words = ["-q", "-x", "-p", "no:cacheprovider", "--tb=short", "--show-capture=no"]
    words += ["--timeout", f"{timeout_s:.0f}", one.file, "-k", one.select]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    told = [line[1:].strip() for line in done.stdout.splitlines() if re.match(r"E\s", line)]
    return done.returncode, (told or [done.stdout.strip()[-160:]])[0][:160]


def main() -> int:
    """Take out one guard after the other; 1 where a test did not fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="every eighth guard")
    parser.add_argument("--only", default="", help="threads that hold this text")
    parser.add_argument("--timeout", type=float, default=150.0)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    given = parser.parse_args()
    chosen = [one for one in GUARDS if given.only in one.thread]
    with (
        Recorder("guards", short=given.short, folder=given.folder) as record,
        tempfile.TemporaryDirectory(prefix="tula-guards-") as scratch,
    ):
        copy = Path(scratch)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(
                    ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                shutil.copy(ROOT / name, copy / name)
        for one in chosen[:: 8 if given.short else 1]:
            outcome = try_one(one, copy, given.timeout)
            record(outcome)
            print(f"{one.thread}: {'failed' if outcome.survived else 'PASSED'}: {outcome.detail}")
    return record.exit_code


if __name__ == "__main__":
    sys.exit(main())
