"""One question in, checked; a decision out, as one flat row.

A question is what `recommend` takes, in JSON types: a served request, a row of a frame and the
config of the project backend are all read here. Numbers are numbers: a string that looks like one
is refused, as are NaN and infinity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from mlflow_tula.errors import InvalidInputError, UnknownNameError
from mlflow_tula.recommend import KneeRule, Objective, Recommendation, recommend
from mlflow_tula.specs import ClusterSpec, Pricing, check_choice, check_int, check_real

if TYPE_CHECKING:
    import pandas as pd

    from mlflow_tula.predictors.bundle import PredictorBundle

MAX_CLUSTERS = 64
MAX_CANDIDATES = 256
MAX_QUESTIONS = 100
MAX_BODY = 2**20
"""Limits of one request: a decision takes some milliseconds a cluster."""

_REALS = (
    "epochs",
    "deadline_s",
    "budget_usd",
    "memory_limit_bytes",
    "usd_per_device_hour",
    "usd_per_gb_hour",
)
_FREE = ("usd_per_device_hour", "usd_per_gb_hour")
_COUNTS = ("current_global_batch_size", "accumulation_steps", "dataset_size")
LISTS = {"nodes": MAX_CLUSTERS, "devices_per_node": MAX_CLUSTERS, "candidates": MAX_CANDIDATES}
WORDS = ("objective", "knee_rule")

FIELDS: dict[str, str] = {
    "objective": "knee, min_time, min_cost, min_time_to_target or min_cost_to_target; knee",
    "epochs": "length of the run that deadline, budget, time and cost are about; one",
    "deadline_s": "longest training time in seconds",
    "budget_usd": "most dollars",
    "memory_limit_bytes": "what a device may use; its memory",
    "usd_per_device_hour": "price of a device",
    "usd_per_gb_hour": "price of a GB (1e9 bytes) of peak memory",
    "nodes": "number of nodes, or a list of them to choose from; 1",
    "devices_per_node": "devices of a node, or a list; 1",
    "candidates": "global batch sizes to choose from",
    "current_global_batch_size": "what is used today: kept unless another clearly gains",
    "accumulation_steps": "passes per optimizer step; 1, more only where a candidate must",
    "dataset_size": "training samples; those of the profiled workload",
    "knee_rule": "diminishing_returns or kneedle",
}
"""Every field of a question, in words; none of them is needed."""

ANSWER = (
    "global_batch_size",
    "local_batch_size",
    "accumulation_steps",
    "nodes",
    "devices_per_node",
    "objective",
)
CHOICE = (
    "step_time_s",
    "epoch_time_s",
    "peak_memory_bytes",
    "time_s",
    "time_s_lower",
    "time_s_upper",
    "cost_usd",
    "extrapolated",
)
"""Fields of an answer: of the decision, and of its point on the curve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What `recommend` is asked, apart from the predictor; hashable, so that answers can be kept.

    `nodes` and `devices_per_node` are what may be used: each pair of them is a cluster.
    """

    objective: Objective = "knee"
    epochs: float | None = None
    deadline_s: float | None = None
    budget_usd: float | None = None
    memory_limit_bytes: float | None = None
    usd_per_device_hour: float | None = None
    usd_per_gb_hour: float | None = None
    nodes: tuple[int, ...] = (1,)
    devices_per_node: tuple[int, ...] = (1,)
    candidates: tuple[int, ...] | None = None
    current_global_batch_size: int | None = None
    accumulation_steps: int | None = None
    dataset_size: int | None = None
    knee_rule: KneeRule = "diminishing_returns"

    def __post_init__(self) -> None:
        """Check every field once; what the fields mean together is `recommend`'s to check."""
        check_choice("objective", self.objective, Objective)
        check_choice("knee rule", self.knee_rule, KneeRule)
        for name in _REALS:
            if getattr(self, name) is not None:
                check_real(name, getattr(self, name), strict=name not in _FREE)
        for name in _COUNTS:
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name))
        if len(self.nodes) * len(self.devices_per_node) > MAX_CLUSTERS:
            raise InvalidInputError(
                f"nodes and devices_per_node make {len(self.nodes) * len(self.devices_per_node)} "
                f"clusters to choose from, at most {MAX_CLUSTERS} are possible"
            )

    @classmethod
    def from_record(cls, record: Mapping[str, Any], *, also: Iterable[str] = ()) -> Question:
        """A question from JSON types; None is "not given".

        Args:
            record: some of FIELDS.
            also: further names that are known, for the message about one that is not.

        Raises:
            InvalidInputError: an unknown field, or a value that breaks its rule.
        """
        values: dict[str, Any] = {}
        for key, value in record.items():
            if key not in FIELDS:
                raise UnknownNameError("column", str(key)[:80], [*FIELDS, *also])
            if value is not None:
                values[key] = _checked(key, value)
        return cls(**values)

    @property
    def clusters(self) -> tuple[ClusterSpec, ...]:
        """What may be trained on."""
        pairs = dict.fromkeys(product(self.nodes, self.devices_per_node))
        return tuple(ClusterSpec(nodes=n, devices_per_node=d) for n, d in pairs)

    @property
    def pricing(self) -> Pricing | None:
        """The prices, where there are any."""
        if self.usd_per_device_hour is None and self.usd_per_gb_hour is None:
            return None
        return Pricing(
            usd_per_device_hour=self.usd_per_device_hour, usd_per_gb_hour=self.usd_per_gb_hour
        )

    def decide(self, bundle: PredictorBundle) -> Recommendation:
        """Ask the bundle.

        Raises:
            InvalidInputError: fields that do not go together, or no candidate that fits.
        """
        return recommend(
            bundle,
            cluster=self.clusters,
            candidates=self.candidates,
            objective=self.objective,
            epochs=self.epochs,
            deadline_s=self.deadline_s,
            budget_usd=self.budget_usd,
            memory_limit_bytes=self.memory_limit_bytes,
            pricing=self.pricing,
            current_global_batch_size=self.current_global_batch_size,
            accumulation_steps=self.accumulation_steps,
            dataset_size=self.dataset_size,
            knee_rule=self.knee_rule,
        )


