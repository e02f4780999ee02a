"""Which configurations a sweep may measure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from mlflow_tula.batches import candidate_batch_sizes
from mlflow_tula.errors import InvalidInputError
from mlflow_tula.probes import Probe
from mlflow_tula.specs import HardwareSpec, Workload, check_int
from mlflow_tula.table import Compression

SMALLEST = 8
"""Where `auto` begins."""


def check_world_sizes(
    world_sizes: Sequence[object] | Literal["auto"], hardware: HardwareSpec
) -> list[int]:
    """Sorted world sizes that this machine can carry; `auto`: 1 and all devices (CPU: 1 and 2).

    Raises:
        InvalidInputError: not whole numbers, or more ranks than there are devices.
    """
    most = hardware.devices_per_node
    if isinstance(world_sizes, str):
        if world_sizes != "auto":
            raise InvalidInputError(
                f"world_sizes must be 'auto' or a list of whole numbers, not {world_sizes!r}"
            )
        return sorted({1, min(2, most) if hardware.device_type == "cpu" else most})
    sizes = sorted({check_int("world_size", size) for size in _items("world_sizes", world_sizes)})
    if sizes[-1] > most:
        what = "cores" if hardware.device_type == "cpu" else "devices"
        raise InvalidInputError(
            f"world_size must be at most the {most} {what} of this machine, not {sizes[-1]}"
        )
    return sizes


def check_batch_sizes(batch_sizes: Sequence[object] | Literal["auto"]) -> list[int] | None:
    """Sorted local batch sizes, None for `auto`; all that can be checked without the dataset."""
    if isinstance(batch_sizes, str):
        if batch_sizes != "auto":
            raise InvalidInputError(
                f"batch_sizes must be 'auto' or a list of whole numbers, not {batch_sizes!r}"
            )
        return None
    items = _items("batch_sizes", batch_sizes)
    return sorted({check_int("local_batch_size", size) for size in items})


def candidates(
    workload: Workload,
    world_sizes: Sequence[int],
    batch_sizes: Sequence[int] | None,
    *,
    accumulation_steps: int | Sequence[int] = 1,
    max_batch_size: int | None = None,
    node_counts: Sequence[int] = (1,),
    compressions: Sequence[Compression | None] = (None,),
) -> list[Probe]:
    """All configurations, none with more samples per rank than ceil(dataset_size / world_size).

    Args:
        workload: its dataset's size bounds the batch; with batch norm a local batch of 1 (which
            cannot be normalised) is left out of `auto`.
        world_sizes: ranks of one node; several nodes carry the most of them each.
        batch_sizes: local batch sizes; None takes powers of two from 8.
        accumulation_steps: passes per optimizer step.
        max_batch_size: nothing larger per rank.
        node_counts: how many machines.
        compressions: how gradients are sent, where there are several ranks.

    Raises:
        InvalidInputError: a size that no rank's share of the dataset holds.
    """
    found = []
    if isinstance(accumulation_steps, int):
        accumulation_steps = (accumulation_steps,)
    accumulations = _items("accumulation_steps", accumulation_steps)
    for nodes, devices in layouts(world_sizes, node_counts):
        share = math.ceil(workload.dataset_size / (nodes * devices))
        bound = share if max_batch_size is None else min(share, max_batch_size)
        if batch_sizes is None:
            sizes = candidate_batch_sizes(
                workload.dataset_size,
                nodes * devices,
                smallest=min(SMALLEST, bound),
                largest=bound,
            )
        else:
            sizes = [size for size in batch_sizes if size <= bound]
        found += [
            Probe(
                local_batch_size=size,
                nodes=nodes,
                devices_per_node=devices,
                accumulation_steps=check_int("accumulation_steps", steps),
                gradient_compression=compression,
            )
            for steps in accumulations
            for compression in (compressions if nodes * devices > 1 else (None,))
            for size in sizes
        ]
    if batch_sizes is not None:
        _check_bounds(workload, world_sizes, batch_sizes, max_batch_size)
    return found


def layouts(world_sizes: Sequence[int], node_counts: Sequence[int] = (1,)) -> list[tuple[int, int]]:
    """(nodes, devices per node): every world size on one node, the largest on each of several."""
    alone = [(1, devices) for devices in world_sizes] if 1 in node_counts else []
    return alone + [(nodes, max(world_sizes)) for nodes in sorted(node_counts) if nodes > 1]


def check_node_counts(node_counts: Sequence[object] | Literal["auto"], most: int = 1) -> list[int]:
    """Sorted numbers of nodes that this command can carry; `auto`: one and all of them.

    Raises:
        InvalidInputError: more nodes than the launcher started.
    """
    if isinstance(node_counts, str):
        return sorted({1, most})
    counts = sorted({check_int("nodes", count) for count in _items("node_counts", node_counts)})
    if counts[-1] > most:
        raise InvalidInputError(
            f"probes on {counts[-1]} nodes need as many, and this command was started on {most}: "
            "start it on each of them (docs/distributed.md), or give fewer --node-counts"
        )
    return counts


def smaller(probe: Probe, workload: Workload) -> Probe | None:
    """The next smaller configuration to try when the smallest one ran out of memory."""
    size = probe.local_batch_size // 2
    if size < (2 if workload.batch_norm else 1):
        return None
    return Probe(
        local_batch_size=size,
        nodes=probe.nodes,
        devices_per_node=probe.devices_per_node,
        accumulation_steps=probe.accumulation_steps,
        gradient_compression=probe.gradient_compression,
    )


def _check_bounds(
    workload: Workload,
    world_sizes: Sequence[int],
    batch_sizes: Sequence[int],
    max_batch_size: int | None,
) -> None:
    """Every explicit size must be possible at one world size at least."""
    share = math.ceil(workload.dataset_size / min(world_sizes))
    if batch_sizes[-1] > share:
        raise InvalidInputError(
            f"local_batch_size must be at most {share} (the {workload.dataset_size} samples of "
            f"{workload.dataset} over {min(world_sizes)} ranks), not {batch_sizes[-1]}"
        )
    if max_batch_size is not None and batch_sizes[0] > max_batch_size:
        raise InvalidInputError(
            f"every batch size is above max_batch_size = {max_batch_size}: {list(batch_sizes)}"
        )


def _items(name: str, values: Sequence[object]) -> list[object]:
    try:
        items = list(values)
    except TypeError as error:
        raise InvalidInputError(
            f"{name} must be 'auto' or a list of whole numbers, not {values!r}"
        ) from error
    if not items:
        raise InvalidInputError(f"{name} must name at least one size: the list is empty")
    return items
