"""Folders that ranks and their caller share, in the temporary one; those of killed callers go.

The owner holds a lock in its folder while it lives. A process that was killed could remove
nothing: whoever makes the next folder finds the lock free, and removes it. A lock, because process
numbers mean nothing between containers that share a folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from filelock import FileLock, Timeout

PREFIXES = ("tula-ranks-", "tula-probes-", "tula-node-")
LOCK_NAME = "owner.lock"
_YOUNG_S = 60.0
"""A folder may be without its lock for a moment after it was made."""

_held: dict[Path, FileLock] = {}


def make_folder(prefix: str) -> Path:
    """A new folder that is this process's while it lives; what dead ones left is removed first."""
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    lock = FileLock(folder / LOCK_NAME)
    with contextlib.suppress(OSError, NotImplementedError):  # a file system without locks
        lock.acquire(timeout=0)
        _held[folder] = lock
    return folder


def remove_folder(folder: Path) -> None:
    """Remove a folder of `make_folder`."""
    lock = _held.pop(folder, None)
    if lock is not None:
        lock.release()
    shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Remove the folders of this person's processes that are gone."""
    place = Path(tempfile.gettempdir())
    for prefix in PREFIXES:
        for folder in place.glob(f"{prefix}*"):
            with contextlib.suppress(OSError, Timeout, NotImplementedError):
                if _may_be_stale(folder):
                    with FileLock(folder / LOCK_NAME, timeout=0):
                        shutil.rmtree(folder, ignore_errors=True)


def _may_be_stale(folder: Path) -> bool:
    """A folder of this person's, not a link to one, old enough to have its lock, and with it."""
    facts = folder.lstat()
    mine = not hasattr(os, "getuid") or facts.st_uid == os.getuid()
    old = time.time() - facts.st_mtime > _YOUNG_S
    return mine and old and (folder / LOCK_NAME).is_file() and not folder.is_symlink()
