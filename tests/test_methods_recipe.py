"""The recipe: one table, one line in a loop."""

import pytest
import torch
from torch import nn

from mlflow_tula.errors import InvalidInputError, UnknownNameError
from mlflow_tula.methods import NormClipping, build_method, recipe
from mlflow_tula.methods.fused import make_fused_where_possible, supports_fused
from mlflow_tula.methods.recipe import RULES, choose_method

BATCHES = {"batch_size": 512, "reference_batch_size": 32, "reference_learning_rate": 0.05}


def test_one_line_sets_method_step_and_warm_up_and_keeps_the_rest():
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer, schedule = recipe(
        model, **BATCHES, steps_per_epoch=4, momentum=0.8, weight_decay=0.01
    )
    matrices, vectors = optimizer.param_groups
    assert (matrices["momentum"], matrices["weight_decay"]) == (0.8, 0.01)
    assert (vectors["momentum"], vectors["weight_decay"]) == (0.8, 0.0)
    assert matrices["lr"] == pytest.approx(1 / 16)  # warm-up of 5 epochs
    assert vectors["lr"] == pytest.approx(0.05 * 4 / 16)
    before = model.weight.detach().clone()
    for _ in range(20):
        optimizer.step()
        schedule.step()
    assert matrices["lr"] == pytest.approx(1.0)
    assert vectors["lr"] == pytest.approx(0.05 * 4)
    assert torch.equal(model.weight, before)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    moved = float((model.weight.detach() - before).norm() / before.norm())
    # times the root of 512 / 32; a first Nesterov step is 1 + m gradients long
    assert moved == pytest.approx(0.0125 * 4 * 1.8, rel=1e-3)


def test_the_schedule_takes_the_rate_to_zero_when_asked():
    optimizer, schedule = recipe(
        nn.Linear(2, 2), **BATCHES, steps_per_epoch=4, epochs=10, decay="linear"
    )
    rates = []
    for _ in range(40):
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    assert rates[4] == pytest.approx(1 - 4 / 40)  # warm-up took a tenth of the training
    assert max(rates) == rates[4]
    assert rates[39] == pytest.approx(1 / 40)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0)
    with pytest.raises(InvalidInputError, match="needs epochs and steps_per_epoch"):
        recipe(nn.Linear(2, 2), **BATCHES, decay="linear")
    with pytest.raises(InvalidInputError, match="decay must be none or linear"):
        recipe(nn.Linear(2, 2), **BATCHES, decay="cosine")


def test_a_model_of_vectors_alone_gets_a_scaled_rate_and_a_clip():
    optimizer, _ = recipe([nn.Parameter(torch.ones(3))], **BATCHES, warmup_epochs=0)
    assert isinstance(optimizer, NormClipping)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 16)


def test_the_reference_batch_itself_is_left_alone():
    optimizer, schedule = recipe(
        nn.Linear(2, 2), batch_size=32, reference_batch_size=32, reference_learning_rate=0.05
    )
    optimizer.step()
    schedule.step()
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_settings_hold_at_the_reference_batch_too():
    model = nn.Linear(2, 2)
    optimizer, _ = recipe(
        model,
        batch_size=32,
        reference_batch_size=32,
        reference_learning_rate=0.05,
        max_norm=0.5,
    )
    assert isinstance(optimizer, NormClipping)
    assert optimizer.limit == 0.5
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_the_relative_step_is_capped_and_adam_scales_linearly():
    capped, _ = recipe(nn.Linear(2, 2), **{**BATCHES, "batch_size": 32 * 64}, warmup_epochs=0)
    assert capped.param_groups[0]["trust_coefficient"] == pytest.approx(0.05)
    assert capped.param_groups[1]["lr"] == pytest.approx(0.05 * 4)
    adam, _ = recipe(nn.Linear(2, 2), **BATCHES, optimizer="adamw", warmup_epochs=0)
    assert adam.param_groups[0]["lr"] == pytest.approx(0.05 * 16)


def test_wide_matrices_step_by_the_root_of_their_shorter_side_less():
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Flatten(), nn.Linear(64, 10), nn.Linear(10, 256))
    optimizer, _ = recipe(model, **BATCHES, warmup_epochs=0)
    *matrices, vectors = optimizer.param_groups
    # 10 is below 16; the kernel is 64 x 27
    assert [g["trust_coefficient"] for g in matrices] == pytest.approx(
        [0.05, 0.05 * (16 / 27) ** 0.5]
    )
    assert [len(g["params"]) for g in matrices] == [2, 1]
    assert len(vectors["params"]) == 3