def _checked(name: str, value: Any) -> Any:
    """One value with its type checked, lists as tuples."""
    if name in LISTS:
        return _whole_numbers(name, value)
    if name in _COUNTS:
        return check_int(name, _number(name, value))
    if name in _REALS:
        return check_real(name, _number(name, value), strict=name not in _FREE)
    if not isinstance(value, str):
        raise InvalidInputError(f"{name} must be a word, not {_shown(value)}")
    return value[:80]


def _number(name: str, value: Any) -> Any:
    """A number, and no text that looks like one."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInputError(f"{name} must be a number, not {_shown(value)}")
    if isinstance(value, float) and not math.isfinite(value):  # a whole number always is
        raise InvalidInputError(f"{name} must be a finite number, not {value}")
    return value


def _whole_numbers(name: str, value: Any) -> tuple[int, ...]:
    """One whole number or a list of them."""
    several = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(several, list | tuple):
        several = [several]
    if not 0 < len(several) <= LISTS[name]:
        raise InvalidInputError(f"{name} must hold 1 to {LISTS[name]} values, not {len(several)}")
    return tuple(check_int(name, _number(name, one)) for one in several)


def _shown(value: Any) -> str:
    """A bad value, short enough for a sentence."""
    if isinstance(value, dict | list | tuple | set):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame as questions.

    A frame made of several JSON records has NaN where a record lacks a field; a column without a
    single number is NaN that somebody sent, and is refused.

    Raises:
        InvalidInputError: too many rows, no row, or a column of NaN.
    """
    if len(frame) > MAX_QUESTIONS:
        raise InvalidInputError(
            f"at most {MAX_QUESTIONS} questions a request, not {len(frame):,}: ask several times"
        )
    if frame.columns.has_duplicates:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise InvalidInputError(f"column {str(twice)[:80]!r} stands twice: keep one of them")
    if len(frame.columns) > 2 * len(FIELDS):
        raise InvalidInputError(
            f"{len(frame.columns):,} columns are too many: known are {', '.join(FIELDS)}"
        )
    rows: list[dict[str, Any]] = [{} for _ in range(len(frame))]
    for key in frame.columns:
        values = frame[key].tolist()
        given = [at for at, value in enumerate(values) if not _absent(value)]
        if values and not given and frame[key].dtype.kind == "f":
            raise InvalidInputError(f"{str(key)[:80]} must be a finite number, not nan")
        for at in given:
            rows[at][str(key)] = _plain(values[at])
    return rows


def _plain(value: Any) -> Any:
    """An array as MLflow makes it of JSON, as JSON again."""
    return value.tolist() if hasattr(value, "tolist") else value


def _absent(value: Any) -> bool:
    """Whether a cell of a frame says nothing; a list is a value, however empty."""
    from mlflow_tula.table import is_missing

    several = isinstance(value, list | tuple | dict | set) or getattr(value, "ndim", 0) > 0
    return not several and is_missing(value)


def answer_row(choice: Recommendation) -> dict[str, Any]:
    """A decision as one flat row."""
    point = choice.choice
    return (
        {name: getattr(choice, name) for name in ANSWER}
        | {name: getattr(point, name) for name in CHOICE}
        | {"reasons": list(choice.reasons), "warnings": list(choice.warnings)}
    )
