import math

import pytest
import torch
from torch import nn

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.training.facts import BatchPlan, Schedule
from mlflow_tula.training.recipe import (
    Recipe,
    build_recipe,
    schedule_factor,
    shorten_batch_norm_memory,
)


def recipe_of(parameter: nn.Parameter, schedule: Schedule, batch: int = 64) -> Recipe:
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    device = torch.device("cpu")
    return build_recipe(optimizer, schedule, BatchPlan.of(batch), total_steps=10, device=device)


def step_with(recipe: Recipe, parameter: nn.Parameter, gradient: list[float]) -> None:
    def backward() -> torch.Tensor:
        parameter.grad = torch.tensor(gradient)
        return torch.tensor(1.0)

    recipe.step(backward)


@pytest.mark.parametrize(
    ("rule", "batch", "factor"),
    [("sqrt", 256, 2.0), ("sqrt", 16, 0.5), ("linear", 256, 4.0), ("none", 256, 1.0)],
)
def test_the_rate_follows_the_batch(rule: str, batch: int, factor: float) -> None:
    schedule = Schedule(scaling=rule, warmup_share=0.0)  # type: ignore[arg-type]
    parameter = nn.Parameter(torch.zeros(2))
    recipe = recipe_of(parameter, schedule, batch)
    recipe.begin_step(0)
    assert recipe.learning_rate == pytest.approx(0.1 * factor)


def test_warm_up_then_half_a_cosine() -> None:
    schedule = Schedule(warmup_share=0.2, final_factor=0.1)
    factors = [schedule_factor(schedule, step, 100) for step in range(101)]
    assert factors[:20] == sorted(factors[:20])
    assert factors[0] == pytest.approx(1 / 21)
    assert factors[20] == 1.0
    assert factors[20:] == sorted(factors[20:], reverse=True)
    assert factors[60] == pytest.approx(0.55)
    assert factors[100] == pytest.approx(0.1)
    assert schedule_factor(Schedule(), 0, 1) == 1.0


def test_the_gradient_is_measured_before_it_is_clipped() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    recipe = recipe_of(parameter, Schedule(scaling="none", warmup_share=0.0))
    recipe.begin_step(0)
    step_with(recipe, parameter, [3.0, 4.0])
    assert recipe.gradient_norm.item() == 5.0
    assert parameter.tolist() == pytest.approx([-0.06, -0.08], rel=1e-4)
    step_with(recipe, parameter, [0.3, 0.4])
    assert parameter.tolist() == pytest.approx([-0.09, -0.12], rel=1e-4)
    assert parameter.grad is None


def test_no_clip_at_zero() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    recipe = recipe_of(parameter, Schedule(scaling="none", warmup_share=0.0, clip_norm=0.0))
    recipe.begin_step(0)
    step_with(recipe, parameter, [3.0, 4.0])
    assert parameter.tolist() == pytest.approx([-0.3, -0.4])


def test_variability_by_hand_and_unmoved_by_what_is_not_finite() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    recipe = recipe_of(parameter, Schedule())
    recipe.begin_step(0)
    step_with(recipe, parameter, [3.0, 4.0])
    assert math.isnan(recipe.gradient_variability.item())
    step_with(recipe, parameter, [6.0, 8.0])
    assert recipe.gradient_variability.item() == pytest.approx(1.0)
    step_with(recipe, parameter, [math.inf, 0.0])
    assert not math.isfinite(recipe.gradient_norm.item())
    assert recipe.gradient_variability.item() == pytest.approx(1.0)
    step_with(recipe, parameter, [6.0, 8.0])
    assert recipe.gradient_variability.item() == pytest.approx(0.84)


def test_a_recipe_goes_on_where_its_state_was_taken() -> None:
    one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    recipe, resumed = recipe_of(one, Schedule()), recipe_of(other, Schedule())
    recipe.begin_step(0)
    for gradient in ([3.0, 4.0], [1.0, 1.0]):
        step_with(recipe, one, gradient)
    resumed.load_state_dict(recipe.state_dict())
    with torch.no_grad():
        other.copy_(one)
    for part, parameter in ((recipe, one), (resumed, other)):
        part.begin_step(1)
        step_with(part, parameter, [2.0, -1.0])
    assert one.tolist() == other.tolist()
    assert recipe.gradient_variability.item() == resumed.gradient_variability.item()


def test_a_short_training_raises_a_slow_batch_norm_momentum() -> None:
    slow, usual, cumulative = (
        nn.BatchNorm2d(2, momentum=0.01),
        nn.BatchNorm1d(2),
        nn.BatchNorm2d(2, momentum=None),
    )
    parts = [slow, nn.Linear(2, 2), usual, cumulative]
    assert shorten_batch_norm_memory(parts, 5000) is None
    assert slow.momentum == 0.01
    assert shorten_batch_norm_memory(parts, 200) == pytest.approx(0.05)
    assert (slow.momentum, usual.momentum, cumulative.momentum) == (0.05, 0.1, None)
    assert shorten_batch_norm_memory(parts, 3) == 0.1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scaling": "cubic"}, "unknown scaling rule 'cubic'"),
        ({"warmup_share": 1.0}, "warmup_share must be below 1"),
        ({"final_factor": 1.5}, "final_factor at most 1"),
        ({"clip_norm": -1.0}, "clip_norm must be a finite number of at least 0"),
        ({"reference_batch_size": 0}, "reference_batch_size must be a whole number"),
    ],
)
def test_bad_schedules(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Schedule(**fields)  # type: ignore[arg-type]
