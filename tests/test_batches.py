from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_tula.batches import (
    candidate_batch_sizes,
    check_candidates,
    check_global_batch_size,
    divisors,
    nearest_valid_sizes,
    split_global_batch_size,
)
from mlflow_tula.errors import InvalidInputError


def test_the_way_out_stays_inside_the_dataset() -> None:
    with pytest.raises(InvalidInputError, match=r"valid sizes are 96$"):
        check_global_batch_size(99, world_size=8, dataset_size=100)


@pytest.mark.parametrize("bad", [0, -4, 2.5, "many", None, math.nan, math.inf, True])
def test_a_batch_size_is_a_whole_number_of_at_least_one(bad: object) -> None:
    with pytest.raises(InvalidInputError, match="global_batch_size must be a whole number"):
        check_global_batch_size(bad)


def test_a_batch_is_not_larger_than_the_dataset() -> None:
    with pytest.raises(InvalidInputError, match="at most the dataset's 100 samples, not 101"):
        check_global_batch_size(101, dataset_size=100)


@given(local=st.integers(1, 64), steps=st.integers(1, 16), world=st.integers(1, 16))
def test_the_three_factors_always_multiply_out(local: int, steps: int, world: int) -> None:
    size = local * steps * world
    assert split_global_batch_size(size, world_size=world, accumulation_steps=steps) == local


def test_accumulation_that_does_not_divide_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"= 2 x 3, not 32; .* are 30 and 36"):
        split_global_batch_size(32, world_size=2, accumulation_steps=3)


@given(size=st.integers(1, 10_000), world=st.integers(1, 64), data=st.integers(1, 10_000))
def test_nearest_sizes_are_valid(size: int, world: int, data: int) -> None:
    for near in nearest_valid_sizes(size, world, data):
        assert check_global_batch_size(near, world_size=world, dataset_size=data) == near


@given(data=st.integers(1, 10**7), world=st.integers(1, 512), smallest=st.integers(1, 64))
def test_no_candidate_exceeds_a_ranks_share_of_the_data(
    data: int, world: int, smallest: int
) -> None:
    sizes = candidate_batch_sizes(data, world, smallest)
    assert sizes == sorted(set(sizes))
    assert sizes[0] >= 1
    assert sizes[-1] <= math.ceil(data / world)


def test_candidates_are_powers_of_two_from_the_smallest() -> None:
    assert candidate_batch_sizes(100) == [8, 16, 32, 64]
    assert candidate_batch_sizes(1000, 2, largest=100) == [8, 16, 32, 64]
    assert candidate_batch_sizes(5) == [5]
    assert candidate_batch_sizes(100, smallest=12) == [16, 32, 64]


def test_candidates_must_suit_one_of_the_world_sizes() -> None:
    assert check_candidates([6, 4, 4], world_sizes=[2, 4], dataset_size=100) == [4, 6]
    with pytest.raises(InvalidInputError, match="world size 2, not 7"):
        check_candidates([4, 7], world_sizes=[2, 4], dataset_size=100)
    with pytest.raises(InvalidInputError, match="non-empty list of global batch sizes"):
        check_candidates([], world_sizes=[1], dataset_size=100)


@given(number=st.integers(1, 5000))
def test_divisors(number: int) -> None:
    assert list(divisors(number)) == [d for d in range(1, number + 1) if number % d == 0]
    assert all(d <= 7 for d in divisors(number, largest=7))
