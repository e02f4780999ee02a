"""Ranks through torch.distributed.run: start, watch, end; which failed and why."""

from mlflow_tula.launch.environment import rank_environment, usable_threads
from mlflow_tula.launch.group import (
    RankFailedError,
    RankGroup,
    launch,
    timeout_failure,
)

__all__ = [
    "RankFailedError",
    "RankGroup",
    "launch",
    "rank_environment",
    "timeout_failure",
    "usable_threads",
]
