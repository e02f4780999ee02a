"""Hypothesis strategies: documents, tables, command lines and requests that somebody may send.

Most are a real one with a few changes (a value of another kind, a key that is gone or doubled, a
flipped byte): they get past the first check and reach the code behind it. The rest is made up.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

SECRET = "hunter2"  # a marker that must never be seen again, not a password of anything

NUMBERS = (0, -1, 1, 2, 3, 2**31, 2**53 + 1, 2**63, 10**13, 10**30, 10**400, -(10**400), 0.5, -0.0)
NUMBERS += (1e-9, 1e9, 1e18, 1e19, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf)
TEXTS = (
    "",
    " ",
    "NaN",
    "nan",
    "inf",
    "None",
    "null",
    "1",
    "-1",
    "1.5",
    "1e5",
    "0x10",
    "1_000",
    "１２",
)
TEXTS += ("auto", "none", "true", "cpu", "ok", "oom", "devices", "..", "../../etc/passwd", "/", "~")
TEXTS += ("a,b", '"', "'", "'; DROP TABLE runs;--", "{x}", "%s%n", "<script>", "\x00", "\ud800")
TEXTS += (
    "日本語",
    "e\u0301",
    "\u202eabc",
    "\U0001f600",
    "x" * 130,
    "x" * 25_000,
    "\n",
    "\r\n",
    "\t",
)
BRANCHES: tuple[Any, ...] = (
    [],
    {},
    [[]],
    [None],
    {"a": 1},
    [1, "a", None],
    [[1, 2], [3]],
    [[1, 2, 3, 4]],
)


def nested(depth: int) -> Any:
    """Lists in lists."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


WEIRD = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.none(),
    st.booleans(),
    st.sampled_from(BRANCHES).map(copy.deepcopy),
    st.integers(-5, 10**6),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from([5, 23, 25, 150]).map(nested),
)
CELLS = st.one_of(st.integers(1, 4096), st.floats(1e-6, 1e3), WEIRD)


@st.composite
def changed(draw: st.DrawFn, document: Any, *, most: int = 3) -> Any:
    """A copy of a JSON document with one to `most` changes somewhere inside."""
    made = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, most))):
        made = _change(draw, made)
    return made


def _change(draw: st.DrawFn, document: Any) -> Any:
    """One change, at a place that is found by going down at random."""
    place, key, value = None, None, document
    while isinstance(value, (dict, list)) and value:
        if place is not None and draw(st.integers(0, 5)) == 0:
            break
        place = value
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = draw(st.sampled_from(keys))
        value = value[key]
    if place is None:
        return draw(WEIRD)
    kind = draw(st.sampled_from(("weird", "weird", "scale", "drop", "add", "text", "repeat")))
    if kind == "drop":
        del place[key]
    elif kind == "add" and isinstance(place, dict):
        place[draw(st.sampled_from((*TEXTS, "surprise", "kind", "schema_version")))] = draw(WEIRD)
    elif kind == "repeat" and isinstance(place, list):
        place.extend(copy.deepcopy(place[: draw(st.integers(1, 3))]))
    elif kind == "text":
        place[key] = str(value)[:200]
    elif kind == "scale" and isinstance(value, (int, float)) and not isinstance(value, bool):
        place[key] = max(min(value, 10**300), -(10**300)) * draw(
            st.sampled_from((-1, 0, 1e-12, 1e-3, 0.5, 2.0, 1e3, 1e12, 1e300))
        )
    else:
        place[key] = draw(WEIRD)
    return document