def test_nesterov_momentum_can_be_turned_off_and_needs_momentum():
    def nesterov(**more):
        optimizer, _ = recipe(nn.Linear(2, 2), **BATCHES, warmup_epochs=0, **more)
        return [group["nesterov"] for group in optimizer.param_groups]

    assert nesterov() == [True, True]
    assert nesterov(nesterov=False) == [False, False]
    assert nesterov(momentum=0.0) == [False, False]


def test_without_an_epoch_length_warm_up_takes_200_steps():
    optimizer, schedule = recipe(nn.Linear(2, 2), **BATCHES)
    for _ in range(100):
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx((1 / 16 + 1) / 2)


def test_an_optimizer_keeps_its_settings():
    model = nn.Linear(2, 2)
    mine = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.7, nesterov=True)
    optimizer, _ = recipe(mine, batch_size=128, reference_batch_size=32, warmup_epochs=0)
    group = optimizer.param_groups[1]
    assert group["lr"] == pytest.approx(0.2)
    assert (group["momentum"], group["nesterov"]) == (0.7, True)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fused_steps_are_plain_sgds_when_a_parameter_joins_late(momentum):
    def train(make):
        torch.manual_seed(0)
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        parameters = [*first.parameters(), *second.parameters()]
        optimizer = make(parameters)
        for step in range(4):
            optimizer.zero_grad()
            out = first(torch.ones(2, 3))
            (second(out) if step > 1 else out).square().sum().backward()
            optimizer.step()
        return parameters, optimizer

    settings = {"lr": 0.01, "momentum": momentum, "weight_decay": 0.1}
    fused, optimizer = train(lambda p: make_fused_where_possible(torch.optim.SGD, p, **settings))
    plain, _ = train(lambda p: torch.optim.SGD(p, **settings))
    assert optimizer.defaults["fused"]
    torch.testing.assert_close(fused, plain)


def test_parameters_that_no_fused_kernel_takes():
    odd = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    assert not supports_fused([odd])
    assert not make_fused_where_possible(torch.optim.SGD, [odd], lr=0.1).defaults["fused"]


def test_every_rule_names_a_method_and_settings_that_exist():
    for rule in RULES:
        assert build_method(rule.method, **rule.settings).name == rule.method
    for family, large in (("sgd", "lars"), ("adaptive", "scaling_clip")):
        assert choose_method(family, 1.0).method == "plain"
        assert choose_method(family, 1e9).method == large


@pytest.mark.parametrize("method", ["ags", "static_scaling", "lars", "sqrt_scaling"])
def test_other_methods_by_name(method):
    optimizer, schedule = recipe(nn.Linear(2, 2), **BATCHES, method=method)
    optimizer.step()
    schedule.step()


@pytest.mark.parametrize("method", ["sam", "extrapolation", "adascale", "batch_warmup"])
def test_methods_that_need_more_of_the_loop_say_so(method):
    with pytest.raises(InvalidInputError, match=rf"build_method\('{method}'\)"):
        recipe(nn.Linear(2, 2), **BATCHES, method=method)


def test_bad_input():
    with pytest.raises(InvalidInputError, match=r"reference batch \(64\) must not be above"):
        recipe(
            nn.Linear(2, 2),
            batch_size=32,
            reference_batch_size=64,
            reference_learning_rate=0.1,
        )
    with pytest.raises(InvalidInputError, match="reference_learning_rate is needed"):
        recipe(nn.Linear(2, 2), batch_size=64, reference_batch_size=32)
    with pytest.raises(InvalidInputError, match="reference_learning_rate must be a finite"):
        recipe(nn.Linear(2, 2), **{**BATCHES, "reference_learning_rate": -1.0})
    with pytest.raises(UnknownNameError, match="unknown optimizer 'sdg': did you mean sgd"):
        recipe(nn.Linear(2, 2), **BATCHES, optimizer="sdg")
    with pytest.raises(UnknownNameError, match="unknown method"):
        recipe(nn.Linear(2, 2), **BATCHES, method="magic")
    with pytest.raises(InvalidInputError, match="has no setting 'speed'"):
        recipe(nn.Linear(2, 2), **BATCHES, speed=2)
    with pytest.raises(InvalidInputError, match="says nothing without steps_per_epoch"):
        recipe(nn.Linear(2, 2), **BATCHES, warmup_epochs=2)
