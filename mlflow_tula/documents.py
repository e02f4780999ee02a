"""JSON and CSV from outside: read with limits, so that no file can hang, exhaust or confuse us.

    parse_json(text, name)   text -> plain values: limits on bytes and depth; no NaN, no doubled key
    check_plain(data, name)  plain values within limits of depth, count, length and size
    check_document(...)      a plain document of one kind, of a schema that this version can read
    read_csv(path, ...)      a CSV file -> a frame: limits on bytes and columns, never a URL

What a document means is checked by the `from_dict` of its dataclass.
"""

from __future__ import annotations

import io
import json
import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow_tula.errors import SchemaError, TableError

if TYPE_CHECKING:
    import pandas as pd

MAX_JSON_BYTES = MAX_CSV_BYTES = 64 * 2**20
MAX_COLUMNS = 200
MAX_DEPTH = 24
MAX_VALUES = 3_000_000
"""Twice what a table of 100,000 full rows holds is still below."""
MAX_TEXT = 20_000
MAX_WHOLE = 2**63 - 1
_SHOWN = 60


def shown(value: object) -> str:
    """A value as a message shows it: short, on one line, whatever it is."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**30:
        return f"a whole number of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:  # a stranger's __repr__ must not hide what is wrong
        return f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def shown_names(names: Iterable[object]) -> str:
    """Some names in a message: a dozen, each short."""
    given = [str(name) for name in names]
    more = f", ... ({len(given)} in all)" if len(given) > 12 else ""
    return ", ".join(shown(name) for name in given[:12]) + more


def parse_json(text: str | bytes, name: str) -> Any:
    """The plain values of a JSON text.

    Args:
        text: at most MAX_JSON_BYTES.
        name: what it is, as a message names it.

    Raises:
        SchemaError: not JSON, too large or too deep; a number that is not finite; a key that
            stands twice (which of the two would count?).
    """
    if len(text) > MAX_JSON_BYTES:
        raise SchemaError(f"{name} is larger than {MAX_JSON_BYTES // 2**20} MiB; not read")
    try:
        data = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except SchemaError as error:
        raise SchemaError(f"{name} is damaged: {error}") from error
    except RecursionError as error:
        raise SchemaError(f"{name} is nested deeper than {MAX_DEPTH} levels; not read") from error
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, and integers without end
        reason = str(error).splitlines()[0][:200]
        raise SchemaError(f"{name} is not JSON: {reason}") from error
    check_plain(data, name)
    return data


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of distinct keys."""
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise SchemaError(f"the key {shown(twice)} stands twice")
    return found


def _no_constant(word: str) -> Any:
    raise SchemaError(f"{word} is no JSON number; leave out what was not measured")


def check_plain(data: object, name: str) -> None:
    """Raise SchemaError unless `data` is made of plain JSON values within the limits."""
    level: list[object] = [data]
    total = 0
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for value in level:
            if isinstance(value, Mapping):
                for key in value:
                    if not isinstance(key, str):
                        raise SchemaError(f"{name} has the key {shown(key)}, which is no text")
                    _check_leaf(key, name)
                below.extend(value.values())
            elif isinstance(value, (list, tuple)):
                below.extend(value)
            else:
                _check_leaf(value, name)
        total += len(level)
        if total + len(below) > MAX_VALUES:
            raise SchemaError(f"{name} holds more than {MAX_VALUES:,} values; not read")
        if not below:
            return
        level = below
    raise SchemaError(f"{name} is nested deeper than {MAX_DEPTH} levels; not read")


def _check_leaf(value: object, name: str) -> None:
    """Raise SchemaError unless the value is None, a bool, a short text or a sane number."""
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, str):
        if len(value) > MAX_TEXT:
            raise SchemaError(f"{name} holds a text of {len(value):,} characters; not read")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            wrong = f"{name} holds a text that is no valid Unicode: {shown(value)}"
            raise SchemaError(wrong) from error
    elif isinstance(value, int):
        if abs(value) > MAX_WHOLE:
            raise SchemaError(f"{name} holds {shown(value)}; at most 64 bits are read")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise SchemaError(f"{name} is damaged: the number {value} is not finite")
    else:
        raise SchemaError(f"{name} holds a {type(value).__name__}, which is no JSON value")


def check_document(data: object, *, kind: str, version: int) -> None:
    """Raise SchemaError unless `data` is a document of this kind that this version can read."""
    if not isinstance(data, Mapping):
        raise SchemaError(f"a {kind} document must be a JSON object, not {type(data).__name__}")
    found = data.get("kind", kind)
    if found != kind:
        raise SchemaError(f"expected a {kind} document, not {shown(found)}")
    number = data.get("schema_version")
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise SchemaError(f"a {kind} document needs a schema_version, not {shown(number)}")
    if number > version:
        raise SchemaError(
            f"schema_version {shown(number)} of this {kind} is newer than {version}, the newest "
            "this mlflow_tula reads: upgrade with `pip install -U mlflow-tula`"
        )
    check_plain(data, f"this {kind} document")


def read_bytes(path: str | Path, limit: int) -> bytes:
    """What a file holds; `limit` + 1 bytes of a larger one (a device or a pipe has no size).

    Raises:
        OSError: it cannot be read.
    """
    # A name with a zero byte is a ValueError of `open`, and no file either.
    try:
        with Path(path).open("rb") as stream:
            return stream.read(limit + 1)
    except ValueError as error:
        raise OSError(str(error)) from error


def read_csv(path: str | Path, *, max_rows: int, name: str = "") -> pd.DataFrame:
    """Read a CSV file of this machine: a path is never taken for a URL, nothing is unpacked.

    Args:
        path: the file.
        max_rows: one row more than this may come back, for the caller to refuse.
        name: what the file is, as a message names it, such as the option; the path alone if empty.

    Raises:
        TableError: it cannot be read, is too large, or is no table.
    """
    import pandas as pd

    label = f"{name} {path}".strip()
    try:
        content = read_bytes(path, MAX_CSV_BYTES)
    except OSError as error:
        raise TableError(f"cannot read {label} as CSV: {error.strerror or error}") from error
    if len(content) > MAX_CSV_BYTES:
        raise TableError(f"{label} is larger than {MAX_CSV_BYTES // 2**20} MiB; not read")
    header = content.lstrip()[:MAX_TEXT].splitlines()[:1]
    if b"\0" in content or (header and len(header[0]) >= MAX_TEXT):
        raise TableError(f"cannot read {label} as CSV: it is no text with a short first line")
    if header and header[0].count(b",") >= MAX_COLUMNS:
        raise TableError(f"{label} has more than {MAX_COLUMNS} columns; not read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # columns of mixed types: each cell is checked
            frame = pd.read_csv(
                io.BytesIO(content), skipinitialspace=True, nrows=max_rows + 1, low_memory=False
            )
    except pd.errors.EmptyDataError as error:
        raise TableError(f"{label} is empty; give a header and one row a batch size") from error
    except (ValueError, OverflowError, pd.errors.ParserError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise TableError(f"cannot read {label} as CSV: {reason}") from error
    if not isinstance(frame.index, pd.RangeIndex):
        raise TableError(f"cannot read {label} as CSV: its rows have more cells than its header")
    return frame
