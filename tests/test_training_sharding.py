import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.training.facts import BatchPlan
from mlflow_tula.training.sharding import EvaluationBatches, ShardedBatches, epoch_order


@st.composite
def plans(draw: st.DrawFn, smallest: int = 1) -> BatchPlan:
    local = draw(st.integers(smallest, 6))
    passes, devices = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    return BatchPlan.of(
        local * passes * devices, devices_per_node=devices, accumulation_steps=passes
    )


def every_step(
    plan: BatchPlan, size: int, *, drop_last: bool, smallest: int = 1, epoch: int = 0
) -> list[list[list[list[int]]]]:
    """Samples by step, rank and pass."""
    by_rank = []
    for rank in range(plan.world_size):
        batches = ShardedBatches(
            size, plan, rank=rank, seed=3, drop_last=drop_last, smallest=smallest
        )
        batches.start(epoch)
        passes = iter(batches)
        assert len(batches) == len(list(batches))
        by_rank.append(
            [
                [next(passes) for _ in batches.share(step).passes]
                for step in range(batches.steps_per_epoch)
            ]
        )
    return [
        [by_rank[rank][step] for rank in range(plan.world_size)] for step in range(len(by_rank[0]))
    ]


@given(plans(), st.integers(0, 60), st.booleans())
def test_a_step_takes_the_same_samples_however_it_is_cut(
    plan: BatchPlan, extra: int, drop_last: bool
) -> None:
    size = plan.global_batch_size + extra
    order = epoch_order(size, 3, 0).tolist()
    steps = every_step(plan, size, drop_last=drop_last)
    taken = [
        [sample for of_rank in step for of_pass in of_rank for sample in of_pass] for step in steps
    ]
    whole = size // plan.global_batch_size
    for number, samples in enumerate(taken[:whole]):
        begin = number * plan.global_batch_size
        assert samples == order[begin : begin + plan.global_batch_size]
    flat = [sample for samples in taken for sample in samples]
    assert flat == order[: len(flat)]
    left = size - len(flat)
    assert left == (size % plan.global_batch_size if drop_last else left)
    assert drop_last or left < plan.world_size


@given(plans(smallest=2), st.integers(0, 60), st.booleans())
def test_batch_norm_never_meets_a_single_sample(
    plan: BatchPlan, extra: int, drop_last: bool
) -> None:
    size = plan.global_batch_size + extra
    for step in every_step(plan, size, drop_last=drop_last, smallest=2):
        for of_rank in step:
            assert of_rank, "a rank without a pass would leave the others waiting"
            assert all(2 <= len(of_pass) <= plan.local_batch_size for of_pass in of_rank)
            assert len(of_rank) <= plan.accumulation_steps


@given(plans(), st.integers(0, 60), st.booleans())
def test_the_weights_of_a_step_add_up_to_one(plan: BatchPlan, extra: int, drop_last: bool) -> None:
    size = plan.global_batch_size + extra
    ranks = [
        ShardedBatches(size, plan, rank=rank, drop_last=drop_last)
        for rank in range(plan.world_size)
    ]
    for step in range(ranks[0].steps_per_epoch):
        shares = [rank.share(step) for rank in ranks]
        samples = sum(end - first for share in shares for first, end in share.passes)
        assert {share.samples for share in shares} == {samples}
    total = sum(ranks[0].share(step).samples for step in range(ranks[0].steps_per_epoch))
    assert total == ranks[0].samples_per_epoch


def test_an_epoch_can_begin_in_its_middle_and_epochs_differ() -> None:
    batches = ShardedBatches(100, BatchPlan.of(10, accumulation_steps=2), seed=5)
    batches.start(2)
    whole = list(batches)
    batches.start(2, step=7)
    assert list(batches) == whole[14:]
    assert len(batches) == 6
    batches.start(3)
    assert list(batches) != whole
    assert epoch_order(100, 5, 2).tolist() != epoch_order(100, 6, 2).tolist()


def test_a_batch_larger_than_the_dataset_is_refused() -> None:
    with pytest.raises(
        InvalidInputError, match="at most the dataset's 100 training samples, not 128"
    ):
        ShardedBatches(100, BatchPlan.of(128))
    assert ShardedBatches(100, BatchPlan.of(100)).steps_per_epoch == 1


def test_a_local_batch_of_one_is_refused_with_batch_norm() -> None:
    with pytest.raises(InvalidInputError, match="at least 2 for a model with batch normalisation"):
        ShardedBatches(100, BatchPlan.of(2, devices_per_node=2), smallest=2)


@pytest.mark.parametrize(("size", "steps"), [(33, 2), (34, 3), (48, 3), (47, 3)])
def test_a_last_batch_of_one_is_left_out_with_batch_norm(size: int, steps: int) -> None:
    batches = ShardedBatches(size, BatchPlan.of(16), drop_last=False, smallest=2)
    assert batches.steps_per_epoch == steps


@given(st.integers(0, 200), st.integers(1, 50), st.integers(1, 9))
def test_evaluation_sees_each_sample_once(size: int, batch_size: int, world_size: int) -> None:
    seen = []
    for rank in range(world_size):
        batches = EvaluationBatches(size, batch_size, rank=rank, world_size=world_size)
        taken = list(batches)
        assert len(batches) == len(taken)
        assert all(0 < len(batch) <= batch_size for batch in taken)
        seen += [sample for batch in taken for sample in batch]
    assert sorted(seen) == list(range(size))
