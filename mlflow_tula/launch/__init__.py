"""Ranks through torch.distributed.run: start, watch, end; which failed and why."""

from mlflow_tula.launch.group import (
    RankFailedError,
    RankGroup,
    launch,
    rank_environment,
    timeout_failure,
    usable_threads,
)

__all__ = [
    "RankFailedError",
    "RankGroup",
    "launch",
    "rank_environment",
    "timeout_failure",
    "usable_threads",
]
