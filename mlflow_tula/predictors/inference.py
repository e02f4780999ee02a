"""A bundle's dictionary and a frame of questions -> a frame of answers.

Numpy and pandas only, and relative imports only: the file is shipped with every registered model
and loaded there as a package of its own, without mlflow_tula. Bad input raises ValueError with one
line.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from . import convergence_formulas, formulas, memory_formulas, step_time_formulas
from .checks import check_bundle

__all__ = ["check_bundle", "predict_columns", "predict_frame"]

Array = NDArray[np.float64]

BATCH_COLUMNS = ("local_batch_size", "global_batch_size")
OPTIONAL_COLUMNS = ("nodes", "devices_per_node", "accumulation_steps")
_MAY_BE_ZERO = ("usd_per_device_hour", "usd_per_gb_hour", "inter_node_latency_s")
MAX_COUNT = 10**12
MAX_PRODUCT = 10**15
MAX_QUESTIONS = 100_000
AT_ONCE = 2e7
"""Numbers in the largest array of an evaluation: more questions are answered in parts."""


def predict_frame(
    bundle: Mapping[str, Any],
    frame: pd.DataFrame,
    *,
    level: float = 0.9,
    memory_limit_bytes: float | None = None,
    dataset_size: int | None = None,
    epochs: float | None = None,
    usd_per_device_hour: float | None = None,
    usd_per_gb_hour: float | None = None,
    inter_node_bandwidth_bytes_per_s: float | None = None,
    inter_node_latency_s: float | None = None,
    gradient_compression: str | None = None,
    bucket_bytes: float | None = None,
) -> pd.DataFrame:
    """Answer one question a row.

    Args:
        bundle: `PredictorBundle.to_dict()`.
        frame: column `local_batch_size` or `global_batch_size` (one of them); optional `nodes`,
            `devices_per_node`, `accumulation_steps`, each 1 where the column is absent.
        level: probability of the intervals, between 0 and 1.
        memory_limit_bytes: what a device may use; the device's memory when None.
        dataset_size: training samples; the workload's when None.
        epochs: what `cost_usd` pays for; one epoch when None.
        usd_per_device_hour: price of a device.
        usd_per_gb_hour: price of a GB (1e9 bytes) of peak memory.
        inter_node_bandwidth_bytes_per_s: a stated link between nodes in place of the measured one.
        inter_node_latency_s: the same for its latency.
        gradient_compression: `bf16` sends half the bytes; None or `none` all of them.
        bucket_bytes: most bytes that DDP sends at once; as profiled when None.

    Returns:
        One row per row of `frame`, same index: the configuration, then `step_time_s`,
        `peak_memory_bytes`, `throughput` (samples per second), `epoch_time_s`,
        `epochs_to_target`, `time_to_target_s`, each with `_lower` and `_upper`, `cost_usd`,
        `cost_to_target_usd`, `extrapolated`, `fits`, `fits_reason`, `may_not_reach_target`,
        `reach_rate` (share of runs that reach it). NaN where the bundle cannot know.

    Raises:
        ValueError: a question that cannot be asked, in one line.
    """
    options = {
        "memory_limit_bytes": memory_limit_bytes,
        "dataset_size": dataset_size,
        "epochs": epochs,
        "usd_per_device_hour": usd_per_device_hour,
        "usd_per_gb_hour": usd_per_gb_hour,
        "inter_node_bandwidth_bytes_per_s": inter_node_bandwidth_bytes_per_s,
        "inter_node_latency_s": inter_node_latency_s,
        "gradient_compression": gradient_compression,
        "bucket_bytes": bucket_bytes,
    }
    _check_options(level, options)
    columns = _in_parts(bundle, _configurations(frame), level, options)
    return pd.DataFrame(columns, index=frame.index)


def predict_columns(
    bundle: Mapping[str, Any],
    asked: Mapping[str, Sequence[int]],
    *,
    level: float = 0.9,
    **options: Any,
) -> dict[str, NDArray[Any]]:
    """The same without frames: a decision asks often, and frames take longer than the answers.

    Args:
        bundle: `PredictorBundle.to_dict()`.
        asked: `local_batch_size`, `nodes`, `devices_per_node` and `accumulation_steps`.
        level: probability of the intervals.
        options: those of `predict_frame`.

    Raises:
        ValueError: a question that cannot be asked, in one line.
    """
    _check_options(level, options)
    counts = {name: np.asarray(asked[name], np.int64) for name in OPTIONAL_COLUMNS}
    local = np.asarray(asked["local_batch_size"], np.int64)
    shared = _shared_out("local_batch_size", local, counts)
    return _in_parts(bundle, shared, level, options)


def _in_parts(
    bundle: Mapping[str, Any],
    asked: Mapping[str, NDArray[np.int64]],
    level: float,
    options: Mapping[str, Any],
) -> dict[str, NDArray[Any]]:
    """The answers, so many at a time that no array becomes too large."""
    part, count = _questions_at_once(bundle["step_time"]), len(asked["local_batch_size"])
    answers = []
    for start in range(0, max(count, 1), part):
        some = {name: values[start : start + part] for name, values in asked.items()}
        with np.errstate(over="ignore"):  # an interval without end is an honest answer
            answers.append(_answer(bundle, some, level, options))
    if len(answers) == 1:
        return answers[0]
    return {name: np.concatenate([one[name] for one in answers]) for name in answers[0]}


def _answer(
    bundle: Mapping[str, Any],
    asked: Mapping[str, NDArray[np.int64]],
    level: float,
    options: Mapping[str, Any],
) -> dict[str, NDArray[Any]]:
    """The columns of `predict_frame` for questions that were checked."""
    prices = {name: options.get(name) for name in ("usd_per_device_hour", "usd_per_gb_hour")}
    local, nodes, devices, accumulation, samples = (
        asked[name].astype(float)
        for name in ("local_batch_size", *OPTIONAL_COLUMNS, "global_batch_size")
    )
    step = step_time_formulas.step_time(
        bundle["step_time"],
        local,
        nodes,
        devices,
        accumulation,
        level=level,
        bandwidth_bytes_per_s=options.get("inter_node_bandwidth_bytes_per_s"),
        latency_s=options.get("inter_node_latency_s"),
        gradient_compression=options.get("gradient_compression"),
        bucket_bytes=options.get("bucket_bytes"),
    )
    memory = _memory(bundle, local, nodes * devices, level)
    workload = bundle["workload"]
    size = int(options.get("dataset_size") or workload["dataset_size"])
    steps = formulas.steps_per_epoch(size, samples, bool(workload.get("drop_last", True)))
    epoch = (steps * step[0], steps * step[1], steps * step[2])
    reach = _convergence(bundle, samples, level)
    target = formulas.product_interval(epoch, reach[:3])
    fits, reason = _fits(bundle, asked, options.get("memory_limit_bytes"), size)
    world = nodes * devices
    return {
        **asked,
        **_three("step_time_s", step),
        **_three("peak_memory_bytes", memory),
        **_three("throughput", (samples / step[0], samples / step[2], samples / step[1])),
        **_three("epoch_time_s", epoch),
        **_three("epochs_to_target", reach[:3]),
        **_three("time_to_target_s", target),
        "cost_usd": formulas.dollars(
            epoch[0] * (options.get("epochs") or 1.0), world, memory[0], **prices
        ),
        "cost_to_target_usd": formulas.dollars(target[0], world, memory[0], **prices),
        "extrapolated": _extrapolated(bundle, local, nodes, devices),
        "fits": fits,
        "fits_reason": reason,
        "may_not_reach_target": reach[3],
        "reach_rate": _reach_rate(bundle, samples),
    }


def _extrapolated(
    bundle: Mapping[str, Any], local: Array, nodes: Array, devices: Array
) -> NDArray[np.bool_]:
    """Beyond what was measured; of a workload never profiled here, all but its own few probes."""
    beyond = step_time_formulas.is_extrapolated(bundle["step_time"], local, nodes, devices)
    if bundle.get("cold_start") is None:
        return beyond
    asked = zip(local.tolist(), (nodes * devices).tolist(), strict=True)
    ran = {(float(size), float(world)) for size, world in bundle["probed"]["ok"]}
    return np.array([one not in ran for one in asked], bool)


def _questions_at_once(step_time: Mapping[str, Any]) -> int:
    """How many questions may be evaluated together: each may ask for all sizes and forms."""
    curve = step_time["compute"]
    sizes = max(len(step_time["knots"]), len(curve["sizes"]))
    each = sizes * len(curve["weights"]) + len(step_time["range"]["setups"])
    return int(max(AT_ONCE // max(each, 1), 1))


def _three(name: str, parts: tuple[Array, Array, Array]) -> dict[str, Array]:
    """The three columns of one quantity."""
    return dict(zip((name, f"{name}_lower", f"{name}_upper"), parts, strict=True))


def _check_options(level: float, options: Mapping[str, Any]) -> None:
    """Raise ValueError for the first option that was given and is no such number."""
    _check_number("level", level, above=0.0, below=1.0)
    for name, number in options.items():
        if number is None or name == "gradient_compression":
            continue
        if number != 0 or name not in _MAY_BE_ZERO:
            _check_number(name, number, above=0.0)


def _check_number(name: str, value: Any, *, above: float, below: float = math.inf) -> None:
    """Raise ValueError unless `value` is a number strictly between the bounds."""
    number = isinstance(value, (int, float, np.integer, np.floating))
    if not number or isinstance(value, bool) or not above < value < below:
        rule = f"above {above:g}" if below == math.inf else f"between {above:g} and {below:g}"
        raise ValueError(f"{name} must be a finite number {rule}, not {value!r}")


def _configurations(frame: pd.DataFrame) -> dict[str, NDArray[np.int64]]:
    """The checked configuration columns of every row, both batch sizes filled in."""
    if not isinstance(frame, pd.DataFrame):
        raise ValueError(f"predict needs a pandas DataFrame, not {type(frame).__name__}")
    given = [name for name in BATCH_COLUMNS if name in frame.columns]
    if len(given) != 1:
        some = [str(name)[:40] for name in frame.columns[:12]]
        found = "both" if given else f"only {some}"
        raise ValueError(
            "predict needs exactly one of the columns local_batch_size and global_batch_size, "
            f"not {found}"
        )
    known = (*BATCH_COLUMNS, *OPTIONAL_COLUMNS)
    for name in frame.columns:
        near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.75)
        if name not in known and near:
            raise ValueError(f"column {str(name)[:40]!r} is unknown: did you mean {near[0]!r}?")
    if len(frame) > MAX_QUESTIONS:
        raise ValueError(
            f"{len(frame)} rows were asked at once; at most {MAX_QUESTIONS}: ask in parts"
        )
    counts = {name: _count_column(frame, name) for name in OPTIONAL_COLUMNS}
    asked = _count_column(frame, given[0])
    return _shared_out(given[0], asked, counts)


def _shared_out(
    name: str, asked: NDArray[np.int64], counts: Mapping[str, NDArray[np.int64]]
) -> dict[str, NDArray[np.int64]]:
    """Both batch sizes of every row, from the one that was given."""
    most = asked.astype(float)
    for count in counts.values():
        most = most * count
    if (most > MAX_PRODUCT).any():
        raise ValueError(
            f"a row asks for {most.max():.3g} samples at once; at most {MAX_PRODUCT:g}"
        )
    parts = counts["nodes"] * counts["devices_per_node"] * counts["accumulation_steps"]
    if name == "local_batch_size":
        local, samples = asked, asked * parts
    else:
        local, samples = asked // parts, asked
        wrong = np.flatnonzero(local * parts != samples)
        if len(wrong):
            raise ValueError(_indivisible(int(asked[wrong[0]]), int(parts[wrong[0]])))
    return {"local_batch_size": local, "global_batch_size": samples, **counts}


def _count_column(frame: pd.DataFrame, name: str) -> NDArray[np.int64]:
    """A column of whole numbers of at least one; ones when the column is absent."""
    if name not in frame.columns:
        return np.ones(len(frame), np.int64)
    column = frame[name]
    if list(frame.columns).count(name) > 1:
        raise ValueError(f"column {name!r} stands twice; keep one of them")
    try:
        values = np.asarray(column.to_numpy(), dtype=float)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"column {name!r} must hold whole numbers") from error
    bad = ~(
        np.isfinite(values) & (values >= 1) & (values <= MAX_COUNT) & (np.floor(values) == values)
    )
    if column.dtype == bool or bad.any():
        row = int(np.argmax(bad))
        value = column.iloc[row]
        value = value.item() if hasattr(value, "item") else value
        raise ValueError(
            f"{name} must be a whole number from 1 to {MAX_COUNT}, not {value!r} (row {row + 1})"
        )
    return values.astype(np.int64)


def _indivisible(samples: int, parts: int) -> str:
    """The message for a global batch that cannot be shared out."""
    below = samples // parts * parts
    near = f"{below} and {below + parts}" if below else f"{parts}"
    return (
        f"global_batch_size {samples} cannot be shared out over {parts} = nodes x "
        f"devices_per_node x accumulation_steps: the nearest valid sizes are {near}"
    )


def _memory(
    bundle: Mapping[str, Any], local: Array, world: Array, level: float
) -> tuple[Array, Array, Array]:
    """Peak bytes of a rank with its interval, or NaN where memory was never measured."""
    if bundle.get("memory") is None:
        unknown = np.full(local.shape, np.nan)
        return unknown, unknown, unknown
    value, lower, upper = memory_formulas.peak_memory(bundle["memory"], local, world, level)
    return value, lower, upper


def _convergence(
    bundle: Mapping[str, Any], samples: Array, level: float
) -> tuple[Array, Array, Array, NDArray[np.bool_]]:
    """Epochs to the target with their interval, NaN without convergence data."""
    if bundle.get("convergence") is None:
        unknown = np.full(samples.shape, np.nan)
        return unknown, unknown, unknown, np.zeros(samples.shape, bool)
    return convergence_formulas.epochs_to_target(bundle["convergence"], samples, level)


def _reach_rate(bundle: Mapping[str, Any], samples: Array) -> Array:
    """Share of runs that reach the target, NaN without convergence data."""
    if bundle.get("convergence") is None:
        return np.full(samples.shape, np.nan)
    return convergence_formulas.reach_rate(bundle["convergence"], samples)


def _fits(
    bundle: Mapping[str, Any],
    asked: Mapping[str, NDArray[np.int64]],
    limit: float | None,
    dataset_size: int,
) -> tuple[NDArray[np.bool_], NDArray[np.object_]]:
    """Whether each row runs within the limit, and why; never more samples than there are."""
    local, devices = (
        asked[name].astype(float) for name in ("local_batch_size", "devices_per_node")
    )
    world = asked["nodes"] * devices
    if bundle.get("memory") is None:
        fits = np.zeros(local.shape, bool)
        reason = np.full(local.shape, "this bundle has no memory predictor", object)
    else:
        fits, reason = memory_formulas.feasible(bundle["memory"], local, world, limit, devices)
    too_many = asked["global_batch_size"] > dataset_size
    reason[too_many] = "larger than the dataset"
    return fits & ~too_many, reason
