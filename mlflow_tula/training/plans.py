"""The decision: how many samples a step takes, and how ranks share them.

    global_batch_size = local_batch_size x accumulation_steps x world size

whatever happens to the ranks: `for_world` cuts the same global batch for fewer (or more) of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from mlflow_tula.batches import divisors, split_global_batch_size
from mlflow_tula.errors import InvalidInputError
from mlflow_tula.specs import Spec, check_int


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan(Spec):
    """The decision a training run holds on to from its first step to its last, resumes included.

    `source` says where it comes from (`explicit`, `tula.vgg11.digits.<hardware> version 3`); it
    is recorded and not compared. `rank_batch_sizes` are uneven local batch sizes, one a rank, with
    `local_batch_size` as their mean; empty is an even split. With `balance` ranks begin with that
    split and move it until their steps take equally long. Neither changes what a step computes:
    every rank's gradient counts by its samples.
    """

    global_batch_size: int
    local_batch_size: int
    accumulation_steps: int = 1
    nodes: int = 1
    devices_per_node: int = 1
    source: str = "explicit"
    rank_batch_sizes: tuple[int, ...] = ()
    balance: bool = False

    def __post_init__(self) -> None:
        """Check that local x accumulation x world size is the global batch size, exactly."""
        for name in (
            "global_batch_size",
            "local_batch_size",
            "accumulation_steps",
            "nodes",
            "devices_per_node",
        ):
            object.__setattr__(self, name, check_int(name, getattr(self, name)))
        product = self.local_batch_size * self.accumulation_steps * self.world_size
        if product != self.global_batch_size:
            raise InvalidInputError(
                "global_batch_size must be local_batch_size x accumulation_steps x world size = "
                f"{self.local_batch_size} x {self.accumulation_steps} x {self.world_size} = "
                f"{product}, not {self.global_batch_size}"
            )
        sizes = tuple(check_int("rank_batch_sizes", size) for size in self.rank_batch_sizes)
        object.__setattr__(self, "rank_batch_sizes", sizes)
        if sizes:
            self._check_sizes(sizes)

    def _check_sizes(self, sizes: tuple[int, ...]) -> None:
        """One size a rank, and together as many samples as an even split has."""
        if len(sizes) != self.world_size:
            raise InvalidInputError(
                f"uneven batches need one local batch size a rank, {self.world_size} in all, not "
                f"{len(sizes)}: {','.join(map(str, sizes))}"
            )
        whole = self.local_batch_size * self.world_size
        if sum(sizes) != whole:
            raise InvalidInputError(
                f"uneven batches must add up to global_batch_size / accumulation_steps = {whole}, "
                f"not {' + '.join(map(str, sizes))} = {sum(sizes)}"
            )

    @classmethod
    def of(
        cls,
        global_batch_size: object,
        *,
        nodes: int = 1,
        devices_per_node: int = 1,
        accumulation_steps: int = 1,
        dataset_size: int | None = None,
        source: str = "explicit",
        rank_batch_sizes: Sequence[int] = (),
        balance: bool = False,
    ) -> BatchPlan:
        """Cut a global batch size; one that does not divide names the nearest that do."""
        world_size = check_int("nodes", nodes) * check_int("devices_per_node", devices_per_node)
        local = split_global_batch_size(
            global_batch_size,
            world_size=world_size,
            accumulation_steps=accumulation_steps,
            dataset_size=dataset_size,
        )
        return cls(
            global_batch_size=local * accumulation_steps * world_size,
            local_batch_size=local,
            accumulation_steps=accumulation_steps,
            nodes=nodes,
            devices_per_node=devices_per_node,
            source=source,
            rank_batch_sizes=tuple(rank_batch_sizes),
            balance=balance,
        )

    @property
    def world_size(self) -> int:
        """Data-parallel processes, one per device."""
        return self.nodes * self.devices_per_node

    @property
    def sizes(self) -> tuple[int, ...]:
        """Local batch size of every rank."""
        return self.rank_batch_sizes or (self.local_batch_size,) * self.world_size

    @property
    def words(self) -> str:
        """`128 = 32 x 2 x 2`, with uneven local batches as `(24+40) x 2`."""
        if self.rank_batch_sizes:
            cut = f"({'+'.join(map(str, self.rank_batch_sizes))}) x {self.accumulation_steps}"
        else:
            cut = f"{self.local_batch_size} x {self.accumulation_steps} x {self.world_size}"
        return f"{self.global_batch_size} = {cut}"

    def with_sizes(self, sizes: Sequence[int]) -> BatchPlan:
        """The same plan with another split among the ranks."""
        even = len(set(sizes)) == 1
        return dataclasses.replace(self, rank_batch_sizes=() if even else tuple(sizes))

    def for_world(self, nodes: int, devices_per_node: int, *, smallest: int = 1) -> BatchPlan:
        """The same global batch on another number of ranks, with more accumulation where needed.

        No rank takes more samples at a time than now (its memory is known to hold those), and as
        many as that allows. Uneven sizes were those of other ranks: the split is even again.

        Args:
            nodes: machines that are left.
            devices_per_node: ranks on each.
            smallest: samples a pass must have (two with batch normalisation).

        Raises:
            InvalidInputError: the global batch cannot be cut so; says why.
        """
        world_size = check_int("nodes", nodes) * check_int("devices_per_node", devices_per_node)
        if (nodes, devices_per_node) == (self.nodes, self.devices_per_node):
            return self
        share, rest = divmod(self.global_batch_size, world_size)
        if rest:
            raise InvalidInputError(
                f"global batch size {self.global_batch_size} cannot be kept on {world_size} ranks: "
                f"{world_size} does not divide it"
            )
        local = divisors(share, largest=max(self.sizes))[-1]
        if local < smallest:
            raise InvalidInputError(
                f"global batch size {self.global_batch_size} cannot be kept on {world_size} ranks: "
                f"of {share} samples a rank at most {max(self.sizes)} fit at a time, and only "
                f"passes of {local} come out even, less than batch normalisation needs"
            )
        return dataclasses.replace(
            self,
            local_batch_size=local,
            accumulation_steps=share // local,
            nodes=nodes,
            devices_per_node=devices_per_node,
            rank_batch_sizes=(),
        )

    def with_smaller_passes(self, *, smallest: int = 1) -> BatchPlan:
        """The same global batch in smaller passes, for ranks that ran out of memory.

        Raises:
            InvalidInputError: a pass cannot be made smaller.
        """
        share = self.local_batch_size * self.accumulation_steps
        local = divisors(share, largest=max(self.local_batch_size // 2, 1))[-1]
        if local >= self.local_batch_size or local < smallest:
            raise InvalidInputError(
                f"local batch size {self.local_batch_size} cannot be made smaller"
                f"{' with batch normalisation' if smallest > 1 else ''}"
            )
        return dataclasses.replace(
            self,
            local_batch_size=local,
            accumulation_steps=share // local,
            rank_batch_sizes=(),
        )

    def identity(self) -> dict[str, object]:
        """What a checkpoint must share with a training that goes on from it.

        The global batch size alone: how it is cut changes which rank does what, never what a step
        computes (but for the statistics of batch normalisation, which are a pass's own).
        """
        return {"global_batch_size": self.global_batch_size}
