"""What feeds one rank: a DataLoader over its share of the dataset, the same for the same seed.

    loader = build_loader(job, data.train, 64, rank=0, world_size=2, shuffle=True, drop_last=True)
    for epoch in range(epochs):
        start_epoch(loader, epoch)
        for images, labels in loader: ...

With a seed and an epoch the batches are decided, augmentation included, whatever the number of
workers and whether the run was resumed: a rank's random numbers are seeded per batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, default_collate
from torch.utils.data.distributed import DistributedSampler

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.specs import check_int
from mlflow_tula.workloads.imagedata import TensorImages
from mlflow_tula.workloads.job import Job, is_import_path


def build_loader(
    job: Job,
    dataset: Dataset[Any],
    batch_size: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    shuffle: bool = True,
    drop_last: bool | None = None,
    seed: int | None = None,
    num_workers: int | None = None,
    pin_memory: bool | None = None,
) -> DataLoader[Any]:
    """Make the loader of one rank.

    Every rank gets equally many batches when training. With neither `shuffle` nor `drop_last`
    (evaluation) each sample is seen exactly once over all ranks, none repeated to fill up.

    Args:
        job: gives `drop_last`, `seed` and `num_workers` where they are None.
        dataset: all of the data; the rank's share is taken here.
        batch_size: samples per rank and step.
        rank: this process, of `world_size`.
        world_size: data-parallel processes.
        shuffle: a new order each epoch (`start_epoch`).
        drop_last: leave out the last, smaller batch.
        seed: of order and augmentation.
        num_workers: loader processes; 0 loads in this one.
        pin_memory: None pins where the machine has CUDA.

    Raises:
        InvalidInputError: no rank would get a whole batch.
    """
    batch_size = check_int("local_batch_size", batch_size)
    drop_last = job.drop_last if drop_last is None else drop_last
    seed = job.seed if seed is None else seed
    workers = job.num_workers if num_workers is None else num_workers
    size = len(cast(Sized, dataset))
    if drop_last and size // world_size < batch_size:
        raise InvalidInputError(
            f"local_batch_size must be at most the {size // world_size} samples that each of "
            f"{world_size} ranks has of {size}, not {batch_size}"
        )
    sampler: Sampler[int]
    if shuffle or drop_last:
        sampler = DistributedSampler(
            dataset, world_size, rank, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
    else:
        sampler = _EachOnce(size, rank, world_size)
    return DataLoader(
        _Batches(dataset, seed=seed, reseed=job.augment or is_import_path(job.dataset)),
        batch_size=batch_size,
        sampler=sampler,
        drop_last=drop_last,
        collate_fn=_as_it_is,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
        generator=torch.Generator().manual_seed(seed),
    )


def start_epoch(loader: DataLoader[Any], epoch: int) -> None:
    """Tell the loader which epoch comes next: it decides the order and the augmentation."""
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.set_epoch(epoch)
    if isinstance(loader.dataset, _Batches):
        loader.dataset.epoch.fill_(epoch)


class _EachOnce(Sampler[int]):
    """Every `world_size`-th sample from `rank` on; shares may differ by one."""

    def __init__(self, size: int, rank: int, world_size: int) -> None:
        self._indices = range(rank, size, world_size)

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)


class _Batches(Dataset[Any]):
    """Another dataset, read a batch at a time with random numbers seeded per batch."""

    def __init__(self, base: Dataset[Any], *, seed: int, reseed: bool) -> None:
        self.base = base
        self._seed = seed
        self._reseed = reseed
        # Shared memory: persistent workers hold copies of this object and must see the epoch.
        epoch = torch.zeros((), dtype=torch.int64)
        self.epoch: Tensor = epoch.share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(cast(Sized, self.base))

    def __getitem__(self, index: int) -> Any:
        return self.base[index]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        if not self._reseed:
            return _fetch(self.base, indices)
        with torch.random.fork_rng(devices=[]):
            mixed = hash((self._seed, int(self.epoch), indices[0], len(indices)))
            torch.manual_seed(mixed % 2**63)
            return _fetch(self.base, indices)


def _fetch(dataset: Dataset[Any], indices: Sequence[int]) -> Any:
    if isinstance(dataset, TensorImages):
        return dataset.fetch(indices)
    if isinstance(dataset, Subset):
        return _fetch(dataset.dataset, [dataset.indices[i] for i in indices])
    return default_collate([dataset[i] for i in indices])


def _as_it_is(batch: Any) -> Any:
    return batch
