"""Where a loop runs: rank and world, hardware, peak memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from mlflow_tula import hardware
from mlflow_tula.integrations.model_calls import parameters_of
from mlflow_tula.probing.memory import resident_peak_bytes

if TYPE_CHECKING:
    from mlflow_tula.integrations.loop import Loop
    from mlflow_tula.specs import HardwareSpec


class Layout:
    """This rank's place among the data-parallel processes; one process where there is no group."""

    def __init__(self, nodes: int | None = None) -> None:
        """Ask torch.distributed and torchrun's variables; `nodes`: who knows better."""
        self.rank, self.world_size = 0, 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.rank = torch.distributed.get_rank()
            self.world_size = torch.distributed.get_world_size()
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        per_node = int(local) if local.isdigit() and int(local) > 0 else self.world_size
        if nodes is not None:
            per_node = max(self.world_size // nodes, 1)
        if self.world_size % per_node:
            per_node = self.world_size
        self.devices_per_node = min(per_node, self.world_size)
        self.nodes = self.world_size // self.devices_per_node


def hardware_of(device_type: str) -> HardwareSpec | None:
    """The machine as seen from a loop's device; None for kinds that are not described yet."""
    if device_type not in ("cpu", "cuda"):
        return None
    return hardware.detect(device_type)


_seen_loops = 0


class PeakMemory:
    """Largest bytes reserved (CUDA) or resident (CPU) since the loop began.

    Both are counts of the whole process, which nobody may reset behind the user's back: a second
    loop of a process has a peak of its own only once it is above that of the first.
    """

    def __init__(self, loop: Loop) -> None:
        """Remember what the process had reached before this loop."""
        global _seen_loops
        parameters = parameters_of(loop.optimizer())
        self._device = parameters[0].device if parameters else torch.device("cpu")
        self._before = self._now() if _seen_loops else None
        _seen_loops += 1

    def read(self) -> int | None:
        """Bytes, None where an earlier loop's peak hides this one's."""
        now = self._now()
        if now is None or (self._before is not None and now <= self._before):
            return None
        return now

    def _now(self) -> int | None:
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_reserved(self._device))
        return resident_peak_bytes() if self._device.type == "cpu" else None
