"""How a global batch is cut into local batches, accumulation steps and ranks.

    global_batch_size = local_batch_size x accumulation_steps x world_size

always, exactly: a global batch that the world size does not divide is refused with the nearest
ones that it does, and is never rounded behind one's back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.specs import check_int


def nearest_valid_sizes(
    global_batch_size: int, world_size: int, dataset_size: int | None = None
) -> tuple[int, ...]:
    """The multiples of `world_size` on both sides of `global_batch_size`, ascending."""
    below = global_batch_size // world_size * world_size
    sizes = {size for size in (below, below + world_size) if size >= world_size}
    if dataset_size is not None:
        largest = dataset_size // world_size * world_size
        sizes = {min(size, largest) for size in sizes} if largest else set()
    return tuple(sorted(sizes))


def check_global_batch_size(
    global_batch_size: object, *, world_size: int = 1, dataset_size: int | None = None
) -> int:
    """Return a global batch size that can be trained, or raise InvalidInputError with a way out.

    Args:
        global_batch_size: samples per optimizer step over all ranks.
        world_size: ranks; must divide it.
        dataset_size: training samples; a batch cannot be larger.
    """
    size = check_int("global_batch_size", global_batch_size)
    if dataset_size is not None and size > dataset_size:
        raise InvalidInputError(
            f"global_batch_size must be at most the dataset's {dataset_size} samples, not {size}"
        )
    if size % world_size:
        near = nearest_valid_sizes(size, world_size, dataset_size)
        way_out = f"; the nearest valid sizes are {' and '.join(map(str, near))}" if near else ""
        raise InvalidInputError(
            f"global_batch_size must be divisible by the world size {world_size}, "
            f"not {size}{way_out}"
        )
    return size


def split_global_batch_size(
    global_batch_size: object,
    *,
    world_size: int = 1,
    accumulation_steps: int = 1,
    dataset_size: int | None = None,
) -> int:
    """The local batch size, or InvalidInputError where the three factors do not multiply out."""
    size = check_global_batch_size(
        global_batch_size, world_size=world_size, dataset_size=dataset_size
    )
    steps = check_int("accumulation_steps", accumulation_steps)
    per_rank = size // world_size
    if per_rank % steps:
        near = nearest_valid_sizes(size, world_size * steps, dataset_size)
        way_out = f"; the nearest valid sizes are {' and '.join(map(str, near))}" if near else ""
        raise InvalidInputError(
            f"global_batch_size must be divisible by world size x accumulation steps = "
            f"{world_size} x {steps}, not {size}{way_out}"
        )
    return per_rank // steps


def divisors(number: int, *, largest: int | None = None) -> tuple[int, ...]:
    """All divisors of `number` (at most `largest`), ascending."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    found = sorted({*low, *(number // d for d in low)})
    return tuple(d for d in found if largest is None or d <= largest)


def candidate_batch_sizes(
    dataset_size: int, world_size: int = 1, smallest: int = 8, largest: int | None = None
) -> list[int]:
    """Local batch sizes worth a look: powers of two from `smallest`, bounded by the dataset.

    None exceeds a rank's share of the data, ceil(dataset_size / world_size); a dataset smaller
    than `smallest` gives that share alone, as does a `largest` below `smallest`.
    """
    check_int("dataset_size", dataset_size)
    check_int("world_size", world_size)
    check_int("smallest", smallest)
    bound = math.ceil(dataset_size / world_size)
    if largest is not None:
        bound = min(bound, check_int("largest", largest))
    start = 2 ** math.ceil(math.log2(smallest))
    sizes = []
    while start <= bound:
        sizes.append(start)
        start *= 2
    return sizes or [bound]


def check_candidates(
    candidates: Sequence[object],
    *,
    world_sizes: Sequence[int],
    dataset_size: int,
    accumulation_steps: int = 1,
) -> list[int]:
    """Sorted global batch sizes, each divisible by the factors of one world size, or raise."""
    if not len(candidates):
        raise InvalidInputError("candidates must be a non-empty list of global batch sizes")
    sizes = []
    for candidate in candidates:
        size = check_global_batch_size(candidate, dataset_size=dataset_size)
        if all(size % (world * accumulation_steps) for world in world_sizes):
            split_global_batch_size(
                size,
                world_size=min(world_sizes),
                accumulation_steps=accumulation_steps,
                dataset_size=dataset_size,
            )
        sizes.append(size)
    return sorted(set(sizes))
