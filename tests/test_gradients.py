from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlflow_tula.gradients import (
    gradient_norm,
    gradient_variability,
    next_variability,
    noise_scale,
)

NORMS = st.lists(st.floats(0.01, 100.0), min_size=2, max_size=30)


def test_the_norm_is_that_of_all_gradients_together() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))]
    assert gradient_norm(parameters) == 0.0
    parameters[0].grad = torch.tensor([3.0, 0.0])
    assert gradient_norm(parameters) == pytest.approx(3.0)
    parameters[1].grad = torch.tensor([0.0, 4.0, 0.0])
    assert gradient_norm(parameters) == pytest.approx(5.0)
    assert gradient_norm(parameters, scale=1024.0) == pytest.approx(5.0 / 1024.0)


def test_variability_follows_the_paper_by_hand() -> None:
    # d = 1, then 0.5; D = 1, then 0.84 * 1 + 0.16 * 0.5
    assert gradient_variability([1.0, 2.0]) == pytest.approx(1.0)
    assert gradient_variability([1.0, 2.0, 1.0]) == pytest.approx(0.84 + 0.16 * 0.5)
    assert gradient_variability([1.0]) is None
    assert gradient_variability([]) is None


def test_norms_that_are_not_finite_leave_the_state_untouched() -> None:
    clean = gradient_variability([1.0, 2.0, 3.0])
    assert gradient_variability([1.0, math.inf, 2.0, math.nan, 3.0]) == clean
    assert gradient_variability([0.0, 1.0, 2.0]) == pytest.approx(1.0)


@given(NORMS, st.floats(0.01, 1.0))
def test_the_tensor_form_and_the_list_form_agree(norms: list[float], smoothing: float) -> None:
    state = torch.tensor(math.nan, dtype=torch.float64)
    previous = torch.tensor(math.nan, dtype=torch.float64)
    for norm in norms:
        now = torch.tensor(norm, dtype=torch.float64)
        state = next_variability(previous, now, state, smoothing=smoothing)
        previous = now
    assert gradient_variability(norms, smoothing=smoothing) == pytest.approx(float(state))


@given(NORMS, st.floats(0.1, 10.0))
def test_variability_has_no_unit(norms: list[float], factor: float) -> None:
    scaled = gradient_variability([factor * norm for norm in norms])
    assert scaled == pytest.approx(gradient_variability(norms), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("small", "large"), [(4, 8), (8, 64), (32, 33)])
def test_noise_scale_recovers_known_parameters(small: int, large: int) -> None:
    # E|g_B|^2 = |G|^2 + S / B with |G|^2 = 2 and S = 60: a noise scale of 30 samples.
    norms = [math.sqrt(2.0 + 60.0 / size) for size in (small, large)]
    found = noise_scale(norms[:1], norms[1:], small_batch=small, large_batch=large)
    assert found == pytest.approx(30.0, rel=1e-6)


def test_noise_scale_of_real_gradients() -> None:
    # Per-sample gradients G + z with |G|^2 = 4 and trace 50: batches of 5 and 20, 4,000 of each.
    generator = torch.Generator().manual_seed(1)
    true = torch.zeros(50)
    true[0] = 2.0
    samples = true + torch.randn(4000, 20, 50, generator=generator)
    small = samples[:, :5].mean(dim=1).norm(dim=1).tolist()
    large = samples.mean(dim=1).norm(dim=1).tolist()
    found = noise_scale(small, large, small_batch=5, large_batch=20)
    assert found == pytest.approx(50 / 4, rel=0.1)


def test_noise_scale_says_none_where_it_cannot_tell() -> None:
    assert noise_scale([], [1.0], small_batch=1, large_batch=2) is None
    assert noise_scale([1.0], [1.0], small_batch=2, large_batch=2) is None
    assert noise_scale([math.inf], [1.0], small_batch=1, large_batch=2) is None
    assert noise_scale([9.0], [1.0], small_batch=1, large_batch=2) is None
    assert noise_scale([1.0], [1.0], small_batch=1, large_batch=2) == 0.0
