"""What a comparison consists of: tasks, trials and outcomes, as flat JSON."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from mlflow_tula.errors import InvalidInputError, SchemaError, UnknownNameError

Split = Literal["validation", "test"]
Budget = Literal["epochs", "time"]
Decay = Literal["none", "linear"]
TaskOptimizer = Literal["sgd", "adam"]

SCHEMA_VERSION = 1
KIND = "tula.trial"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is trained: data, network, and the batch size whose learning rate is known."""

    dataset: str
    network: str = "auto"
    """A name of `networks`, a torchvision model, or package.module:function; auto: by dataset."""
    data_dir: str | None = None
    reference_batch_size: int = 32
    learning_rate: float = 0.05
    """Tuned for the reference batch size."""
    momentum: float = 0.9
    weight_decay: float = 0.0
    epochs: float = 10.0
    decay: Decay = "none"
    """Of the learning rate over the training, for every method alike: linear goes to zero."""
    optimizer: TaskOptimizer = "sgd"
    """What the methods wrap; Adam has no momentum of the task's, but its own two."""

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        if self.optimizer not in get_args(TaskOptimizer):
            raise UnknownNameError("optimizer", self.optimizer, get_args(TaskOptimizer))
        for name in ("learning_rate", "epochs"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidInputError(f"{name} must be a finite number above 0, not {value}")
        if self.reference_batch_size < 1:
            raise InvalidInputError(
                f"reference_batch_size must be at least 1, not {self.reference_batch_size}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One training run: everything that decides its result."""

    task: Task
    method: str
    settings: tuple[tuple[str, Any], ...] = ()
    batch_size: int
    seed: int
    split: Split = "test"
    """validation: train on 80 % of the training data, and measure on the rest of it."""
    budget: Budget = "epochs"
    time_limit_s: float | None = None
    """Process seconds of training, for budget "time"."""

    def __post_init__(self) -> None:
        """Refuse a batch below the reference and a time budget without time."""
        if self.batch_size < self.task.reference_batch_size:
            raise InvalidInputError(
                f"batch sizes must be at least the reference batch size "
                f"({self.task.reference_batch_size}), not {self.batch_size}"
            )
        if (self.budget == "time") != (self.time_limit_s is not None):
            raise InvalidInputError("a time limit belongs to budget 'time', and to no other")

    def to_dict(self) -> dict[str, Any]:
        """Flat JSON."""
        document = asdict(self)
        document["settings"] = dict(self.settings)
        if self.task.optimizer == "sgd":
            del document["task"]["optimizer"]  # records from before it could be another
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Trial:
        """Read what `to_dict` made."""
        values = {**document, "task": Task(**document["task"])}
        values["settings"] = freeze(document["settings"])
        return cls(**values)

    @property
    def key(self) -> str:
        """A name of this trial that is the same in every process and version of Python."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a trial gave; accuracies are fractions of the split that the trial names."""

    trial: Trial
    accuracy: float
    loss: float | None
    """On the measured split; None where training diverged."""
    train_loss: float | None
    train_accuracy: float
    steps: int
    samples: int
    cpu_time_s: float
    wall_time_s: float
    diverged: bool = False
    scaled_share: float | None = None
    """Of AGS: the share of steps that were scaled."""
    curve: tuple[tuple[float, float, float], ...] = ()
    """Epochs, training loss and accuracy along the way."""

    def to_dict(self) -> dict[str, Any]:
        """Flat JSON."""
        document = {field.name: getattr(self, field.name) for field in fields(self)}
        document["trial"] = self.trial.to_dict()
        document["curve"] = [list(point) for point in self.curve]
        return {"kind": KIND, "schema_version": SCHEMA_VERSION, "key": self.trial.key, **document}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Outcome:
        """Read what `to_dict` made.

        Raises:
            SchemaError: another kind of document, or a newer one.
        """
        if document.get("kind") != KIND or document.get("schema_version") != SCHEMA_VERSION:
            raise SchemaError(
                f"a record must be of kind {KIND!r}, version {SCHEMA_VERSION}, not "
                f"{document.get('kind')!r}, {document.get('schema_version')!r}"
            )
        known = {field.name for field in fields(cls)}
        values = {name: value for name, value in document.items() if name in known}
        try:
            values["trial"] = Trial.from_dict(values["trial"])
            values["curve"] = tuple(tuple(point) for point in values["curve"])
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise SchemaError(f"a record lacks or has too much: {error}") from error


def freeze(settings: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Settings as a sorted tuple; lists (from JSON) become tuples."""
    return tuple(sorted((name, _frozen(value)) for name, value in settings.items()))


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value
