"""JSON files: written whole or not at all, read with a size limit and one-line errors."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow_tula.documents import MAX_JSON_BYTES, parse_json, read_bytes
from mlflow_tula.errors import InvalidInputError, SchemaError, StoreError


def write_json(path: str | Path, document: Mapping[str, Any]) -> Path:
    """Write beside the target, flush to disk, and rename: a reader sees the old file or the new.

    Raises:
        StoreError: the folder or the file cannot be written.
    """
    target = Path(path)
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        reason = error.strerror or error
        raise StoreError(f"cannot write {target}: {reason}; choose another --output-dir") from error
    return target


def remove_partial(path: str | Path) -> None:
    """Delete what killed writers of this file left beside it; only where no other one writes."""
    target = Path(path)
    for left in target.parent.glob(f".{target.name}.*"):
        left.unlink(missing_ok=True)


def read_json(path: str | Path, *, made_by: str) -> dict[str, Any]:
    """Read one JSON object.

    Args:
        path: the file.
        made_by: the command that makes such a file, for the message when there is none.

    Raises:
        InvalidInputError: the file is absent or cannot be read.
        SchemaError: it is too large, or not a JSON object.
    """
    target = Path(path)
    try:
        content = read_bytes(target, MAX_JSON_BYTES)
    except FileNotFoundError as error:
        raise InvalidInputError(f"there is no {target}: make it with `{made_by}`") from error
    except OSError as error:
        raise InvalidInputError(f"cannot read {target}: {error.strerror or error}") from error
    try:
        document = parse_json(content, str(target))
    except SchemaError as error:
        raise SchemaError(f"{error}; make it with `{made_by}`") from error
    if not isinstance(document, dict):
        raise SchemaError(f"{target} must hold a JSON object, not a {type(document).__name__}")
    return document
