"""Checkpoints that survive a kill at any instant, and that only the same training can resume.

    checkpoint.pt             the newest one that was written in full
    checkpoint.previous.pt    the one before it
    .checkpoint.<pid>.tmp     being written; never read

A file is written under a temporary name, flushed to the disk and renamed, so that a reader finds
the old or the new one and never half of one. Files are read with `weights_only=True`: a pickle
that would run code is refused. What a checkpoint belongs to (`identity`: job, batch plan, number
of epochs) is stored inside it as JSON, and another identity is refused with the field's name.
torch is imported when a file is written or read: the parent process only looks and removes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import random
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlflow_tula.errors import InvalidInputError, SchemaError, StoreError

if TYPE_CHECKING:
    import torch

CHECKPOINT_KIND = "tula.checkpoint"
CHECKPOINT_SCHEMA_VERSION = 1
CHECKPOINT_NAME = "checkpoint.pt"
PREVIOUS_NAME = "checkpoint.previous.pt"

_UNREADABLE = (OSError, RuntimeError, ValueError, EOFError, zipfile.BadZipFile)

_logger = logging.getLogger(__name__)


def save_checkpoint(folder: Path, state: Mapping[str, Any], *, identity: Mapping[str, Any]) -> Path:
    """Write `state` as the newest checkpoint of `folder` and keep the one before it.

    Args:
        folder: exists.
        state: tensors, numbers, strings, None, and dicts, lists and tuples of them.
        identity: plain JSON; what a later training must share to resume from this file.

    Raises:
        InvalidInputError: `state` holds what could not be read back with `weights_only=True`.
        StoreError: the disk does not take it; the checkpoints before are untouched.
    """
    import torch

    document = {
        "kind": CHECKPOINT_KIND,
        "schema_version": CHECKPOINT_SCHEMA_VERSION,
        "identity": json.dumps(identity, sort_keys=True),
        "state": _plain(state, "state"),
    }
    newest = folder / CHECKPOINT_NAME
    partial = folder / f".checkpoint.{os.getpid()}.tmp"
    try:
        partial.unlink(missing_ok=True)
        # "x": never through a link that somebody left under this name
        with partial.open("xb") as file:
            torch.save(document, file)
            file.flush()
            os.fsync(file.fileno())
        # Between these two renames only the previous one exists, which `load_checkpoint` takes.
        if newest.exists():
            newest.replace(folder / PREVIOUS_NAME)
        partial.replace(newest)
        _sync_folder(folder)
    except (OSError, RuntimeError) as error:
        # torch.save reports a full disk as a RuntimeError of its own writer.
        partial.unlink(missing_ok=True)
        raise StoreError(
            f"cannot write the checkpoint {newest}: {_first_line(error)}; free some space or give "
            "another output folder"
        ) from error
    return newest


def load_checkpoint(folder: Path, *, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of the newest readable checkpoint of `folder`, on the CPU; None without any.

    A newest one that is damaged is passed over with a warning, and the one before it is taken.

    Raises:
        InvalidInputError: it belongs to another training; names what differs.
        SchemaError: it was written by a newer version.
        StoreError: there are checkpoints, and none of them can be read.
    """
    reasons = []
    for name in (CHECKPOINT_NAME, PREVIOUS_NAME):
        path = folder / name
        if not path.exists():
            continue
        try:
            document = _read(path)
        except _UNREADABLE as error:
            reasons.append(f"{name}: {_first_line(error)}")
            _logger.warning("%s cannot be read and is passed over: %s", path, _first_line(error))
            continue
        _check_identity(path, document, identity)
        state: dict[str, Any] = document["state"]
        return state
    if reasons:
        raise StoreError(
            f"no checkpoint of {folder} can be read ({'; '.join(reasons)}): start anew without "
            "resuming, or give another output folder"
        )
    return None


def has_checkpoint(folder: Path) -> bool:
    """Whether there is a whole checkpoint, readable or not."""
    return any((folder / name).exists() for name in (CHECKPOINT_NAME, PREVIOUS_NAME))


