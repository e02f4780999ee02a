"""What a figure is made of: panels to draw, a table, and a verdict on the paper's claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import pandas as pd

Held = Literal["held", "held in part", "did not hold"]
Style = Literal["line", "dashed", "points", "both", "star", "diamond"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether the claim held here, and the numbers that decided it."""

    held: Held
    because: str
    """What was found, with numbers, in one sentence without its full stop."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Of the rule, under names that MLflow takes."""


CHOICE = -1
"""The color of what is chosen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Points of one panel; `color` counts into the palette, `spread` is half an error bar."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: Style = "both"
    color: int = 0
    spread: Sequence[float] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One relation; a batch axis is logarithmic with powers of two as its numbers."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    batch_axis: bool = False
    log_x: bool = False
    log_y: bool = False
    from_zero: bool = False
    level: tuple[float, str] | None = None
    """A grey line at this height, and what it says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A figure with its data and its verdict."""

    panels: Sequence[Panel]
    table: pd.DataFrame
    verdict: Verdict
    notes: Sequence[str] = ()
    """What a reader must know of how it differs from the paper's, one sentence each."""
    data_s: float = 0.0
    """What measuring and training all that it rests on took, whenever that was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Paper:
    """What the paper says: a figure's name there, its subject, its claim, and the rule used here.

    Only the abstract, the captions and Table I were public when this was written; a claim is what
    they say, or what follows from them.
    """

    name: str
    """`1`, `2`, ... or `table1`."""
    subject: str
    claim: str
    rule: str

    @classmethod
    def read(cls, name: str, text: str | None) -> Paper:
        """From a script's docstring: its first line, and the paragraphs `Claim: ` and `Rule: `."""
        parts = [" ".join(part.split()) for part in (text or "").split("\n\n")]
        found = {part.partition(": ")[0]: part.partition(": ")[2] for part in parts}
        label = "Table I" if name == "table1" else f"Figure {name}"
        return cls(
            name=name,
            subject=found[label].rstrip("."),
            claim=found["Claim"],
            rule=found["Rule"],
        )

    @property
    def label(self) -> str:
        """As a reader calls it."""
        return "Table I" if self.name == "table1" else f"Figure {self.name}"


def sentence(paper: Paper, verdict: Verdict) -> str:
    """The line that is printed, tagged and logged."""
    return f"{paper.label}: the paper's claim {verdict.held} here: {verdict.because}."


def share_held(passed: int, of: int) -> Held:
    """All: held; at least half: held in part; fewer: did not hold."""
    if of and passed == of:
        return "held"
    return "held in part" if of and 2 * passed >= of else "did not hold"
