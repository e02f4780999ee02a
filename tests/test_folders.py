"""Folders that ranks and their caller share in the temporary one: kept, and swept."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from mlflow_tula.launch import folders
from mlflow_tula.launch.folders import LOCK_NAME, make_folder, remove_folder

MAKE = (
    "from mlflow_tula.launch.folders import make_folder\n"
    "import time\n"
    "folder = make_folder('tula-ranks-')\n"
    "(folder / 'log.txt').write_text('words')\n"
    "print(folder, flush=True)\n"
    "time.sleep(60)\n"
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of this test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def aged(folder: Path) -> Path:
    """The folder as if it had been made two minutes ago."""
    then = time.time() - 120
    os.utime(folder, (then, then))
    return folder


def test_a_folder_lives_as_long_as_its_owner(place: Path) -> None:
    folder = make_folder("tula-ranks-")
    (folder / "log.txt").write_text("words")
    aged(folder)
    second = make_folder("tula-probes-")
    assert (folder / "log.txt").exists(), "its owner, this process, lives"
    for one in (folder, second):
        remove_folder(one)
    assert not any(place.iterdir())


def test_what_a_killed_process_left_goes_with_the_next_start(place: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(place)}
    owner = subprocess.Popen(
        [sys.executable, "-c", MAKE], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    with owner.stdout:
        left = Path(owner.stdout.readline().strip())
    aged(left)
    folders.sweep()
    assert left.is_dir(), "its owner lives"
    owner.kill()
    owner.wait()
    mine = make_folder("tula-ranks-")
    assert not left.exists()
    remove_folder(mine)


def test_what_is_not_surely_stale_stays(place: Path) -> None:
    young, without, other = (place / name for name in ("tula-ranks-1", "tula-node-2", "tula-own-3"))
    for folder in (young, without, other):
        folder.mkdir()
    (young / LOCK_NAME).touch()
    (other / LOCK_NAME).touch()
    outside = place / "outside"
    outside.mkdir()
    (outside / LOCK_NAME).touch()
    (place / "tula-ranks-link").symlink_to(outside)
    for folder in (without, other, outside):
        aged(folder)
    folders.sweep()
    assert all(folder.is_dir() for folder in (young, without, other, outside))
