from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mlflow_tula.predictors import formulas, step_time_formulas

REALS = st.floats(1e-6, 1e6)


@pytest.mark.parametrize(("power", "expected"), [(1.0, 7.0), (2.0, 5.0), (200.0, 4.0)])
def test_smooth_maximum_runs_from_the_sum_to_the_maximum(power: float, expected: float) -> None:
    found = formulas.smooth_maximum(np.array([3.0]), np.array([4.0]), power)
    assert found == pytest.approx([expected], rel=1e-6)


@given(first=REALS, second=REALS, power=st.floats(1.0, 50.0))
def test_smooth_maximum_lies_between_maximum_and_sum(
    first: float, second: float, power: float
) -> None:
    (found,) = formulas.smooth_maximum(np.array([first]), np.array([second]), power)
    assert max(first, second) <= found * (1 + 1e-12)
    assert found <= (first + second) * (1 + 1e-12)


def test_smooth_maximum_of_nothing_is_nothing() -> None:
    assert formulas.smooth_maximum(np.zeros(1), np.zeros(1), 2.0) == pytest.approx([0.0])


@given(probability=st.floats(1e-9, 1 - 1e-9))
def test_normal_quantile_is_scipy_s(probability: float) -> None:
    assert formulas.normal_quantile(probability) == pytest.approx(
        stats.norm.ppf(probability), rel=1e-6, abs=1e-8
    )


@pytest.mark.parametrize("degrees", [3, 6, 10, 100])
@pytest.mark.parametrize("probability", [0.6, 0.75, 0.9, 0.95, 0.975])
def test_student_quantile_is_scipy_s(probability: float, degrees: int) -> None:
    expected = stats.t.ppf(probability, degrees)
    assert formulas.student_quantile(probability, degrees) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("probability", [0.0, 1.0, -1.0, math.nan])
def test_a_probability_lies_between_0_and_1(probability: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        formulas.normal_quantile(probability)


def test_steps_per_epoch_floors_with_drop_last_and_never_reaches_zero() -> None:
    sizes = np.array([10.0, 32.0, 100.0, 101.0])
    assert formulas.steps_per_epoch(100, sizes, drop_last=True).tolist() == [10, 3, 1, 1]
    assert formulas.steps_per_epoch(100, sizes, drop_last=False).tolist() == [10, 4, 1, 1]


def test_dollars_adds_both_prices_and_is_nan_without_one() -> None:
    hour, two, peak = np.array([3600.0]), np.array([2.0]), np.array([5e9])

    def price(device: float | None, memory: float | None) -> float:
        return float(
            formulas.dollars(hour, two, peak, usd_per_device_hour=device, usd_per_gb_hour=memory)[0]
        )

    assert price(3.0, None) == pytest.approx(6.0)
    # 0.15 dollars a GB-hour: the Tula paper's price (arXiv 2603.18112)
    assert price(None, 0.15) == pytest.approx(1.5)
    assert price(3.0, 0.15) == pytest.approx(7.5)
    assert math.isnan(price(None, None))


def test_log_variances_of_a_product_add() -> None:
    first = (np.array([2.0]), np.array([1.0]), np.array([4.0]))
    second = (np.array([10.0]), np.array([5.0]), np.array([20.0]))
    value, lower, upper = formulas.product_interval(first, second)
    assert value == pytest.approx([20.0])
    assert upper / value == pytest.approx([2 ** math.sqrt(2)])
    assert value / lower == pytest.approx([2 ** math.sqrt(2)])


def test_a_ring_all_reduce_moves_twice_the_gradient_less_a_share() -> None:
    link = {"latency_s": 1e-3, "bandwidth_bytes_per_s": 1e9}
    found = step_time_formulas.link_time(link, 5e8, np.array([1.0, 2.0, 4.0]))
    assert found == pytest.approx([0.0, 1e-3 + 0.5, 2e-3 + 0.75])
