"""`tula train --method`: the catalogue's methods in the training loop."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from mlflow_tula.errors import InvalidInputError, UnknownNameError
from mlflow_tula.methods.catalogue import method_names
from mlflow_tula.train import BatchPlan, Limits, Schedule, train
from mlflow_tula.training.facts import (
    AUTO,
    CLASSIC_METHOD,
    METHODS,
    OTHER_METHODS,
    TrainRequest,
)
from mlflow_tula.training.method import build_method_recipe, check_method, make_recipe
from mlflow_tula.training.recipe import Recipe
from mlflow_tula.workloads.job import Job

CPU = torch.device("cpu")
TINY = Job(model="train_parts:small_net", dataset="digits", image_size=8, dataset_size=300, seed=3)


BF16_ON_TWO = {"devices": 2, "gradient_compression": "bf16"}


def request(
    schedule: Schedule,
    *,
    batch: int = 256,
    accumulation: int = 1,
    devices: int = 1,
    balance: bool = False,
    **job: object,
):
    plan = BatchPlan.of(
        batch, accumulation_steps=accumulation, devices_per_node=devices, balance=balance
    )
    return TrainRequest(
        job=TINY.replace(**job),
        plan=plan,
        epochs=10,
        output_dir="",
        schedule=schedule,
        limits=Limits(),
        device_type="cpu",
    )


def made(schedule: Schedule, **more: object) -> tuple[nn.Module, Recipe]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    recipe = make_recipe(
        request(schedule, **more), optimizer, total_steps=20, steps_per_epoch=2, device=CPU
    )
    return model, recipe


def train_steps(model: nn.Module, recipe: Recipe, steps: range) -> torch.Tensor:
    x = torch.randn(40, 8, 4, generator=torch.Generator().manual_seed(1))
    y = torch.arange(8) % 2

    def forward_and_backward(step: int) -> torch.Tensor:
        for half in (slice(0, 4), slice(4, 8)):
            loss = nn.functional.cross_entropy(model(x[step, half]), y[half]) / 2
            loss.backward()
            if recipe.after_backward is not None:
                recipe.after_backward()
        return loss.detach()

    for step in steps:
        recipe.begin_step(step)
        assert math.isfinite(recipe.step(lambda step=step: forward_and_backward(step)))
        assert recipe.gradient_norm.item() > 0
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_names_are_those_of_the_catalogue():
    assert {*METHODS, *OTHER_METHODS} == {AUTO, *method_names()}
    assert list(METHODS[1:]) == sorted(METHODS[1:])


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_and_resumes_bit_for_bit(method):
    schedule = Schedule(method=method)
    model, recipe = made(schedule, accumulation=2)
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    whole = train_steps(model, recipe, range(12))
    assert not torch.equal(whole, start)
    model, recipe = made(schedule, accumulation=2)
    train_steps(model, recipe, range(7))
    again, resumed = made(schedule, accumulation=2)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(recipe.state_dict())
    assert torch.equal(train_steps(again, resumed, range(7, 12)), whole)


def test_the_methods_peak_rate_under_the_trainings_warm_up_and_decay():
    _, recipe = made(Schedule(method="linear_scaling"))
    rates = []
    for step in range(20):
        recipe.begin_step(step)
        rates.append(recipe.learning_rate)
    assert rates[2] == max(rates) == pytest.approx(0.05 * 4)  # 256 / 64
    assert rates[0] == pytest.approx(0.05 * 4 / 3)
    assert rates[19] < 0.01 * 0.2
    assert "method linear_scaling" in recipe.words
    _, late = made(Schedule(method="linear_scaling", method_settings={"warmup_epochs": 4}))
    late.begin_step(3)
    assert late.learning_rate == pytest.approx(0.05 * 4 * 4 / 9)


def test_auto_is_the_recipes_rule_for_the_jobs_optimizer():
    _, recipe = made(Schedule(method=AUTO))
    assert "method lars" in recipe.words
    _, plain = made(Schedule(method=AUTO), batch=16)
    assert "method" not in plain.words  # nothing to scale: the loop's own rate and clip
    plain.begin_step(2)
    assert plain.learning_rate == pytest.approx(0.05 / 2)  # the root of 16 / 64
    model = nn.Linear(2, 2)
    adam = build_method_recipe(
        torch.optim.AdamW(model.parameters(), lr=0.001),
        Schedule(method=AUTO),
        BatchPlan.of(256),
        total_steps=20,
        steps_per_epoch=2,
        device=CPU,
    )
    adam.begin_step(2)
    assert adam.learning_rate == pytest.approx(0.004)


def test_a_step_whose_gradient_is_evaluated_twice_measures_the_first():
    parameter = nn.Parameter(torch.tensor([3.0, 4.0]))
    recipe = build_method_recipe(
        torch.optim.SGD([parameter], lr=0.1),
        Schedule(method="sam", method_settings={"rho": 0.5}, warmup_share=0.0),
        BatchPlan.of(64),
        total_steps=10,
        steps_per_epoch=1,
        device=CPU,
    )
    assert recipe.needs_closure
    calls = []

    def backward() -> torch.Tensor:
        calls.append(parameter.tolist())
        loss = parameter.square().sum() / 2
        loss.backward()
        return loss.detach()

    recipe.begin_step(0)
    assert recipe.step(backward).item() == 12.5
    assert calls == [[3.0, 4.0], pytest.approx([3.3, 4.4])]
    assert recipe.gradient_norm.item() == 5.0
    assert parameter.tolist() == pytest.approx([3 - 0.33, 4 - 0.44])


@pytest.mark.parametrize(
    ("schedule", "more", "message"),
    [
        ({"method": "sam"}, {"precision": "fp16"}, "train in bf16 or fp32"),
        ({"method": "adascale"}, {}, "at least 2 ranks or accumulation passes"),
        ({"method": "ags"}, {"strategy": "fsdp"}, "needs whole gradients on every rank"),
        ({"method_settings": {"max_norm": 2}}, {"strategy": "fsdp"}, "which takes no settings"),
        ({"method": "adascale"}, BF16_ON_TWO, "looks at the ranks' own gradients, and so does"),
        ({"method": "adascale"}, {"devices": 2, "balance": True}, "without uneven batches"),
        ({"method": "extrapolation"}, BF16_ON_TWO, "gradient_compression='bf16': take one of the"),
    ],
)
def test_what_a_method_needs_of_the_training(schedule, more, message):
    with pytest.raises(InvalidInputError, match=message):
        request(Schedule(**schedule), **more)


def test_bad_methods_and_settings():
    with pytest.raises(UnknownNameError, match="unknown method 'larz': did you mean lars"):
        Schedule(method="larz")
    with pytest.raises(InvalidInputError, match="use it in your own loop"):
        Schedule(method="batch_warmup")
    with pytest.raises(InvalidInputError, match=r"post_local_sgd changes the batch size or parts"):
        Schedule(method="post_local_sgd")
    with pytest.raises(InvalidInputError, match="method 'lars' has no setting 'speed': it has"):
        check_method(Schedule(method="lars", method_settings={"speed": 1}))
    with pytest.raises(
        InvalidInputError, match="scaling_factor must be a finite number at least 1"
    ):
        check_method(Schedule(method="ags", method_settings={"scaling_factor": 0.5}))
    with pytest.raises(InvalidInputError, match="max_norm must be a finite number above 0"):
        check_method(Schedule(method=AUTO, method_settings={"max_norm": -1.0}))
    check_method(Schedule(method=AUTO, method_settings={"relative_step": 0.01}))
    check_method(Schedule(method=CLASSIC_METHOD))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "ags", "sam", "extrapolation"])
def test_a_broken_off_training_goes_on_to_the_same_weights(tmp_path: Path, method: str):
    def run(folder: str, **limits: object):
        return train(
            TINY,
            BatchPlan.of(128, accumulation_steps=2),
            epochs=2,
            output_dir=tmp_path / folder,
            schedule=Schedule(method=method),
            limits=Limits(**limits),  # type: ignore[arg-type]
        )

    whole = run("whole")
    run("parts", max_steps=3)
    assert run("parts").weights_digest == whole.weights_digest
    with pytest.raises(InvalidInputError, match="holds another training"):
        train(
            TINY,
            BatchPlan.of(128, accumulation_steps=2),
            epochs=2,
            output_dir=tmp_path / "parts",
            schedule=Schedule(method="plain"),
        )
