"""Adaptive gradient scaling: computed by hand, and against what each optimizer does with it."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlflow_tula.errors import InvalidInputError, TrainingError
from mlflow_tula.methods import (
    AdaptiveGradientScaling,
    NormClipping,
    ReplayedScaling,
    constant_mean,
    shuffled,
)
from mlflow_tula.methods.scale_invariance import ignores_gradient_scale
from mlflow_tula.methods.step_scaling import move_further_, zero_where_

ADAM_KIN = [
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
]


def weights(*values):
    return torch.nn.Parameter(torch.tensor(values or (0.0, 0.0)))


def sgd(parameter, **settings):
    return torch.optim.SGD([parameter], **{"lr": 1.0, **settings})


def step(optimizer, parameter, *gradient):
    """One step with a given gradient; returns how far the weights moved."""
    before = parameter.detach().clone()
    parameter.grad = torch.tensor(gradient, dtype=parameter.dtype)
    optimizer.step()
    return (before - parameter.detach()).tolist()


class TestTheRule:
    def test_hand_computed(self):
        # norms 5, 6, 9, 9.9 with alpha 0.5 and delta 0.3:
        # d = 0.2, 0.5, 0.1; D = 0.2, 0.35, 0.225: scaled, not, scaled; the first step never
        p = weights()
        scaling = AdaptiveGradientScaling(sgd(p), 4.0, threshold=0.3, smoothing=0.5)
        assert step(scaling, p, 3.0, 4.0) == [3.0, 4.0]
        assert math.isnan(scaling.variability)
        assert step(scaling, p, 0.0, 6.0) == [0.0, 24.0]
        assert scaling.variability == pytest.approx(0.2)
        assert step(scaling, p, 9.0, 0.0) == [9.0, 0.0]
        assert scaling.variability == pytest.approx(0.35)
        assert step(scaling, p, 9.9, 0.0) == pytest.approx([39.6, 0.0])
        report = scaling.report()
        assert report.variability == pytest.approx(0.225)
        assert (report.steps, report.scaled_steps, report.skipped_steps) == (4, 2, 0)
        assert report.scaled_share == scaling.scaled_share == 0.5
        assert report.gradient_norm == pytest.approx(9.9)
        assert report.multiplier == 4.0

    def test_variability_equal_to_the_threshold_is_not_scaled(self):
        p = weights()
        scaling = AdaptiveGradientScaling(sgd(p), 4.0, threshold=0.5)
        step(scaling, p, 2.0, 0.0)
        assert step(scaling, p, 3.0, 0.0) == [3.0, 0.0]

    def test_static_scales_every_step(self):
        p = weights()
        scaling = AdaptiveGradientScaling(sgd(p), 4.0, static=True)
        assert step(scaling, p, 1.0, 0.0) == [4.0, 0.0]
        assert step(scaling, p, 100.0, 0.0) == [400.0, 0.0]
        assert scaling.scaled_share == 1.0

    def test_factor_from_the_batch_sizes_is_the_square_root_of_their_ratio(self):
        scaling = AdaptiveGradientScaling(
            sgd(weights()), global_batch_size=512, reference_batch_size=32
        )
        assert scaling.scaling_factor == 4.0

    @given(
        norms=st.lists(st.floats(0.1, 100), min_size=2, max_size=12),
        factor=st.floats(1, 8),
        threshold=st.floats(0.05, 2),
    )
    @settings(max_examples=40, deadline=None)
    def test_every_step_is_the_gradient_or_the_factor_times_it(self, norms, factor, threshold):
        p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        scaling = AdaptiveGradientScaling(sgd(p), factor, threshold, record=True)
        previous = variability = None
        for norm in norms:
            moved = step(scaling, p, norm)[0]
            if previous is not None:
                change = abs(norm - previous) / previous
                variability = change if variability is None else 0.84 * variability + 0.16 * change
            previous = norm
            if variability is None or abs(variability - threshold) > 1e-9:
                scaled = variability is not None and variability < threshold
                assert moved == pytest.approx(norm * (factor if scaled else 1.0))
        assert len(scaling.multipliers) == len(norms)

    def test_all_groups_share_one_norm(self):
        a, b = weights(0.0), weights(0.0)
        optimizer = torch.optim.SGD([{"params": [a], "lr": 1.0}, {"params": [b], "lr": 0.5}])
        scaling = AdaptiveGradientScaling(optimizer, 2.0)
        for _ in range(2):
            a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0])
            optimizer.step()
        assert scaling.report().gradient_norm == 5.0
        assert (a.item(), b.item()) == (-9.0, -6.0)  # once plain, once doubled


class TestWhatScalingMeansToAnOptimizer:
    def test_momentum_carries_a_scaled_gradient_on(self):
        # with momentum 0.9 one step scaled by 4 adds 19.5 gradients over the next ten
        def travelled(multipliers):
            p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
            optimizer = sgd(p, momentum=0.9)
            ReplayedScaling(optimizer, multipliers)
            for _ in range(10):
                step(optimizer, p, 1.0)
            return -p.item()

        assert travelled([4.0]) - travelled([1.0]) == pytest.approx(19.5, abs=0.05)

    def test_update_mode_scales_this_step_only(self):
        p = weights(0.0)
        optimizer = sgd(p, momentum=0.5)
        ReplayedScaling(optimizer, [4.0], mode="update")
        assert step(optimizer, p, 1.0) == [4.0]
        assert step(optimizer, p, 1.0) == [1.5]

    def test_weight_decay_is_scaled_in_update_mode_only(self):
        for mode, expected in (("gradient", 4.0 + 0.2), ("update", 4 * (1 + 0.2))):
            p = weights(2.0)
            optimizer = sgd(p, weight_decay=0.1)
            ReplayedScaling(optimizer, [4.0], mode=mode)
            assert step(optimizer, p, 1.0) == pytest.approx([expected])

    @pytest.mark.parametrize("kind", ADAM_KIN)
    def test_gradient_mode_is_refused_where_it_changes_nothing(self, kind):
        optimizer = kind([weights()], lr=0.1)
        with pytest.raises(InvalidInputError, match=f"changes nothing with {kind.__name__}"):
            AdaptiveGradientScaling(optimizer, 4.0)
        AdaptiveGradientScaling(optimizer, 4.0, mode="update")

    @pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.ASGD])
    def test_plain_gradient_steps_are_sensitive(self, kind):
        assert not ignores_gradient_scale(kind([weights()], lr=0.0))

    def test_asking_draws_no_random_number_and_leaves_the_optimizer_alone(self):
        p = weights(1.0)
        optimizer = torch.optim.Adam([p])
        state = torch.random.get_rng_state()
        assert ignores_gradient_scale(optimizer)
        assert torch.equal(state, torch.random.get_rng_state())
        assert not optimizer.state

    def test_an_optimizer_with_a_constructor_of_its_own_counts_as_sensitive(self):
        class Strange(torch.optim.SGD):
            def __init__(self, params, something_else):
                super().__init__(params, lr=0.1)

        assert not ignores_gradient_scale(Strange([weights()], 3))

    def test_adam_in_update_mode_moves_by_the_factor(self):
        moves = []
        for factor in (1.0, 4.0):
            p = weights(0.0)
            optimizer = torch.optim.Adam([p], lr=0.01)
            AdaptiveGradientScaling(optimizer, factor, mode="update")
            step(optimizer, p, 1.0)
            moves.append(step(optimizer, p, 1.0)[0])
        assert moves[1] == pytest.approx(4 * moves[0])

    def test_schedulers_see_the_unscaled_rate(self):
        p = weights()
        optimizer = sgd(p, lr=0.1)
        scaling = AdaptiveGradientScaling(optimizer, 4.0, mode="update", static=True)
        schedule = torch.optim.lr_scheduler.StepLR(scaling, step_size=1, gamma=0.5)
        for expected in (0.05, 0.025):
            assert step(scaling, p, 1.0, 0.0)[0] == pytest.approx(8 * expected)
            schedule.step()
            assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)

    def test_a_step_that_raised_leaves_no_scaled_rate_behind(self):
        class Failing(torch.optim.SGD):
            def step(self, closure=None):
                if self.param_groups[0]["fail"]:
                    raise RuntimeError("out of memory")
                return super().step(closure)

        p = weights()
        optimizer = Failing([{"params": [p], "fail": True}], lr=1.0)
        scaling = AdaptiveGradientScaling(optimizer, 4.0, mode="update", static=True)
        with pytest.raises(RuntimeError, match="out of memory"):
            step(optimizer, p, 1.0, 0.0)
        optimizer.param_groups[0]["fail"] = False
        assert step(optimizer, p, 1.0, 0.0) == [4.0, 0.0]
        scaling.remove()
        assert step(optimizer, p, 1.0, 0.0) == [1.0, 0.0]


class TestClipping:
    def test_clips_before_it_scales(self):
        p = weights()
        scaling = AdaptiveGradientScaling(sgd(p), 4.0, static=True, max_norm=1.0)
        assert step(scaling, p, 30.0, 40.0) == pytest.approx([2.4, 3.2])
        assert scaling.report().gradient_norm == 50.0

    def test_a_clip_of_ones_own_needs_measure(self):
        # clipped norms are all 1: without measure() the variability falls to 0
        for measure, expected in ((True, 9.0), (False, 0.0)):
            p = weights()
            scaling = AdaptiveGradientScaling(sgd(p), 4.0)
            for size in (10.0, 100.0):
                p.grad = torch.tensor([size, 0.0])
                if measure:
                    scaling.measure()
                torch.nn.utils.clip_grad_norm_([p], 1.0)
                scaling.step()
            assert scaling.variability == pytest.approx(expected, abs=1e-4)

    def test_a_second_measure_on_one_optimizer_is_refused(self):
        optimizer = sgd(weights())
        clipping = NormClipping(optimizer, 1.0)
        with pytest.raises(InvalidInputError, match="NormClipping already scales the steps"):
            AdaptiveGradientScaling(optimizer, 4.0)
        clipping.remove()
        AdaptiveGradientScaling(optimizer, 4.0, mode="update")
        with pytest.raises(InvalidInputError, match="AdaptiveGradientScaling already scales"):
            AdaptiveGradientScaling(optimizer, 4.0, mode="update")
        NormClipping(optimizer, 1.0)  # measures after a scaling that left the gradient alone

    def test_an_optimizer_without_hooks_is_refused(self):
        class Averaging(torch.optim.Optimizer):
            def __init__(self, inner):
                self.param_groups = inner.param_groups

        with pytest.raises(InvalidInputError, match="Averaging runs no step hooks"):
            NormClipping(Averaging(sgd(weights())), 1.0)


class TestBadInput:
    @pytest.mark.parametrize("factor", [0.0, -1.0, 0.5, math.nan, math.inf, True, "4"])
    def test_factor(self, factor):
        with pytest.raises(InvalidInputError, match="scaling_factor must be a finite number"):
            AdaptiveGradientScaling(sgd(weights()), factor)

    @pytest.mark.parametrize("threshold", [0.0, -0.5, math.nan, math.inf])
    def test_threshold(self, threshold):
        with pytest.raises(InvalidInputError, match="threshold must be a finite number above 0"):
            AdaptiveGradientScaling(sgd(weights()), 4.0, threshold)

    @pytest.mark.parametrize("smoothing", [0.0, 1.1, math.nan])
    def test_smoothing(self, smoothing):
        with pytest.raises(InvalidInputError, match=r"smoothing must be .* at most 1"):
            AdaptiveGradientScaling(sgd(weights()), 4.0, smoothing=smoothing)

    def test_neither_factor_nor_batches(self):
        with pytest.raises(InvalidInputError, match="scaling needs a scaling_factor"):
            AdaptiveGradientScaling(sgd(weights()))

    def test_mode_and_nonfinite_choices(self):
        with pytest.raises(InvalidInputError, match="mode must be one of gradient, update"):
            AdaptiveGradientScaling(sgd(weights()), 4.0, mode="both")
        with pytest.raises(InvalidInputError, match="on_nonfinite must be one of skip, raise"):
            AdaptiveGradientScaling(sgd(weights()), 4.0, on_nonfinite="ignore")
        with pytest.raises(InvalidInputError, match="max_norm must be a finite number above 0"):
            AdaptiveGradientScaling(sgd(weights()), 4.0, max_norm=0.0)

    def test_not_an_optimizer(self):
        with pytest.raises(InvalidInputError, match=r"must be a torch\.optim\.Optimizer, not list"):
            AdaptiveGradientScaling([], 4.0)

    def test_reference_batch_above_the_batch(self):
        with pytest.raises(InvalidInputError, match=r"reference batch \(64\) must not be above"):
            AdaptiveGradientScaling(sgd(weights()), global_batch_size=32, reference_batch_size=64)

    def test_closure_based_optimizers(self):
        with pytest.raises(InvalidInputError, match="LBFGS evaluates a closure"):
            AdaptiveGradientScaling(torch.optim.LBFGS([weights()]), 4.0)

    def test_a_closure_at_step(self):
        p = weights()
        scaling = AdaptiveGradientScaling(sgd(p), 4.0)
        with pytest.raises(InvalidInputError, match="call backward"):
            scaling.step(lambda: p.sum())
        with pytest.raises(InvalidInputError, match="call backward"):
            scaling.optimizer.step(closure=lambda: p.sum())

    def test_sparse_gradients(self):
        table = torch.nn.Embedding(5, 2, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        AdaptiveGradientScaling(optimizer, 4.0)
        table(torch.tensor([1])).sum().backward()
        with pytest.raises(InvalidInputError, match="gradients must be dense"):
            optimizer.step()

    @pytest.mark.parametrize("mode", ["gradient", "update"])
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_nonfinite_steps_are_skipped_whole(self, bad, mode):
        p = weights(1.0, 1.0)
        optimizer = sgd(p, momentum=0.9, weight_decay=0.1)
        scaling = AdaptiveGradientScaling(optimizer, 4.0, mode=mode)
        step(optimizer, p, 1.0, 0.0)
        step(optimizer, p, 1.0, 0.0)
        before = p.detach().clone()
        momentum = optimizer.state[p]["momentum_buffer"].clone()
        variability = scaling.variability
        assert step(optimizer, p, bad, 1.0) == [0.0, 0.0]
        assert torch.equal(p, before)
        assert torch.equal(optimizer.state[p]["momentum_buffer"], momentum)
        assert not torch.isfinite(p.grad).all()  # the gradient is given back as it was
        assert scaling.variability == variability
        report = scaling.report()
        assert (report.skipped_steps, report.steps) == (1, 3)
        assert report.multiplier == 1.0
        step(optimizer, p, 1.0, 0.0)
        assert torch.isfinite(p).all()

    def test_nonfinite_steps_raise_when_asked(self):
        p = weights()
        optimizer = sgd(p)
        AdaptiveGradientScaling(optimizer, 4.0, on_nonfinite="raise")
        with pytest.raises(TrainingError, match="must be finite, but its norm is nan"):
            step(optimizer, p, math.nan, 0.0)
        assert p.tolist() == [0.0, 0.0]

    def test_zero_gradient_leaves_the_state_alone(self):
        p = weights()
        scaling = AdaptiveGradientScaling(sgd(p), 4.0)
        assert step(scaling, p, 0.0, 0.0) == [0.0, 0.0]
        step(scaling, p, 1.0, 0.0)
        step(scaling, p, 1.2, 0.0)
        variability = scaling.variability
        step(scaling, p, 0.0, 0.0)
        assert scaling.variability == variability
        assert step(scaling, p, 1.2, 0.0)[0] == pytest.approx(4.8)

    def test_no_gradient_at_all_counts_nothing(self):
        p = weights()
        scaling = AdaptiveGradientScaling(sgd(p), 4.0)
        scaling.step()
        assert scaling.report().steps == 0

    def test_copying_is_refused(self):
        import copy

        with pytest.raises(TypeError, match="save its state_dict"):
            copy.deepcopy(AdaptiveGradientScaling(sgd(weights()), 4.0))

    def test_multipliers_need_record(self):
        with pytest.raises(InvalidInputError, match="record=True"):
            _ = AdaptiveGradientScaling(sgd(weights()), 4.0).multipliers


class TestResume:
    def test_state_travels_in_the_optimizers_state_and_resumes_bitwise(self, tmp_path):
        gradients = torch.randn(12, 2, generator=torch.Generator().manual_seed(0)) + 2

        def run(parts):
            p = weights(1.0, 2.0)
            for i, part in enumerate(parts):
                optimizer = sgd(p, lr=0.1, momentum=0.9)
                scaling = AdaptiveGradientScaling(optimizer, 4.0, 0.6)
                if i:
                    optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
                for gradient in part:
                    p.grad = gradient.clone()
                    optimizer.step()
                torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
            return p.detach(), scaling.report()

        whole, report = run([gradients])
        parts, resumed = run([gradients[:1], gradients[1:2], gradients[2:7], gradients[7:]])
        assert torch.equal(whole, parts)
        assert resumed == report
        assert 0 < report.scaled_share < 1

    def test_saved_before_and_after_loading_is_the_same(self):
        p = weights()
        first = AdaptiveGradientScaling(sgd(p), 4.0, 0.3)
        for size in (1.0, 1.2):
            step(first, p, size, 0.0)
        state = first.scaling_state()
        second = AdaptiveGradientScaling(sgd(weights()), 2.0)
        second.load_scaling_state(state)
        assert second.scaling_state() == state
        assert json.loads(json.dumps(state)) == state

    def test_a_plain_optimizer_loads_the_same_checkpoint(self):
        p = weights()
        scaling = AdaptiveGradientScaling(sgd(p, momentum=0.9), 4.0)
        step(scaling, p, 1.0, 0.0)
        plain = sgd(p, momentum=0.9)
        plain.load_state_dict(scaling.state_dict())
        assert plain.state[p]["momentum_buffer"].tolist() == [1.0, 0.0]

    def test_another_mode_is_refused(self):
        saved = AdaptiveGradientScaling(sgd(weights()), 4.0).state_dict()
        other = AdaptiveGradientScaling(sgd(weights()), 4.0, mode="update")
        with pytest.raises(InvalidInputError, match="was made in gradient mode"):
            other.load_state_dict(saved)


class TestMixedPrecision:
    @pytest.mark.parametrize("fused", [True, False])
    def test_grad_scaler_decides_as_plain_training_does(self, fused):
        def run(scaler):
            p = weights(1.0, 1.0)
            optimizer = sgd(p, lr=0.1, fused=fused)
            scaling = AdaptiveGradientScaling(optimizer, 4.0, 0.3, record=True)
            for size in (1.0, 1.1, 3.0, 3.1):
                optimizer.zero_grad()
                loss = (p * torch.tensor([size, 0.0])).sum()
                if scaler is None:
                    loss.backward()
                    optimizer.step()
                else:
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
            return p.detach(), scaling.multipliers, scaling.report().gradient_norm

        plain, multipliers, norm = run(None)
        scaled, same_multipliers, same_norm = run(torch.amp.GradScaler("cpu", init_scale=1024.0))
        torch.testing.assert_close(plain, scaled)
        assert multipliers == same_multipliers
        assert set(multipliers) == {1.0, 4.0}
        assert norm == pytest.approx(same_norm)

    @pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
    @pytest.mark.parametrize("fused", [True, False])
    def test_an_overflow_is_the_scalers_to_handle(self, fused, on_nonfinite):
        p = weights(1.0, 1.0)
        optimizer = sgd(p, fused=fused, momentum=0.9)
        scaling = AdaptiveGradientScaling(optimizer, 4.0, on_nonfinite=on_nonfinite)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale((p * torch.tensor([math.inf, 0.0])).sum()).backward()
        scaler.step(scaling)
        scaler.update()
        assert p.tolist() == [1.0, 1.0]
        assert scaler.get_scale() == 512.0
        assert not hasattr(optimizer, "found_inf")

    def test_half_precision_gradients_above_half_precision_norms(self):
        p = torch.nn.Parameter(torch.zeros(4096, dtype=torch.float16))
        scaling = AdaptiveGradientScaling(sgd(p, lr=1e-5), 4.0)
        p.grad = torch.full_like(p, 2000.0)  # norm 128,000, above half precision's 65,504
        scaling.step()
        assert scaling.report().gradient_norm == pytest.approx(128_000)
        assert scaling.report().skipped_steps == 0


class TestAccumulationAndControls:
    def test_accumulated_gradients_are_one_step(self):
        p = weights(0.0)
        scaling = AdaptiveGradientScaling(sgd(p), 4.0)
        for _ in range(3):
            for _ in range(2):
                (p * 0.5).sum().backward()
            scaling.step()
            scaling.zero_grad()
        assert scaling.report().steps == 3
        assert p.item() == pytest.approx(-(1 + 4 + 4))

    def test_controls_keep_the_multipliers(self):
        multipliers = (1.0, 4.0, 4.0, 1.0, 4.0)
        assert sorted(shuffled(multipliers, seed=3)) == sorted(multipliers)
        assert shuffled(multipliers, seed=3) == shuffled(multipliers, seed=3)
        assert constant_mean(multipliers) == [2.8] * 5
        assert constant_mean([]) == []

    def test_replayed_multipliers_end_in_plain_steps_and_resume(self):
        p = weights(0.0)
        optimizer = sgd(p)
        ReplayedScaling(optimizer, [2.0, 3.0])
        assert step(optimizer, p, 1.0) == [2.0]
        saved = optimizer.state_dict()
        again = sgd(p)
        ReplayedScaling(again, [2.0, 3.0])
        again.load_state_dict(saved)
        assert step(again, p, 1.0) == [3.0]
        assert step(again, p, 1.0) == [1.0]
        assert step(again, p, math.nan) == [0.0]


class TestOnAnAccelerator:
    """FakeTensorMode stands for a device: it raises as soon as the host reads a value."""

    @pytest.mark.parametrize("mode", ["gradient", "update"])
    def test_nothing_is_read_by_the_host(self, mode):
        from torch._subclasses.fake_tensor import FakeTensorMode

        device = FakeTensorMode()
        with device:
            p = torch.nn.Parameter(torch.zeros(4, 4, device="cuda"))
            optimizer = sgd(p, momentum=0.9)
        AdaptiveGradientScaling(optimizer, 4.0, mode=mode, max_norm=1.0)
        with device:
            for _ in range(3):
                p.grad = torch.ones(4, 4, device="cuda")
                optimizer.step()

    def test_moving_further_is_exact_at_one_and_multiplies_the_step(self):
        before, now = torch.tensor([0.1, 1e8]), torch.tensor([0.3, 1e8 + 8])
        for factor, expected in ((1.0, now.clone()), (0.0, before.clone())):
            moved = now.clone()
            move_further_([moved], [before.clone()], torch.tensor(factor))
            torch.testing.assert_close(moved, expected, rtol=0, atol=3e-8)
        moved = torch.tensor([2.0])
        move_further_([moved], [torch.tensor([1.0])], torch.tensor(4.0))
        assert moved.tolist() == [5.0]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_bad_gradients_become_zero_and_good_ones_keep_every_bit(self, dtype):
        values = torch.tensor([math.nan, -math.inf, 1.5, -0.0], dtype=dtype)
        kept, gone = values.clone(), values.clone()
        zero_where_([kept], torch.tensor(False))
        zero_where_([gone], torch.tensor(True))
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
        assert torch.equal(kept.view(integer), values.view(integer))
        assert gone.tolist() == [0.0] * 4

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("mode", ["gradient", "update"])
    @pytest.mark.parametrize("fused", [True, False])
    def test_on_cuda_as_on_the_cpu_without_synchronizing(self, mode, fused):
        def run(device):
            p = torch.nn.Parameter(torch.ones(2, device=device))
            optimizer = sgd(p, lr=0.1, momentum=0.9, fused=fused)
            AdaptiveGradientScaling(optimizer, 4.0, 0.3, mode=mode)
            sizes = [torch.tensor([s, 0.0], device=device) for s in (1.0, 1.1, 3.0, 3.1)]
            for gradient in sizes:
                p.grad = gradient
                torch.cuda.set_sync_debug_mode("error" if device == "cuda" else "default")
                optimizer.step()
                torch.cuda.set_sync_debug_mode("default")
            return p.detach().cpu()

        torch.testing.assert_close(run("cuda"), run("cpu"))


_RANK = """
import json, os, sys, torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from mlflow_tula.methods import AdaptiveGradientScaling
torch.distributed.init_process_group("gloo")
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
torch.manual_seed(0)
model = nn.Linear(6, 3).double()
x, y = torch.randn(8, 6).double(), torch.randint(0, 3, (8,))
ddp = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
scaling = AdaptiveGradientScaling(optimizer, 4.0, 0.3, record=True)
share = slice(rank * 8 // world, (rank + 1) * 8 // world)
for _ in range(12):
    optimizer.zero_grad()
    nn.functional.cross_entropy(ddp(x[share]), y[share]).backward()
    optimizer.step()
with open(f"{sys.argv[1]}/rank{rank}of{world}.json", "w") as out:
    json.dump([scaling.multipliers, model.weight.flatten().tolist()], out)
torch.distributed.barrier()
os._exit(0)  # gloo's threads now and then abort a regular exit
"""


@pytest.mark.slow
def test_two_ranks_decide_as_one_process_does(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(_RANK)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    for world in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={world}", str(script), str(tmp_path)]
        done = subprocess.run(
            command, check=False, timeout=300, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    one, first, second = (
        json.loads((tmp_path / f"rank{name}.json").read_text()) for name in ("0of1", "0of2", "1of2")
    )
    assert first == second
    assert first[0] == one[0]
    assert set(one[0]) == {1.0, 4.0}
    assert first[1] == pytest.approx(one[1], rel=1e-9)
