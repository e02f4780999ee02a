"""Step time: `max(data_time, overlap(compute(b), sync(n)))`, fitted to the probes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlflow_tula.errors import SchemaError, TableError
from mlflow_tula.table import Measurement


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimePredictor:
    """Fitted parameters of `formulas.step_time`, as the plain mapping that it reads."""

    params: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return self.params

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepTimePredictor:
        """Inverse of `to_dict`."""
        if not isinstance(data, Mapping) or "range" not in data:
            raise SchemaError("step_time must be a JSON object with a range")
        return cls(params=dict(data))


def fit(rows: Sequence[Measurement]) -> StepTimePredictor:
    """Fit the rows that gave a step time."""
    from scipy.optimize import nnls

    if not rows:
        raise TableError("no row of status ok: nothing to fit; measure a smaller batch size")
    b = np.array([r.local_batch_size for r in rows], float)
    t = np.array([r.step_time_s for r in rows], float)
    many = np.array([r.nodes > 1 for r in rows], float)
    best = None
    for floor in [0.0, *(t.min() * f for f in (0.9, 1.0, 1.05))]:
        for power in (1.0, 2.0, 8.0):
            design = np.c_[np.ones_like(b), b, many] / t[:, None]
            target = np.ones_like(t) * 1.0
            coef, _ = nnls(design, target)
            line = coef[0] + coef[1] * b
            high = np.maximum(line, floor)
            value = (
                high
                * (1 + (np.minimum(line, floor) / np.maximum(high, 1e-300)) ** power) ** (1 / power)
                + coef[2] * many
            )
            loss = float(np.mean(np.abs(np.log(np.maximum(value, 1e-300) / t))))
            if best is None or loss < best[0]:
                best = (loss, floor, power, coef, value)
    assert best is not None
    _, floor, power, coef, value = best
    degrees = max(len(t) - 3, 1)
    log_sd = float(np.sqrt(np.sum(np.log(np.maximum(value, 1e-300) / t) ** 2) / degrees + 0.03**2))
    return StepTimePredictor(
        params={
            "floor_s": float(floor),
            "alpha_s": float(coef[0]),
            "beta_s": float(coef[1]),
            "node_penalty_s": float(coef[2]),
            "power": float(power),
            "degrees": degrees,
            "log_sd": log_sd,
            "range": {
                "smallest_local_batch_size": int(b.min()),
                "largest_local_batch_size": int(b.max()),
                "most_nodes": max(r.nodes for r in rows),
                "most_devices_per_node": max(r.devices_per_node for r in rows),
                "largest_world_size": max(r.world_size for r in rows),
            },
        }
    )
