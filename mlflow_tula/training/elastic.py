"""How a training goes on when ranks fail: the same global batch, on the ranks that are left.

| what happened | how it goes on |
|---|---|
| a rank ran out of memory | smaller passes, more of them |
| a node was lost | on the other nodes |
| a rank failed or was killed | on the same ranks |
| the same rank failed again, and nothing was saved since | on fewer ranks of a node |

Always from the last checkpoint, always with local x accumulation x world size as it was. A request
that is wrong, a store that is full or a loss that is not finite would only fail again: these end a
training at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.launch.failures import RankFailure
from mlflow_tula.training.plans import BatchPlan

FINAL_KINDS = frozenset(
    {
        *("InvalidInputError", "UnknownNameError", "TableError", "SchemaError", "StoreError"),
        *("TrainingError", "KeyboardInterrupt", "timeout"),
    }
)
"""Failures that another start would meet again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NextStart:
    """The plan to go on with, or None and why not."""

    plan: BatchPlan | None
    reason: str


class Restarts:
    """Decides after each failure how to go on; `num` counts the starts after the first."""

    def __init__(self, most: int) -> None:
        """Allow so many restarts."""
        self.num = 0
        self._most = most
        self._last: tuple[int | None, int] | None = None

    def after(
        self, failure: RankFailure, plan: BatchPlan, *, saved_step: int, nodes: int
    ) -> NextStart:
        """How to go on.

        Args:
            failure: why the ranks ended.
            plan: what they trained with.
            saved_step: of the newest checkpoint; 0 without one.
            nodes: machines that are left.
        """
        if failure.kind in FINAL_KINDS:
            return NextStart(plan=None, reason="")
        if self.num >= self._most:
            done = f"{self.num} restart{'s' * (self.num != 1)}, the most that --max-restarts allows"
            return NextStart(plan=None, reason=f"after {done}" if self._most else "")
        here = (failure.rank, saved_step)
        again = self._last == here and failure.rank is not None
        self._last = here
        try:
            found = _next_plan(failure, plan, nodes=nodes, again=again)
        except InvalidInputError as error:
            return NextStart(plan=None, reason=f"no restart: {error}")
        self.num += 1
        where = f"step {saved_step}" if saved_step else "the beginning"
        return NextStart(
            plan=found,
            reason=f"restart {self.num} of {self._most} from {where}: {failure.reason}; "
            f"batch {found.words}",
        )


def _next_plan(failure: RankFailure, plan: BatchPlan, *, nodes: int, again: bool) -> BatchPlan:
    # Batch normalisation needs two samples a pass: a plan with fewer has none.
    smallest = 2 if min(plan.sizes) > 1 else 1
    if nodes < plan.nodes:
        return _on_fewer(plan, nodes, plan.devices_per_node, smallest)
    if failure.status == "oom":
        return plan.with_smaller_passes(smallest=smallest)
    if again and plan.devices_per_node > 1:
        return _on_fewer(plan, plan.nodes, plan.devices_per_node - 1, smallest)
    return plan


def _on_fewer(plan: BatchPlan, nodes: int, devices: int, smallest: int) -> BatchPlan:
    """The most ranks, at most so many nodes and devices, that can keep the global batch."""
    first: InvalidInputError | None = None
    layouts = [(n, d) for n in range(1, nodes + 1) for d in range(1, devices + 1)]
    for count, per_node in sorted(layouts, key=lambda pair: (-pair[0] * pair[1], -pair[0])):
        try:
            return plan.for_world(count, per_node, smallest=smallest)
        except InvalidInputError as error:
            first = first or error
    assert first is not None, "there is one layout at least"
    raise first