def remove_checkpoints(folder: Path) -> None:
    """Delete the checkpoints of `folder`, whole and partial ones."""
    for path in (folder / CHECKPOINT_NAME, folder / PREVIOUS_NAME):
        path.unlink(missing_ok=True)
    remove_partial(folder)


def remove_partial(folder: Path) -> None:
    """Delete what killed writers left behind; call it only where no other training runs."""
    for path in folder.glob(".checkpoint.*.tmp"):
        path.unlink(missing_ok=True)


def identity_difference(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """The first difference of two identities as `field: saved, not wanted`, or None."""
    for name in sorted({*saved, *wanted}):
        old, new = saved.get(name), wanted.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            inner = identity_difference(old, new)
            if inner is not None:
                return inner
        elif old != new:
            return f"{name}={old!r}, not {new!r}"
    return None


def training_difference(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """`identity_difference` of two trainings: of their batch plans the global size alone counts.

    How a global batch is cut among ranks and passes changes nothing that a step computes, so that
    a training may go on with fewer ranks, or more.
    """

    def kept(identity: Mapping[str, Any]) -> dict[str, Any]:
        plan = identity.get("plan")
        if not isinstance(plan, Mapping):
            return dict(identity)
        return {**identity, "plan": {"global_batch_size": plan.get("global_batch_size")}}

    return identity_difference(kept(saved), kept(wanted))


def weights_digest(state: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes of a model's `state_dict`."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def capture_rng(device: torch.device) -> dict[str, Any]:
    """The state of every random generator a training step may draw from, in plain types."""
    import torch

    version, keys, gauss = random.getstate()
    name, numpy_keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": [version, list(keys), gauss],
        "numpy": [
            str(name),
            [int(key) for key in numpy_keys],
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }


def restore_rng(state: Mapping[str, Any], device: torch.device) -> None:
    """Inverse of `capture_rng`."""
    import torch

    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, numpy_keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(  # noqa: NPY002
        (name, np.array(numpy_keys, dtype=np.uint32), position, has_gauss, cached)
    )


def _read(path: Path) -> dict[str, Any]:
    """The document of one file, or an error of the kinds that `load_checkpoint` passes over."""
    import torch

    with zipfile.ZipFile(path) as archive:
        # torch writes checksums and does not look at them when it reads.
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"{damaged} does not match its checksum")
    try:
        document = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError("it holds more than tensors, numbers and strings") from error
    if not isinstance(document, dict) or document.get("kind") != CHECKPOINT_KIND:
        raise ValueError("it is not a checkpoint of mlflow_tula")
    parts = {"schema_version": int, "identity": str, "state": dict}
    if not all(isinstance(document.get(name), kind) for name, kind in parts.items()):
        raise ValueError("it is no whole checkpoint of mlflow_tula")
    return document


def _check_identity(path: Path, document: dict[str, Any], identity: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of a newer schema or of another training."""
    version = document.get("schema_version", 0)
    if version > CHECKPOINT_SCHEMA_VERSION:
        raise SchemaError(
            f"{path} has schema_version {version}, newer than {CHECKPOINT_SCHEMA_VERSION}, the "
            "newest this mlflow_tula reads: upgrade with `pip install -U mlflow-tula`"
        )
    wanted = json.loads(json.dumps(identity))
    difference = training_difference(json.loads(document["identity"]), wanted)
    if difference is not None:
        raise InvalidInputError(
            f"{path} belongs to another training ({difference}): give another output folder, or "
            "start anew without resuming"
        )


def _plain(value: Any, where: str) -> Any:
    """`value` with numpy scalars as numbers; what `weights_only` would refuse is an error."""
    import torch

    if isinstance(value, np.generic):  # before float, which numpy's float64 is as well
        return value.item()
    if value is None or isinstance(value, torch.Tensor) or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item, f"{where}[{number}]") for number, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    raise InvalidInputError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: keep tensors, "
        "numbers and strings in the model's and the optimizer's state"
    )


def _sync_folder(folder: Path) -> None:
    """Make the renames themselves durable, where the system lets a folder be opened."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(error: BaseException) -> str:
    """The first line that says something, shortened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
