"""Is a bundle's document what the equations can be evaluated on? Plain Python: shipped with models.

The equations index, divide and take logarithms; a document that came from elsewhere may hold
anything. `check_bundle` says in one line what is missing, of another kind, out of range or of
another length, so that `inference.py` needs no guard of its own. Lists that go together have a
length by name: the first one sets it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Lengths = dict[str, int]
Rule = Callable[[str, Any, Lengths], None]

MAX_ITEMS = 100_000
MAX_KNOTS = 10_000
MAX_FORMS = 200
MAX_FIT_SIZES = 1_000
"""Epochs are predicted with a matrix of so many rows and columns."""
_EXTREME = 1e30
_LOG = 700.0
"""exp of it is still a finite number."""


def check_bundle(document: Any) -> None:
    """Raise ValueError, in one line, unless `document` is a bundle that can be asked."""
    _BUNDLE("the bundle", document, {})
    known = document["step_time"]
    _rising("step_time.compute.sizes", known["compute"]["sizes"])
    _rising("step_time.knots", known["knots"])
    if known.get("backward") is not None:
        _rising("step_time.backward.sizes", known["backward"]["sizes"])
    for name in ("intra_node", "inter_node"):
        tier = known[name]
        _rising(f"{name}.log2_ranks", tier["log2_ranks"])
        _rising(f"{name}.sizes", tier["sizes"])
        if tier["rest"] and (not tier["sizes"] or len(tier["rest"]) != len(tier["log2_ranks"])):
            raise ValueError(f"the bundle is damaged: {name}.rest and its levels do not match")
        if tier["links"] is not None and not any(tier["links"].get(one) for one in _SCOPES):
            raise ValueError(f"the bundle is damaged: {name}.links names no link")
    memory, convergence = document.get("memory"), document.get("convergence")
    if document.get("cold_start") is not None and "ok" not in document.get("probed", {}):
        raise ValueError("the bundle is damaged: a cold start needs the list probed.ok")
    if memory is not None:
        _rising("memory.batch_sizes", memory["batch_sizes"])
    if convergence is not None:
        _rising("convergence.reach_batch_sizes", convergence["reach_batch_sizes"])
        if convergence["form"] == "scavenger":
            if convergence["floor_epochs"] + convergence["theta"] <= 0:
                raise ValueError("the bundle is damaged: convergence predicts no epochs")
        elif not convergence["processes"]:
            raise ValueError("the bundle is damaged: convergence.processes must not be empty")


def _rising(path: str, values: Sequence[float]) -> None:
    """Raise ValueError unless each number is larger than the one before."""
    for first, second in itertools.pairwise(values):
        if not first < second:
            raise ValueError(f"the bundle is damaged: {path} must rise from one to the next")


def _wrong(path: str, rule: str, value: Any) -> ValueError:
    shown = repr(value) if isinstance(value, (str, float, bool)) else type(value).__name__
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**30:
        shown = str(value)
    return ValueError(f"the bundle is damaged: {path} must be {rule}, not {shown[:60]}")


def number(low: float = -_EXTREME, high: float = _EXTREME, *, above: bool = False) -> Rule:
    """A finite number from (`above`: beyond) `low` to `high`."""
    rule = f"a number {f'above {low:g}, at most' if above else f'from {low:g} to'} {high:g}"

    def check(path: str, value: Any, lengths: Lengths) -> None:
        plain = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not plain or not low <= value <= high or (above and value == low):
            raise _wrong(path, rule, value)

    return check


def whole(low: int = 1, high: int = 10**12) -> Rule:
    """A whole number; a float that is one counts."""

    def check(path: str, value: Any, lengths: Lengths) -> None:
        plain = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not plain or not low <= value <= high or value != math.floor(value):
            raise _wrong(path, f"a whole number from {low} to {high}", value)

    return check


def items(rule: Rule, length: str = "", *, least: int = 0, most: int = MAX_ITEMS) -> Rule:
    """A list of `least` to `most` values, as long as every other list of the same `length`."""

    def check(path: str, value: Any, lengths: Lengths) -> None:
        if not isinstance(value, (list, tuple)) or not least <= len(value) <= most:
            raise _wrong(path, f"a list of {least} to {most} values", value)
        if length and lengths.setdefault(length, len(value)) != len(value):
            raise ValueError(
                f"the bundle is damaged: {path} must have {lengths[length]} values, "
                f"not {len(value)}"
            )
        for index, item in enumerate(value):
            rule(f"{path}[{index}]", item, lengths)

    return check


def word(*choices: str) -> Rule:
    """One of these texts."""

    def check(path: str, value: Any, lengths: Lengths) -> None:
        if not isinstance(value, str) or value not in choices:
            raise _wrong(path, f"one of {', '.join(choices)}", value)

    return check


def text(path: str, value: Any, lengths: Lengths) -> None:
    """A text of at most 2,000 characters."""
    if not isinstance(value, str) or len(value) > 2000:
        raise _wrong(path, "a text of at most 2,000 characters", value)


def flag(path: str, value: Any, lengths: Lengths) -> None:
    """True or false."""
    if not isinstance(value, bool):
        raise _wrong(path, "true or false", value)


def maybe(rule: Rule) -> Rule:
    """The same, or null."""

    def check(path: str, value: Any, lengths: Lengths) -> None:
        if value is not None:
            rule(path, value, lengths)

    return check


def fields(needed: Mapping[str, Rule], given: Mapping[str, Rule] | None = None) -> Rule:
    """An object with the `needed` fields, and those of `given` that it has; others are ignored."""

    def check(path: str, value: Any, lengths: Lengths) -> None:
        if not isinstance(value, Mapping):
            raise _wrong(path, "a JSON object", value)
        own = lengths if path == "the bundle" else {}
        for name, rule in needed.items():
            if name not in value:
                raise ValueError(f"the bundle is damaged: {path} has no field {name!r}")
            rule(_below(path, name), value[name], own)
        for name, rule in (given or {}).items():
            if name in value:
                rule(_below(path, name), value[name], own)

    return check


def _below(path: str, name: str) -> str:
    return name if path == "the bundle" else f"{path}.{name}"


_NOTES = {"form": text, "warnings": items(text), "leave_one_out_mape": maybe(number(0.0, 1e18))}
_SCOPES = ("intra_node", "inter_node")
_SECONDS = number(0.0, 1e12)
_SPREAD = number(0.0, 10.0)
_BYTES = number(0.0, 1e21)
_BATCH = number(1.0, 1e12)
_COUNT = whole(1, 10**6)
_POWER = number(0.1, 100.0)

_LINK = fields(
    {"latency_s": _SECONDS, "bandwidth_bytes_per_s": number(1e-9, 1e18)},
    {name: number(0.0, 1e3) for name in ("cast_s_per_byte", "cpu_s_per_byte")},
)
_TIER = fields(
    {
        "counts": word("devices", "nodes"),
        "powers": items(_POWER, "overlaps", least=1, most=MAX_FORMS),
        "weights": items(number(0.0, 1.0), "overlaps"),
        "log2_ranks": items(number(0.0, 64.0), "levels", least=1),
        "log_levels": items(items(number(-200.0, 200.0), "levels"), "overlaps"),
        "fewest_ranks": whole(2, 10**12),
        "fewest_units": _COUNT,
        "sizes": items(_BATCH, "sizes"),
        "rest": items(items(number(-100.0, 100.0), "sizes")),
        "links": maybe(fields({}, {scope: maybe(_LINK) for scope in _SCOPES})),
        "gradient_bytes": _BYTES,
        "level_sd": _SPREAD,
        "between_sd": _SPREAD,
        "growth_sd": _SPREAD,
        "ring_weight": number(0.0, 1.0),
        "latency_weight": number(0.0, 1.0),
    },
    {"compressed": flag, "messages": number(1.0, 1e9), "pair_factor": number(1.0, 4.0)},
)
_CURVE = fields(
    {
        **{
            name: items(_SECONDS, "forms", least=1, most=MAX_FORMS)
            for name in ("offsets_s", "floors_s", "slopes_s")
        },
        "powers": items(_POWER, "forms"),
        "weights": items(number(0.0, 1.0), "forms"),
        "sizes": items(_BATCH, "sizes", least=1, most=MAX_KNOTS),
        "rest": items(number(-100.0, 100.0), "sizes"),
        "chord_s": _SECONDS,
        "chord_weight": number(0.0, 1.0),
    }
)
_SETUP = items(number(1.0, 1e12), least=4, most=4)
_RANGE = fields(
    {
        "setups": items(_SETUP, least=1, most=10_000),
        "device_counts": items(_COUNT, least=1, most=10_000),
        **{name: whole() for name in ("most_nodes", "most_devices_per_node")},
        **{name: whole() for name in ("smallest_world_size", "largest_world_size")},
    }
)
_SPREADS = ("noise_sd", "bridge_sd", "beyond_sd", "contention_sd", "fewer_sd")
_STEP_TIME = fields(
    {
        "base": fields({"nodes": _COUNT, "devices_per_node": _COUNT}, {"sync_subtracted": flag}),
        "compute": _CURVE,
        "contention": fields(
            {
                "devices": _COUNT,
                "slope": number(-10.0, 10.0),
                "floor": number(-10.0, 10.0),
                "covariance": items(number(-100.0, 100.0), least=3, most=3),
            }
        ),
        "knots": items(_BATCH, least=1, most=MAX_KNOTS),
        "range": _RANGE,
        "spread": fields(
            {
                **dict.fromkeys(_SPREADS, _SPREAD),
                "scale": number(1e-3, 100.0),
                "degrees": number(1.0, 1e6),
            },
            {
                "foreseen": fields(
                    {
                        "log2_sizes": items(number(0.0, 64.0), "foreseen", least=1, most=64),
                        "deviations": items(_SPREAD, "foreseen"),
                    }
                )
            },
        ),
        "optimizer_s": _SECONDS,
        "data": maybe(fields({"offset_s": _SECONDS, "slope_s": _SECONDS})),
        "gradient_bytes": _BYTES,
        "intra_node": _TIER,
        "inter_node": _TIER,
    },
    {
        **_NOTES,
        "leave_one_out_coverage": maybe(number(0.0, 1.0)),
        "sync_every_pass": flag,
        "backward": maybe(
            fields(
                {
                    "sizes": items(_BATCH, "backward", least=1),
                    "shares": items(number(0.0, 1.0), "backward"),
                }
            )
        ),
    },
)
_PROBE = fields(
    {
        "local_batch_size": whole(),
        "world_size": whole(),
        "status": word("ok", "oom", "failed"),
        "peak_bytes": maybe(_BYTES),
    },
    {"reason": text},
)
_MEMORY = fields(
    {
        "batch_sizes": items(_BATCH, "peaks"),
        "peak_bytes": items(number(0.0, 1e21, above=True), "peaks"),
        "slope_bytes": _BYTES,
        "first_slope_bytes": _BYTES,
        "bend_batch_size": number(0.0, 1e12),
        "bend_factor": number(0.0, 1e3),
        "identified": flag,
        "relative_sd": _SPREAD,
        "down_sd": _SPREAD,
        "up_sd": _SPREAD,
        "jump": number(0.0, 1e3),
        "copy_bytes": _BYTES,
        "copy_sd_bytes": _BYTES,
        "limit_bytes": number(1.0, 1e21),
        "limit_is_shared": flag,
        "probes": items(_PROBE),
    },
    {**_NOTES, "counted_batch_size": number(0.0, 1e12), "shared_bytes": _BYTES},
)
_EPOCHS = number(0.0, 1e18, above=True)
_PROCESS = fields(
    {
        "length": number(0.0, 1e6),
        "amplitude": number(0.0, 100.0),
        "weights": items(number(0.0, 1.0), "forms", most=MAX_FORMS),
        "critical_batch_sizes": items(number(0.0, 1e30, above=True), "forms"),
        "powers": items(_POWER, "forms"),
        "small_batch_sizes": items(number(0.0, 1e18), "forms"),
    }
)
_CONVERGENCE = fields(
    {
        "form": word("pooled", "hyperbola", "scavenger"),
        "global_batch_sizes": items(_BATCH, "sizes", least=1, most=MAX_FIT_SIZES),
        "epochs_to_target": items(_EPOCHS, "sizes"),
        "variances": items(number(0.0, 1e18, above=True), "sizes"),
        "run_variance": number(0.0, 1e18),
        "reach_batch_sizes": items(_BATCH, "reached", least=1),
        "reach_rates": items(number(0.0, 1.0), "reached"),
        "centre": number(-_LOG, _LOG),
        "processes": items(_PROCESS, most=100),
        "floor_epochs": number(0.0, 1e18),
        "theta": number(0.0, 1e24),
        "log_sd": _SPREAD,
    },
    {"warnings": _NOTES["warnings"], "leave_one_out_mape": _NOTES["leave_one_out_mape"]},
)
_PAIRS = ("ok", "oom")
_BUNDLE = fields(
    {
        "workload": fields({"dataset_size": whole()}, {"drop_last": flag}),
        "step_time": _STEP_TIME,
    },
    {
        "memory": maybe(_MEMORY),
        "convergence": maybe(_CONVERGENCE),
        "probed": fields({}, {name: items(items(whole(), least=2, most=2)) for name in _PAIRS}),
    },
)
