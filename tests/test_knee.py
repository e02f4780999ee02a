from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.knee import (
    TIE,
    KneeRule,
    choose_knee,
    choose_minimum,
    diminishing_returns,
    knee,
    kneedle,
    relative_noise,
)

SIZES = 2.0 ** np.arange(3, 12)
RULES = get_args(KneeRule)


def epoch_time(floor: float, slope: float) -> np.ndarray:
    """Seconds per 10,000 samples of a floor-and-line step time."""
    return np.asarray(1e4 / SIZES * np.maximum(floor, slope * SIZES))


@st.composite
def curves(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    count = draw(st.integers(1, 12))
    steps = draw(st.lists(st.floats(1.05, 4.0), min_size=count, max_size=count))
    values = draw(st.lists(st.floats(0.01, 100.0), min_size=count, max_size=count))
    return np.cumprod(steps), np.array(values)


@pytest.mark.parametrize("rule", RULES)
@settings(deadline=None)
@given(curve=curves(), powers=st.tuples(st.integers(-20, 20), st.integers(-20, 20)))
def test_the_knee_does_not_change_when_an_axis_is_scaled(
    rule: KneeRule, curve: tuple[np.ndarray, np.ndarray], powers: tuple[int, int]
) -> None:
    sizes, values = curve
    # Powers of two scale exactly; any other factor could move a tie by a rounding error.
    scaled = knee(sizes * 2.0 ** powers[0], values * 2.0 ** powers[1], rule=rule)
    assert scaled == knee(sizes, values, rule=rule)


@pytest.mark.parametrize("rule", RULES)
@settings(deadline=None)
@given(curve=curves())
def test_the_knee_is_never_behind_the_best(
    rule: KneeRule, curve: tuple[np.ndarray, np.ndarray]
) -> None:
    sizes, values = curve
    assert 0 <= knee(sizes, values, rule=rule) <= int(np.argmin(values))


def test_diminishing_returns_takes_the_smallest_within_ten_percent() -> None:
    assert diminishing_returns([8, 16, 32, 64], [4.0, 1.11, 1.10, 1.0]) == 2
    assert diminishing_returns([8, 16, 32, 64], [4.0, 1.11, 1.10, 1.0], tolerance=0.2) == 1


def test_diminishing_returns_stands_where_the_floor_ends() -> None:
    # Throughput saturates where the line meets the floor: 0.032 s / 0.0005 s = 64 samples.
    assert SIZES[diminishing_returns(SIZES, epoch_time(0.032, 0.0005))] == 64


def test_kneedle_agrees_with_the_published_example() -> None:
    # Figure 2 of Satopaa et al. (ICDCSW 2011): y = -1/x + 5 on 10 points from 0 to 1 in x has its
    # knee near x = 0.22 on unit axes. Turned over it is a falling, convex curve.
    x = np.linspace(0.0, 1.0, 10)
    rising = -1.0 / (x + 0.1) + 5.0
    assert x[kneedle(x + 1e-9, 6.0 - rising)] == pytest.approx(0.22, abs=0.01)


def test_a_flat_curve_has_no_knee_and_the_smaller_batch_wins() -> None:
    noisy = [1.01, 1.0, 1.02, 0.99, 1.0]
    assert kneedle([1, 2, 4, 8, 16], noisy) == 0
    assert diminishing_returns([1, 2, 4, 8, 16], noisy) == 0


@pytest.mark.parametrize(
    ("sizes", "values", "message"),
    [
        ([], [], "at least one"),
        ([1, 2], [1.0], "2 sizes and 1 values"),
        ([2, 1], [1.0, 1.0], "positive and ascending"),
        ([0, 1], [1.0, 1.0], "positive and ascending"),
        ([1, 2], [1.0, np.nan], "positive and finite"),
        ([1, 2], [1.0, -1.0], "positive and finite"),
    ],
)
def test_bad_curves_are_refused(sizes: list[int], values: list[float], message: str) -> None:
    for rule in RULES:
        with pytest.raises(InvalidInputError, match=message):
            knee(sizes, values, rule=rule)


def test_the_smaller_wins_a_tie_but_not_a_difference() -> None:
    assert choose_minimum([1.02, 1.01, 1.0], [0.1] * 3).index == 0
    assert choose_minimum([1.2, 1.01, 1.0], [0.1] * 3).index == 1
    exact = choose_minimum([1.02, 1.01, 1.0], [0.0] * 3)
    assert exact.index == 2, "without noise there is no tie"
    assert choose_minimum([1.0 + 2 * TIE, 1.0], [1.0, 1.0]).index == 1


def test_a_measured_candidate_wins_a_tie() -> None:
    assert choose_minimum([1.02, 1.01, 1.0], [0.1] * 3, measured=[False, True, True]).index == 1
    assert choose_minimum([1.02, 1.2, 1.0], [0.1] * 3, measured=[False, True, False]).index == 0
    assert choose_minimum([1.02, 1.01, 1.0], [0.1] * 3, measured=[False] * 3).index == 0


def test_the_current_choice_stays_until_the_gain_exceeds_the_noise() -> None:
    kept = choose_minimum([1.0, 1.1, 1.3], [0.1] * 3, current=[1])
    assert kept.index == 1
    assert kept.kept_current
    moved = choose_minimum([1.0, 1.1, 1.3], [0.1] * 3, current=[2])
    assert moved.index == 0
    assert not moved.kept_current


def test_the_current_choice_stays_while_the_knee_is_open() -> None:
    sizes, values = [8, 16, 32, 64], [2.0, 1.13, 1.08, 1.0]
    assert choose_knee(sizes, values, [0.05] * 4).index == 2
    assert choose_knee(sizes, values, [0.05] * 4, current=1).index == 1
    assert choose_knee(sizes, values, [0.05] * 4, current=3).index == 3
    assert choose_knee(sizes, values, [0.001] * 4, current=1).index == 2
    assert choose_knee(sizes, values, [0.001] * 4, current=3).index == 2
    assert choose_knee(sizes, values, [0.05] * 4, current=0).index == 2
    assert choose_knee(sizes, values, [0.1] * 4, current=3, rule="kneedle").index == 3


def test_noise_is_half_the_interval_and_zero_where_unknown() -> None:
    noise = relative_noise(np.array([0.9, np.nan, 1.0]), np.array([1.1, 1.0, 1.0]))
    assert noise == pytest.approx([0.1003, 0.0, 0.0], abs=1e-4)