@st.composite
def damaged(draw: st.DrawFn, content: bytes, *, most: int = 3) -> bytes:
    """The bytes with flips, cuts, repeats and insertions."""
    made = bytearray(content)
    for _ in range(draw(st.integers(1, most))):
        at = draw(st.integers(0, max(len(made) - 1, 0)))
        kind = draw(st.sampled_from(("flip", "cut", "end", "insert", "repeat", "swap")))
        if kind == "flip" and made:
            made[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del made[at : at + draw(st.integers(1, 40))]
        elif kind == "end":
            del made[at:]
        elif kind == "insert":
            made[at:at] = draw(st.one_of(st.binary(max_size=8), st.sampled_from(INSERTS)))
        elif kind == "repeat":
            made[at:at] = made[max(at - draw(st.integers(1, 200)), 0) : at]
        elif made:
            made[at] = draw(st.sampled_from(b'",;\n\r\t {}[]:0-9.eE\\\x00\xff'))
    return bytes(made)


INSERTS = (b",", b",,,,", b"\n", b'"', b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"NaN", b"Infinity")
INSERTS += (b"1e999", b"9" * 400, b"9" * 5000, b"[" * 2000, b'{"a":' * 2000, b"\\ud800", b"-", b"#")
INSERTS += (b'"schema_version": 2,', b"status,", b"," * 300, b"x" * 30_000)


def written(document: Any) -> bytes:
    """The JSON text of a document, or of its text where JSON has no word for it."""
    try:
        return json.dumps(document, default=str).encode("utf-8", "surrogatepass")
    except (RecursionError, ValueError, TypeError):
        return b"[" * 50_000


@st.composite
def frames(draw: st.DrawFn, columns: Sequence[str], rows: Mapping[str, Sequence[Any]]) -> Any:
    """A frame near a real one: columns gone, doubled, renamed; cells of any kind."""
    import pandas as pd

    names = draw(st.lists(st.sampled_from(columns), min_size=0, max_size=6, unique=True))
    names = [*columns[:2], *names] if draw(st.integers(0, 4)) else names
    if draw(st.integers(0, 5)) == 0:
        names = [*names, draw(st.sampled_from((*columns, *TEXTS[:8])))]
    count = draw(st.integers(0, 6))
    data = []
    for name in names:
        known = list(rows.get(name, [])) or [1, 2, 4]
        column = [known[index % len(known)] for index in range(count)]
        for _ in range(draw(st.integers(0, 1))):
            if column:
                column[draw(st.integers(0, count - 1))] = draw(CELLS)
        data.append(column)
    made = pd.DataFrame({i: pd.Series(c, dtype=object) for i, c in enumerate(data)})
    made.columns = pd.Index(names, dtype=object)
    if draw(st.booleans()):
        with contextlib.suppress(UnicodeEncodeError):  # pandas cannot hold half a character
            return made.infer_objects()
    return made


@st.composite
def rows_within(draw: st.DrawFn, limits: Mapping[str, tuple[float, float]]) -> Any:
    """A frame of rows that a table takes, up to the limits; most near each other, as real ones."""
    import pandas as pd

    rows = []
    for _ in range(draw(st.integers(1, 8))):
        row: dict[str, Any] = {}
        for name, (low, high) in limits.items():
            if name not in ("local_batch_size", "step_time_s") and draw(st.booleans()):
                continue
            whole = isinstance(low, int)
            usual = st.sampled_from((1, 2, 8)) if whole else st.floats(1e-4, 10.0)
            extreme = st.integers(int(low), int(high)) if whole else st.floats(low, high)
            row[name] = draw(st.one_of(usual, usual, st.sampled_from((low, high)), extreme))
        if "sync_time_s" in row:
            row["sync_time_s"] = min(row["sync_time_s"], row["step_time_s"])
        rows.append(row)
    return pd.DataFrame(rows)


DEAD = "http://127.0.0.1:9"
STORES = (
    DEAD,
    f"http://user:{SECRET}@127.0.0.1:9",
    f"postgresql://user:{SECRET}@127.0.0.1:9/mlflow",
    f"mysql+pymysql://user:{SECRET}@127.0.0.1:9/mlflow?password={SECRET}",
    "sqlite:////proc/nowhere/mlflow.db",
    "file:///nowhere",
    "databricks",
    "nonsense://x",
    "::::",
    f"https://127.0.0.1:9/?token={SECRET}",
)


@st.composite
def command_lines(
    draw: st.DrawFn, options: Mapping[str, Sequence[str]], files: Sequence[str]
) -> Any:
    """A command with options of its own, good, bad and unknown; always a store that is dead."""
    verb = draw(st.sampled_from(sorted(options)))
    words = verb.split()
    values = st.one_of(st.sampled_from(ARGUMENTS), st.sampled_from(files), st.text(max_size=8))
    for name in draw(st.lists(st.sampled_from(options[verb] or ["--nope"]), max_size=5)):
        # What would start a download or a training of minutes is not a matter of parsing.
        if name in ("--download", "--tracking-uri", "--resume"):
            continue
        value = draw(values)
        words += [f"{name}={value}"] if draw(st.booleans()) else [name, value]
    if draw(st.integers(0, 9)) == 0:
        words.insert(draw(st.integers(len(verb.split()), len(words))), draw(values))
    if verb.split()[0] in ("import", "monitor") or verb in REGISTRY:
        words.insert(len(verb.split()), draw(st.sampled_from((*files, *ARGUMENTS[:12]))))
    if "--tracking-uri" in options[verb]:
        words += ["--tracking-uri", draw(st.sampled_from(STORES))]
    return [word.replace("\x00", "0") for word in words]


REGISTRY = {f"registry {verb}" for verb in ("show", "compare", "promote", "rollback", "prune")}
ARGUMENTS = (
    "",
    " ",
    "1",
    "0",
    "-1",
    "vgg11",
    "digits",
    "nope",
    "vgg11/digits",
    "..",
    "../x",
    "a:b",
)
ARGUMENTS += ("1.5", "1e400", "nan", "inf", "9" * 30, "1,2", "1,,2", "1;2", "auto", "none", "all")
ARGUMENTS += (
    "true",
    "false",
    "maybe",
    "20GiB",
    "1h",
    "-5m",
    "knee",
    "min_cost",
    "min_time_to_target",
)
ARGUMENTS += (
    "full",
    "cpu",
    "cuda",
    "fp32",
    "bf16",
    "sgd",
    "champion",
    "'",
    '"',
    "--json",
    "-h",
    "--",
)
ARGUMENTS += (
    "no_such_module_x:f",
    "日本語",
    "\u202e",
    "x" * 300,
    "{a}",
    "%s",
    "/dev/null",
    "/",
    "~",
)


@st.composite
def requests(draw: st.DrawFn, columns: Sequence[str], parameters: Sequence[str]) -> Any:
    """A request to /invocations: its content type and its body."""
    if draw(st.integers(0, 9)) == 0:
        name = ",".join(draw(st.lists(st.sampled_from((*columns, "x")), max_size=4)))
        cells = draw(st.lists(st.lists(CELLS, max_size=4), max_size=4))
        body = "\n".join([name, *(",".join(str(cell)[:60] for cell in row) for row in cells)])
        return "text/csv", body.encode("utf-8", "surrogatepass")
    names = draw(st.lists(st.sampled_from((*columns, *columns, "x", "", "日本")), max_size=5))
    if draw(st.integers(0, 3)):
        names = [columns[0], *names]
    rows = draw(st.lists(st.lists(CELLS, min_size=len(names), max_size=len(names)), max_size=4))
    kind = draw(st.sampled_from(("dataframe_split", "dataframe_records", "inputs", "instances")))
    table: Any = {"columns": names, "data": rows}
    if kind != "dataframe_split":
        table = [dict(zip(names, row, strict=True)) for row in rows]
        if kind == "inputs" and draw(st.booleans()):
            table = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    document: Any = {kind: table}
    if draw(st.booleans()):
        keys = draw(st.lists(st.sampled_from((*parameters, "x")), max_size=4, unique=True))
        document["params"] = {key: draw(CELLS) for key in keys}
    if draw(st.integers(0, 3)) == 0:
        document = draw(changed(document, most=2))
    body = written(document)
    if draw(st.integers(0, 4)) == 0:
        body = draw(damaged(body))
    content = ("application/json",) * 8 + ("application/json; charset=utf-8", "text/plain")
    content += ("application/json; charset=nope", "text/csv", "")
    if draw(st.integers(0, 60)) == 37:
        return "application/vnd.apache.parquet", body
    return draw(st.sampled_from(content)), body


@st.composite
def questions(draw: st.DrawFn, name: str, *, many: bool) -> Any:
    """A question (`many`: several, for a scoring server) as a request."""
    model, dataset, hardware = name.split(".")[1:]
    asked: Any = {"name": name} if draw(st.booleans()) else {}
    asked = asked or {"model": model, "dataset": dataset, "hardware": hardware}
    for key in draw(st.lists(st.sampled_from(FIELDS), max_size=5, unique=True)):
        asked[key] = draw(st.one_of(st.sampled_from(ANSWERS), st.sampled_from(ANSWERS), CELLS))
    document: Any = asked
    if many:
        key = draw(
            st.sampled_from(("dataframe_records", "dataframe_records", "inputs", "instances"))
        )
        document = {key: [asked] * draw(st.sampled_from((1, 1, 2, 3, 120)))}
    if draw(st.integers(0, 3)) == 0:
        document = draw(changed(document, most=2))
    body = written(document)
    if draw(st.integers(0, 4)) == 0:
        body = draw(damaged(body))
    content = ("application/json",) * 8 + ("text/plain", "text/csv", "", "application/json; x")
    return draw(st.sampled_from(content)), body


FIELDS = ("objective", "epochs", "deadline_s", "budget_usd", "memory_limit_bytes", "nodes", "x")
FIELDS += ("usd_per_device_hour", "usd_per_gb_hour", "devices_per_node", "candidates", "hardware")
FIELDS += ("current_global_batch_size", "accumulation_steps", "dataset_size", "knee_rule", "name")
ANSWERS: tuple[Any, ...] = (
    "knee",
    "min_time",
    "min_cost",
    "min_time_to_target",
    "kneedle",
    1,
    2,
    8,
)
ANSWERS += (0.15, 3.5, 90, 1e9, 1e12, [1], [1, 2], [64, 128, 256], [1, 1], list(range(1, 300)), [0])


@st.composite
def addresses(draw: st.DrawFn, name: str) -> str:
    """An address below /tula, with a query."""
    from urllib.parse import quote

    place = st.sampled_from((name, name, name, "..", "%2e%2e%2fetc", "tula.a.b.c", "", "x" * 300))
    path = draw(
        st.sampled_from(("api/predictors/{}/view", "predictors/{}", "static/{}", "{}", "api/{}"))
    )
    parts = []
    for key in draw(st.lists(st.sampled_from(FIELDS), max_size=4)):
        value = draw(
            st.one_of(st.sampled_from(ARGUMENTS), st.sampled_from(ANSWERS), st.text(max_size=9))
        )
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        parts.append(f"{key}={quote(text.encode('utf-8', 'surrogatepass'))}")
    return f"/tula/{path.format(draw(place))}?{'&'.join(parts)}"
