"""One claim of the accuracy benchmark: its cases, and the line of the table that sums them up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from published import Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One fit: what was left out, and what each method says about it."""

    truth: Floats
    value: Floats
    lower: Floats
    upper: Floats
    line: Floats
    fit_s: float
    adaptdl: Floats | None = None
    adaptdl_fit_s: float = np.nan


@dataclass(kw_only=True, slots=True)
class Claim:
    """All cases of one kind, and their summary."""

    name: str
    cases: list[Case] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """One line of the table; errors, coverage and width in percent, times in milliseconds."""
        truth, value, lower, upper, line = (
            np.concatenate([getattr(case, name) for case in self.cases])
            for name in ("truth", "value", "lower", "upper", "line")
        )
        inside = (truth >= lower) & (truth <= upper)
        row = {
            "claim": self.name,
            "n": len(truth),
            **_errors("", truth, value),
            "P90": np.percentile(100 * np.abs(value / truth - 1), 90),
            "covered": 100 * inside.mean(),
            "width": 100 * np.median((upper - lower) / truth),
            **_errors("line ", truth, line),
            "fit ms": 1e3 * np.median([case.fit_s for case in self.cases]),
        }
        theirs = [case for case in self.cases if case.adaptdl is not None]
        if theirs:
            known = np.concatenate([case.truth for case in theirs])
            guess = np.concatenate([case.adaptdl for case in theirs if case.adaptdl is not None])
            row |= _errors("AdaptDL ", known, guess)
            row["AdaptDL fit ms"] = 1e3 * np.median([case.adaptdl_fit_s for case in theirs])
        return row


def _errors(prefix: str, truth: Floats, value: Floats) -> dict[str, float]:
    error = 100 * np.abs(value / truth - 1)
    return {f"{prefix}mean": float(error.mean()), f"{prefix}median": float(np.median(error))}


def interval(out: pd.DataFrame, name: str) -> dict[str, Floats]:
    """Value, lower and upper of one predicted quantity, by the names of a Case."""
    ends = {"value": name, "lower": f"{name}_lower", "upper": f"{name}_upper"}
    return {key: out[column].to_numpy(float) for key, column in ends.items()}
