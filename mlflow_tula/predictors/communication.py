"""What a step's communication is, in all-reduces of its gradient; the link knows what one takes.

    strategy, backend      all-reduces
    ddp                    1
    fsdp                   3/2    parameters gathered twice, gradients scattered once, a half each
    fsdp, gloo             2      its reduce-scatter is an all-reduce of which a part is kept
    fsdp, gloo, 2 ranks    5/2    a gather takes 3/4: one connection carries both directions

Of gloo: torch 2.14, 10 MB between hosts at 200 Mbit/s and 1 Gbit/s. A reduce-scatter took 1.0
all-reduces on 2 and 4 hosts, a gather 0.73 and 0.75 on 2 and 0.47 on 4.
"""

from __future__ import annotations

from mlflow_tula.predictors.sync_formulas import num_buckets
from mlflow_tula.table import ProfileTable


def all_reduces(table: ProfileTable) -> float:
    """A step's communication on more than two ranks, in all-reduces of a gradient."""
    if table.workload.strategy == "ddp":
        return 1.0
    return 2.0 if _is_gloo(table) else 1.5


def pair_factor(table: ProfileTable) -> float:
    """How much longer two ranks take than the law of more says."""
    return 1.25 if table.workload.strategy == "fsdp" and _is_gloo(table) else 1.0


def messages(table: ProfileTable) -> float:
    """In how many buckets gradients were sent: as the communication probe counted, or about so.

    FSDP gathers and scatters block by block.
    """
    if table.workload.strategy == "fsdp":
        return all_reduces(table) * (table.workload.num_blocks or 1)
    counted = [link.num_buckets for link in table.links if link.num_buckets]
    gradient = float(table.workload.gradient_bytes or 0.0)
    whole = [link.message_bytes for link in table.links if link.num_buckets]
    if counted and max(whole) >= 0.99 * gradient:
        return float(counted[0])
    caps = [row.bucket_bytes for row in table.ok if row.bucket_bytes is not None]
    return num_buckets(gradient, caps[0] if caps else None) if gradient else 1.0


def _is_gloo(table: ProfileTable) -> bool:
    usual = "gloo" if table.hardware.device_type == "cpu" else "nccl"
    return (table.hardware.backend or usual) == "gloo"
