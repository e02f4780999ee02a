"""The rivals of AGS, each against its paper's update computed by hand."""

import copy
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from mlflow_tula.errors import InvalidInputError, UnknownNameError
from mlflow_tula.methods import (
    AdaScale,
    Extrapolation,
    Method,
    NormClipping,
    PercentileClipping,
    SharpnessAware,
    TrainingPlan,
    build_method,
    grow_batch,
    lamb,
    lars,
    learning_rate_factor,
    method_names,
    post_local_sgd,
    step_decay,
    warm_up_batch,
)
from mlflow_tula.methods.adascale import adascale_gain, shard_moments
from mlflow_tula.methods.averaging import stop_averaging_gradients
from mlflow_tula.methods.fused_lars import FusedLars
from mlflow_tula.methods.scaling import warm_up

PLAN = TrainingPlan(global_batch_size=512, reference_batch_size=32, steps_per_epoch=4)


def parameter(values):
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def sgd(*parameters, **settings):
    return torch.optim.SGD(list(parameters), **{"lr": 1.0, **settings})


class TestPlan:
    def test_reference_batch_above_the_batch(self):
        with pytest.raises(InvalidInputError, match=r"reference batch \(64\) must not be above"):
            TrainingPlan(global_batch_size=32, reference_batch_size=64)

    @pytest.mark.parametrize("value", [0, -1, 2.5, True])
    def test_counts_are_whole_and_positive(self, value):
        with pytest.raises(InvalidInputError, match="global_batch_size must be a whole number"):
            TrainingPlan(global_batch_size=value, reference_batch_size=1)

    def test_ratio_and_warm_up(self):
        assert PLAN.ratio == 16
        assert PLAN.warmup_steps(2.5) == 10


class TestLearningRateScaling:
    def test_factors(self):
        assert learning_rate_factor("linear", 16) == 16
        assert learning_rate_factor("sqrt", 16) == 4
        assert learning_rate_factor("constant", 16, factor=3) == 3
        assert learning_rate_factor("linear", 16, cap=8) == 8

    def test_bad_rules(self):
        with pytest.raises(InvalidInputError, match="rule must be linear, sqrt or constant"):
            learning_rate_factor("cubic", 16)
        with pytest.raises(InvalidInputError, match="batch ratio must be a finite number at least"):
            learning_rate_factor("linear", 0.5)
        with pytest.raises(InvalidInputError, match="not at both"):
            build_method("linear_scaling", max_norm=1.0, clip_percentile=10.0)

    def test_gradual_warm_up_goes_from_the_reference_rate_in_equal_steps(self):
        # Goyal et al.: from lr0 to k lr0; here 0.1 to 1.6 in 5 steps of 0.3
        optimizer = sgd(parameter([0.0]), lr=1.6)
        schedule = warm_up(optimizer, 5, 16)
        rates = []
        for _ in range(7):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        assert rates == pytest.approx([0.1, 0.4, 0.7, 1.0, 1.3, 1.6, 1.6])

    def test_linear_scaling_as_a_method(self):
        p = parameter([0.0])
        run = build_method("linear_scaling", warmup_epochs=1.0).wrap(sgd(p, lr=0.1), PLAN)
        moved = []
        for _ in range(5):
            before = p.item()
            run.step(lambda: _backward(p, lambda: p.sum()))
            moved.append(before - p.item())
        assert moved == pytest.approx([0.1, 0.475, 0.85, 1.225, 1.6])
        assert run.begin_epoch(3) == 512

    def test_plain_keeps_the_reference_rate(self):
        p = parameter([0.0])
        run = build_method("plain").wrap(sgd(p, lr=0.1), PLAN)
        run.step(lambda: _backward(p, lambda: p.sum()))
        assert p.item() == pytest.approx(-0.1)

    def test_a_factor_of_one_has_nothing_to_warm_up(self):
        optimizer = sgd(parameter([0.0]), lr=0.5)
        warm_up(optimizer, 0, 16)
        assert optimizer.param_groups[0]["lr"] == 0.5


def _backward(p, loss_fn):
    p.grad = None
    loss = loss_fn()
    loss.backward()
    return loss.detach()


class TestClipping:
    @pytest.mark.parametrize("fused", [True, False])
    @pytest.mark.parametrize("size", [0.3, 1.0, 50.0])
    def test_fixed_norm_is_torchs(self, size, fused):
        gradient = torch.tensor([3.0, 4.0], dtype=torch.float64) * size / 5
        ours, torchs = parameter([0.0, 0.0]), parameter([0.0, 0.0])
        ours.grad, torchs.grad = gradient.clone(), gradient.clone()
        optimizer = sgd(ours, fused=fused)
        NormClipping(optimizer, 1.0).step()
        torch.nn.utils.clip_grad_norm_([torchs], 1.0)
        sgd(torchs).step()
        torch.testing.assert_close(ours, torchs, rtol=1e-6, atol=0)
        assert not hasattr(optimizer, "grad_scale")

    def test_under_a_grad_scaler_the_unscaled_norm_is_clipped(self):
        for fused, unscale in ((True, True), (True, False), (False, True), (False, False)):
            p = nn.Parameter(torch.zeros(2))
            clipping = NormClipping(sgd(p, fused=fused), 1.0)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            scaler.scale((p * torch.tensor([30.0, 40.0])).sum()).backward()
            if unscale:
                scaler.unscale_(clipping)
            scaler.step(clipping)
            assert p.tolist() == pytest.approx([-0.6, -0.8])

    def test_autoclip_hand_computed(self):
        # norms 4, 2, 8: medians so far 4, 3, 4: coefficients 1, 1, 1/2
        p = parameter([0.0])
        clipping = PercentileClipping(sgd(p), 50)
        for norm, expected in ((4.0, 4.0), (2.0, 2.0), (8.0, 4.0)):
            before = p.item()
            p.grad = torch.tensor([norm], dtype=torch.float64)
            clipping.step()
            assert before - p.item() == pytest.approx(expected, rel=1e-5)

    def test_autoclip_forgets_beyond_its_window_and_resumes(self):
        def steps(clipping, p, norms):
            for norm in norms:
                p.grad = torch.tensor([norm], dtype=torch.float64)
                clipping.step()
            return p.item()

        norms = [1.0, 2.0, 3.0, 50.0, 4.0, 60.0]
        whole_p, first_p = parameter([0.0]), parameter([0.0])
        whole = steps(PercentileClipping(sgd(whole_p), 50, window=3), whole_p, norms)
        first = PercentileClipping(sgd(first_p), 50, window=3)
        steps(first, first_p, norms[:4])
        second = PercentileClipping(sgd(first_p), 50, window=3)
        second.load_state_dict(first.state_dict())
        assert steps(second, first_p, norms[4:]) == whole
        with pytest.raises(InvalidInputError, match="holds 3 norms, this clipping keeps 2"):
            PercentileClipping(sgd(first_p), 50, window=2).load_state_dict(first.state_dict())

    def test_a_bad_gradient_does_not_enter_the_history(self):
        p = parameter([0.0])
        clipping = PercentileClipping(sgd(p), 50)
        for norm in (math.nan, 2.0, math.inf, 8.0):
            p.grad = torch.tensor([norm], dtype=torch.float64)
            clipping.step()
        assert p.item() == pytest.approx(-2.0 - 5.0, rel=1e-5)  # the median of 2 and 8 is 5

    def test_limits_out_of_range(self):
        with pytest.raises(InvalidInputError, match="max_norm must be a finite number above 0"):
            NormClipping(sgd(parameter([0.0])), -1.0)
        with pytest.raises(InvalidInputError, match=r"percentile must be .*at most 100"):
            PercentileClipping(sgd(parameter([0.0])), 101)
        with pytest.raises(InvalidInputError, match="window must be at least 1"):
            PercentileClipping(sgd(parameter([0.0])), window=0)


class TestLayerwise:
    def test_lars_hand_computed(self):
        # |w| = 5, |g| = 10, beta 0.1, eta 0.01: lambda = 0.05 / (10 + 0.5) = 1/210
        # v1 = (g + 0.1 w) / 210 = (6.3, 8.4) / 210 = (0.03, 0.04); w1 = w - 2 v1 = (2.94, 3.92)
        w = parameter([[3.0, 4.0]])
        optimizer = lars(
            [w],
            2.0,
            vector_learning_rate=1.0,
            momentum=0.9,
            weight_decay=0.1,
            trust_coefficient=0.01,
        )
        w.grad = torch.tensor([[6.0, 8.0]], dtype=torch.float64)
        optimizer.step()
        assert w.tolist()[0] == pytest.approx([2.94, 3.92])
        # second step: |w| = 4.9, lambda = 0.049 / (10 + 0.49), v2 = 0.9 v1 + lambda (g + 0.1 w)
        w.grad = torch.tensor([[6.0, 8.0]], dtype=torch.float64)
        optimizer.step()
        trust = 0.049 / 10.49
        velocity = [0.9 * 0.03 + trust * 6.294, 0.9 * 0.04 + trust * 8.392]
        assert w.tolist()[0] == pytest.approx([2.94 - 2 * velocity[0], 3.92 - 2 * velocity[1]])

    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    @pytest.mark.parametrize("nesterov", [False, True])
    def test_the_fused_lars_is_pytorch_optimizers(self, momentum, nesterov):
        from pytorch_optimizer import LARS

        def train(make):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
            optimizer = make(model)
            for step in range(5):
                optimizer.zero_grad()
                x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
                model(x).square().sum().backward()
                optimizer.step()
            return list(model.parameters()), optimizer

        nesterov = nesterov and momentum > 0
        kwargs = {"momentum": momentum, "nesterov": nesterov, "trust_coefficient": 0.02}
        mine, optimizer = train(
            lambda m: lars(m.parameters(), 0.7, vector_learning_rate=0.01, **kwargs)
        )
        assert isinstance(optimizer, FusedLars)

        def theirs(model):
            matrices = [p for p in model.parameters() if p.ndim > 1]
            vectors = [p for p in model.parameters() if p.ndim == 1]
            groups = [{"params": matrices, "lr": 0.7}, {"params": vectors, "lr": 0.01}]
            return LARS(groups, lr=0.7, **kwargs)

        torch.testing.assert_close(mine, train(theirs)[0], rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_lars_skips_a_step_whose_gradient_is_not_finite(self, bad):
        w, b = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
        optimizer = lars([w, b], 1.0, vector_learning_rate=0.1)
        w.grad, b.grad = torch.ones(2, 2), torch.tensor([bad, 1.0])
        optimizer.step()
        assert torch.equal(w.detach(), torch.ones(2, 2))
        assert torch.equal(b.detach(), torch.ones(2))
        b.grad = torch.ones(2)
        optimizer.step()
        assert not torch.equal(w.detach(), torch.ones(2, 2))

    def test_lars_steps_from_all_zero_weights_at_the_vectors_rate(self):
        w, b = nn.Parameter(torch.zeros(1, 2)), nn.Parameter(torch.ones(1))
        optimizer = lars([w, b], 2.0, vector_learning_rate=0.1)
        w.grad, b.grad = torch.tensor([[1.0, -2.0]]), torch.zeros(1)
        optimizer.step()
        assert w.tolist()[0] == pytest.approx([-0.1, 0.2])
        still = nn.Parameter(torch.ones(1, 2))
        optimizer = lars([still], 2.0, vector_learning_rate=0.1)
        still.grad = torch.zeros(1, 2)
        optimizer.step()
        assert still.tolist() == [[1.0, 1.0]]

    def test_lars_under_a_loss_scale_and_after_an_overflow(self):
        def step(scale, overflow=0.0):
            w, b = nn.Parameter(torch.ones(1, 2)), nn.Parameter(torch.ones(1))
            optimizer = lars([w, b], 1.0, vector_learning_rate=0.1)
            w.grad, b.grad = scale * torch.tensor([[3.0, 4.0]]), scale * torch.ones(1)
            optimizer.grad_scale = torch.tensor(scale)
            optimizer.found_inf = torch.tensor(overflow)
            optimizer.step()
            return torch.cat([w.detach().flatten(), b.detach()])

        torch.testing.assert_close(step(1024.0), step(1.0))
        torch.testing.assert_close(step(1024.0, overflow=1.0), torch.ones(3))

    def test_lars_resumes_bit_for_bit_and_refuses_sparse_gradients(self):
        def one(optimizer, model, seed):
            optimizer.zero_grad()
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
            model(x).square().sum().backward()
            optimizer.step()

        def made():
            torch.manual_seed(0)
            model = nn.Linear(4, 2)
            return model, lars(model.parameters(), 0.7, vector_learning_rate=0.01)

        model, optimizer = made()
        for seed in range(4):
            one(optimizer, model, seed)
            if seed == 1:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        again, resumed = made()
        again.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        for seed in (2, 3):
            one(resumed, again, seed)
        assert torch.equal(again.weight, model.weight)
        table = nn.Embedding(3, 2, sparse=True)
        optimizer = lars(table.parameters(), 1.0, vector_learning_rate=0.1)
        table(torch.tensor([1])).sum().backward()
        with pytest.raises(InvalidInputError, match="takes no sparse gradients"):
            optimizer.step()

    def test_lars_gives_vectors_their_own_plain_rate(self):
        w, b = parameter([[1.0]]), parameter([1.0])
        optimizer = lars([w, b], 30.0, vector_learning_rate=0.1, momentum=0.0, weight_decay=0.5)
        w.grad, b.grad = torch.ones(1, 1).double(), torch.ones(1).double()
        optimizer.step()
        assert b.item() == pytest.approx(0.9)
        assert [group["lr"] for group in optimizer.param_groups] == [30.0, 0.1]

    def test_lamb_hand_computed(self):
        # first step, betas 0.9, 0.99: m = 0.1 g, v = 0.01 g^2, m / sqrt(v) = 1 for each
        # u = (1 + 0.1 * 3, 1 + 0.1 * 4) = (1.3, 1.4); |w| = 5; w - 0.1 * 5 / |u| * u
        w = parameter([[3.0, 4.0]])
        optimizer = lamb([w], 0.1, betas=(0.9, 0.99), weight_decay=0.1, eps=0.0)
        w.grad = torch.tensor([[6.0, 8.0]], dtype=torch.float64)
        optimizer.step()
        length = math.hypot(1.3, 1.4)
        expected = [3 - 0.5 * 1.3 / length, 4 - 0.5 * 1.4 / length]
        assert w.tolist()[0] == pytest.approx(expected)

    def test_only_vectors_is_refused(self):
        with pytest.raises(InvalidInputError, match="need a parameter of two or more dimensions"):
            lars([parameter([1.0])], 1.0, vector_learning_rate=0.1)

    def test_the_method_keeps_momentum_and_weight_decay(self):
        model = nn.Linear(2, 2)
        base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8, weight_decay=0.01)
        run = build_method("lars", warmup_epochs=0.0).wrap(base, PLAN)
        matrices, vectors = run.optimizer.param_groups
        assert (matrices["lr"], vectors["lr"]) == pytest.approx((1.6, 0.4))
        assert (matrices["momentum"], matrices["weight_decay"]) == (0.8, 0.01)

    def test_lamb_in_place_of_sgd_does_not_take_its_rate(self):
        model = nn.Linear(2, 2)
        method = build_method("lamb", warmup_epochs=0.0)
        for base, expected in (
            (torch.optim.SGD(model.parameters(), lr=0.1), 0.004),
            (torch.optim.Adam(model.parameters(), lr=0.002), 0.008),
        ):
            rates = [group["lr"] for group in method.wrap(base, PLAN).optimizer.param_groups]
            assert rates == pytest.approx([expected, expected])

    def test_a_name_of_neither(self):
        from mlflow_tula.methods.layerwise import LayerwiseMethod

        with pytest.raises(InvalidInputError, match="must begin with lars or lamb"):
            LayerwiseMethod(name="lion")


class TestSharpnessAware:
    def test_hand_computed(self):
        # f = (x^2 + 3 y^2) / 2 at (3, -4/3): g = (3, -4), |g| = 5, rho 0.5: e = (0.3, -0.4)
        # gradient at w + e: (3.3, -5.2)
        p = parameter([3.0, -4 / 3])
        sharp = SharpnessAware(sgd(p, lr=0.1), rho=0.5)

        def closure():
            return _backward(p, lambda: (p[0] ** 2 + 3 * p[1] ** 2) / 2)

        loss = sharp.step(closure)
        assert loss.item() == pytest.approx((9 + 16 / 3) / 2)
        assert p.tolist() == pytest.approx([3 - 0.33, -4 / 3 + 0.52])

    def test_keeps_the_state_of_the_optimizer_it_wraps(self):
        p = parameter([1.0])
        base = sgd(p, momentum=0.9)
        sharp = SharpnessAware(base, rho=0.5)
        sharp.step(lambda: _backward(p, lambda: p.sum()))
        assert base.state[p]["momentum_buffer"].tolist() == [1.0]
        assert set(base.state[p]) == {"momentum_buffer"}

    def test_needs_a_closure_and_a_radius(self):
        with pytest.raises(InvalidInputError, match="SAM needs the gradient at a second point"):
            SharpnessAware(sgd(parameter([0.0]))).step()
        with pytest.raises(InvalidInputError, match="rho must be a finite number above 0"):
            SharpnessAware(sgd(parameter([0.0])), rho=0.0)

    def test_no_grad_scaler(self):
        p = parameter([0.0])
        run = build_method("sam").wrap(sgd(p), PLAN)
        with pytest.raises(InvalidInputError, match="cannot run under a GradScaler"):
            run.step(lambda: p.sum(), torch.amp.GradScaler("cpu"))


class TestExtrapolation:
    def test_hand_computed(self):
        # f = x^2 / 2, lr 0.5, look-ahead 0.1, from 1:
        # step 1: no look-ahead, g = 1, x = 0.5
        # step 2: at 0.5 - 0.1 * 1 = 0.4: g = 0.4, x = 0.5 - 0.2 = 0.3
        # step 3: at 0.3 - 0.04 = 0.26: g = 0.26, x = 0.3 - 0.13 = 0.17
        p = parameter([1.0])
        optimizer = Extrapolation(sgd(p, lr=0.5), 0.1)
        for expected in (0.5, 0.3, 0.17):
            optimizer.step(lambda: _backward(p, lambda: p[0] ** 2 / 2))
            assert p.item() == pytest.approx(expected)

    def test_each_pass_looks_ahead_by_its_own_gradient(self):
        # f = (x^2 / 2 + x^2) / 2, lr 0.5, look-ahead 0.1, from 1:
        # step 1: gradients 1 and 2, mean 1.5, x = 0.25
        # step 2: at 0.25 - 0.1: 0.15; at 0.25 - 0.2: 2 * 0.05; mean 0.125, x = 0.1875
        # step 3: at 0.1875 - 0.015: 0.1725; at 0.1875 - 0.01: 2 * 0.1775; mean 0.26375
        p = parameter([1.0])
        optimizer = Extrapolation(sgd(p, lr=0.5), 0.1)

        def closure():
            optimizer.zero_grad()
            for size in (1.0, 2.0):
                (size * p[0] ** 2 / 2 / 2).backward()
                optimizer.observe()
            return p.detach()

        for expected in (0.25, 0.1875, 0.1875 - 0.5 * 0.26375):
            optimizer.step(closure)
            assert p.item() == pytest.approx(expected)

    def test_weights_come_back_when_the_closure_raises(self):
        p = parameter([1.0])
        optimizer = Extrapolation(sgd(p, lr=0.5), 0.1)
        optimizer.step(lambda: _backward(p, lambda: p[0] ** 2 / 2))

        def broken():
            raise ValueError("no data")

        with pytest.raises(ValueError, match="no data"):
            optimizer.step(broken)
        assert p.item() == 0.5

    def test_resumes(self):
        p = parameter([1.0])
        first = Extrapolation(sgd(p, lr=0.5, momentum=0.9), 0.1)
        first.step(lambda: _backward(p, lambda: p[0] ** 2 / 2))
        q = parameter([p.item()])
        second = Extrapolation(sgd(q, lr=0.5, momentum=0.9), 0.1)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        first.step(lambda: _backward(p, lambda: p[0] ** 2 / 2))
        second.step(lambda: _backward(q, lambda: q[0] ** 2 / 2))
        assert torch.equal(p, q)

    def test_needs_a_closure(self):
        with pytest.raises(InvalidInputError, match="gradient at a look-ahead point"):
            Extrapolation(sgd(parameter([0.0])), 0.1).step()
        with pytest.raises(InvalidInputError, match="LBFGS evaluates a closure"):
            Extrapolation(torch.optim.LBFGS([parameter([0.0])]), 0.1)
        with pytest.raises(InvalidInputError, match="needs a DistributedDataParallel model"):
            Extrapolation(sgd(parameter([0.0])), 0.1).attach(nn.Linear(1, 1))


class TestAdaScale:
    def test_gain_hand_computed(self):
        def gain(variance, squared_mean, scale):
            return adascale_gain(torch.tensor(variance), torch.tensor(squared_mean), scale).item()

        assert gain(0.0, 1.0, 4) == 1.0  # no noise: a larger batch allows nothing
        assert gain(1.0, 0.0, 4) == 4.0  # nothing but noise: the whole factor
        assert gain(4.0, 1.0, 4) == 2.5  # (4 + 1) / (1 + 1)
        assert gain(-1.0, 1.0, 4) == 1.0  # an estimate below zero is zero
        assert gain(0.0, 0.0, 4) == 1.0

    def test_moments_hand_computed(self):
        # shards (3, 0) and (1, 0): mean square 5, mean 2, variance of one shard 2
        # n = S = 2: sigma^2 = 2, mu^2 = 4 - 1
        moments = shard_moments(torch.tensor(5.0), torch.tensor(4.0), shards=2, scale=2)
        assert [m.item() for m in moments] == [2.0, 3.0]
        # two shards of a batch 8 times the reference: a reference gradient is 4 times as noisy
        moments = shard_moments(torch.tensor(5.0), torch.tensor(4.0), shards=2, scale=8)
        assert [m.item() for m in moments] == [8.0, 3.0]

    @pytest.mark.parametrize("divide", [1.0, 2.0])
    def test_a_step_from_two_passes(self, divide):
        # gain = (2 + 3) / (2 / 2 + 3) = 1.25, whether the passes are summed or averaged
        p = parameter([0.0, 0.0])
        adascale = AdaScale(sgd(p, lr=0.1), 2)
        for size in (3.0, 1.0):
            (p[0] * size / divide).backward()
            adascale.observe()
        adascale.step()
        assert p.tolist() == pytest.approx([-0.1 * 1.25 * 4 / divide, 0.0])
        assert adascale.progress == pytest.approx(1.25)
        assert adascale.optimizer.param_groups[0]["lr"] == 0.1

    def test_averages_with_the_papers_weight_and_resumes(self):
        def step(adascale, p, sizes):
            p.grad = None
            for size in sizes:
                (p[0] * size).backward()
                adascale.observe()
            adascale.step()

        p = parameter([0.0, 0.0])
        adascale = AdaScale(sgd(p), 2, smoothing=0.6)
        step(adascale, p, (3.0, 1.0))
        step(adascale, p, (2.0, 2.0))
        # sums of shards double every moment's unit (x4): variance 8 then 0 (cut off at 1e-6), mean
        # 12 then 16; two steps are fewer than 1 / (1 - 0.6) = 2.5, so the plain mean
        state = adascale.scaling_state()
        assert state["variance"] == pytest.approx(4.0, rel=1e-6)
        assert state["squared_mean"] == pytest.approx(14.0)
        again = AdaScale(sgd(p), 2, smoothing=0.6)
        again.load_state_dict(adascale.state_dict())
        assert again.scaling_state() == state
        # from the third on the past weighs 0.6; shards 3, -1: variance 4 x 8, mean 4 (1 - 4)
        step(adascale, p, (3.0, -1.0))
        state = adascale.scaling_state()
        assert state["variance"] == pytest.approx(0.6 * 4 + 0.4 * 32, rel=1e-6)
        assert state["squared_mean"] == pytest.approx(0.6 * 14)
        assert state["count"] == 3
        assert AdaScale(sgd(p), 16).smoothing == pytest.approx(0.984)

    def test_one_gradient_is_not_enough(self):
        p = parameter([0.0])
        adascale = AdaScale(sgd(p), 4)
        p.sum().backward()
        adascale.observe()
        with pytest.raises(InvalidInputError, match="at least 2 gradients in a step, not 1"):
            adascale.step()

    def test_bad_settings(self):
        with pytest.raises(InvalidInputError, match="scale must be a finite number at least 1"):
            AdaScale(sgd(parameter([0.0])), 0.5)
        with pytest.raises(InvalidInputError, match="smoothing must be below 1"):
            AdaScale(sgd(parameter([0.0])), 4, smoothing=1.0)
        with pytest.raises(InvalidInputError, match="needs a DistributedDataParallel model"):
            AdaScale(sgd(parameter([0.0])), 4).attach(nn.Linear(1, 1))


class TestBatchSchedules:
    def test_warm_up_then_the_large_batch(self):
        phases = warm_up_batch(PLAN, 3)
        assert [(p.start_epoch, p.global_batch_size) for p in phases] == [(0, 32), (3, 512)]
        assert [p.learning_rate_factor for p in phases] == [1.0, 4.0]

    def test_the_run_sets_batch_and_rate_by_epoch(self):
        optimizer = sgd(parameter([0.0]), lr=0.1)
        run = build_method("batch_warmup", epochs=2, rule="linear").wrap(optimizer, PLAN)
        seen = [(run.begin_epoch(e), optimizer.param_groups[0]["lr"]) for e in (0, 1, 2, 3)]
        assert seen == [(32, 0.1), (32, 0.1), (512, 1.6), (512, 1.6)]
        resumed_optimizer = sgd(parameter([0.0]), lr=0.1)
        resumed = build_method("batch_warmup", epochs=2, rule="linear").wrap(
            resumed_optimizer, PLAN
        )
        resumed.load_state_dict(run.state_dict())
        assert resumed.begin_epoch(4) == 512
        assert resumed_optimizer.param_groups[0]["lr"] == 1.6

    def test_growth_hand_computed(self):
        # Smith et al.: the rate would fall by 5 at epochs 2, 4, 6; the batch grows until 512
        plan = TrainingPlan(global_batch_size=512, reference_batch_size=32)
        phases = grow_batch(plan, step_decay({2: 0.2, 4: 0.2, 6: 0.2}), 8)
        assert [(p.start_epoch, p.global_batch_size) for p in phases] == [
            (0, 32),
            (2, 160),
            (4, 512),
            (6, 512),
        ]
        # 32 * 25 = 800 and 32 * 125 = 4000 do not fit: the rate falls by what is left over
        factors = [p.learning_rate_factor for p in phases]
        assert factors == pytest.approx([1.0, 1.0, 512 / 800, 512 / 4000])

    def test_growth_keeps_batch_over_rate_of_the_schedule(self):
        schedule = step_decay({1: 0.3, 3: 0.7})
        for phase in grow_batch(PLAN, schedule, 5, multiple=6):
            assert phase.global_batch_size % 6 == 0 or phase.global_batch_size == 512
            ratio = phase.global_batch_size / phase.learning_rate_factor
            assert ratio == pytest.approx(32 / schedule(phase.start_epoch))

    def test_a_rising_schedule_raises_the_rate_and_not_the_batch(self):
        phases = grow_batch(PLAN, lambda epoch: 1.0 + epoch, 2)
        assert [(p.global_batch_size, p.learning_rate_factor) for p in phases] == [
            (32, 1.0),
            (32, 2.0),
        ]

    def test_bad_schedules(self):
        with pytest.raises(InvalidInputError, match="must be at least 0, not -1"):
            warm_up_batch(PLAN, -1)
        with pytest.raises(InvalidInputError, match="rate must be a finite number above 0"):
            grow_batch(PLAN, lambda epoch: 1.0 - epoch, 3)
        with pytest.raises(InvalidInputError, match="multiple must be at least 1"):
            warm_up_batch(PLAN, 1, multiple=0)


class TestPostLocal:
    def test_needs_several_ranks(self):
        with pytest.raises(InvalidInputError, match=r"torch\.distributed is not initialized"):
            post_local_sgd(sgd(parameter([0.0])), start_step=1, period=2)
        with pytest.raises(InvalidInputError, match="needs a DistributedDataParallel model"):
            stop_averaging_gradients(nn.Linear(1, 1), start_step=1)


class TestCatalogue:
    @pytest.mark.parametrize("name", [n for n in method_names() if n != "post_local_sgd"])
    def test_every_method_trains_and_resumes_exactly(self, name):
        x, y = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 2
        plan = TrainingPlan(global_batch_size=8, reference_batch_size=2, steps_per_epoch=2)

        def make():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            return model, build_method(name).wrap(optimizer, plan)

        def train(model, run, epochs):
            for epoch in epochs:
                size = min(run.begin_epoch(epoch), 8)

                def closure(size=size):
                    run.optimizer.zero_grad()
                    for half in (slice(0, size // 2), slice(size // 2, size)):
                        loss = nn.functional.cross_entropy(model(x[half]), y[half]) / 2
                        loss.backward()
                        if run.after_backward is not None:
                            run.after_backward()
                    return loss.detach()

                for _ in range(2):
                    assert math.isfinite(run.step(closure))
            return torch.cat([p.detach().flatten() for p in model.parameters()])

        assert isinstance(build_method(name), Method)
        assert build_method(name).name == name
        start = torch.cat([p.detach().flatten() for p in make()[0].parameters()])
        whole = train(*make(), range(7))
        assert not torch.equal(whole, start)
        model, run = make()
        train(model, run, range(4))
        again, resumed = make()
        again.load_state_dict(model.state_dict())
        resumed.load_state_dict(run.state_dict())
        assert torch.equal(train(again, resumed, range(4, 7)), whole)

    def test_unknown_names_and_settings(self):
        with pytest.raises(UnknownNameError, match="unknown method 'larz': did you mean lars"):
            build_method("larz")
        with pytest.raises(InvalidInputError, match="'ags' has no setting 'speed': it has"):
            build_method("ags", speed=3)

    def test_settings_replace(self):
        assert build_method("scaling_clip", max_norm=0.5).max_norm == 0.5

    def test_ags_takes_the_square_root_and_the_mode_that_means_something(self):
        p = parameter([[1.0]])
        run = build_method("ags").wrap(torch.optim.Adam([p]), PLAN)
        assert run.optimizer.mode == "update"
        assert run.optimizer.scaling_factor == 4.0
        assert build_method("ags").wrap(sgd(p), PLAN).optimizer.mode == "gradient"


_RANK = """
import os, torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from mlflow_tula.methods import TrainingPlan, build_method
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()

def linear():
    model = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        model.weight.zero_()
    return model

def moves(name, gradients, **settings):
    model = linear()
    plan = TrainingPlan(
        global_batch_size=2, reference_batch_size=1, steps_per_epoch=1, world_size=2
    )
    run = build_method(name, **settings).wrap(torch.optim.SGD(model.parameters(), lr=0.1), plan)
    ddp = DDP(model)
    run.attach(ddp)
    weights = []
    for gradient in gradients:
        run.optimizer.zero_grad()
        ddp(torch.tensor([[gradient[rank], 0.0]]).double()).sum().backward()
        run.optimizer.step()
        weights.append(round(model.weight[0, 0].item(), 9))
    return weights

# shards 3 and 1: gain 1.25, average 2, as in the one-process test
assert moves("adascale", [(3.0, 1.0)]) == [-0.25], moves("adascale", [(3.0, 1.0)])

# f = a x^2 / 2 with a = 3 and 1, from 1, look-ahead 0.1 along each rank's own gradient:
# step 1: gradients 3 and 1, mean 2, x = 0.8; step 2: 3 (0.8 - 0.3) and 0.8 - 0.1, mean 1.1
model = linear()
with torch.no_grad():
    model.weight[0, 0] = 1.0
plan = TrainingPlan(global_batch_size=2, reference_batch_size=1, steps_per_epoch=1, world_size=2)
run = build_method("extrapolation", rule="constant", warmup_epochs=0.0).wrap(
    torch.optim.SGD(model.parameters(), lr=0.1), plan
)
ddp = DDP(model)
run.attach(ddp)

def closure():
    run.optimizer.zero_grad()
    loss = (ddp(torch.tensor([[1.0, 0.0]]).double()) ** 2).sum() * (3.0, 1.0)[rank] / 2
    loss.backward()
    return loss.detach()

for want in (0.8, 0.8 - 0.11):
    run.step(closure)
    assert abs(model.weight[0, 0].item() - want) < 1e-9, (model.weight, want)

# averaged for 2 steps (mean 2), then each rank its own; weights are averaged at step 2 and then
# every second step: (t - t0) % H == 0
got = moves("post_local_sgd", [(3.0, 1.0)] * 5, start_epoch=2, period=2, rule="constant",
            warmup_epochs=0.0)
own = (0.3, 0.1)[rank]
want = [-0.2, -0.4, -0.6, -0.6 - own, -0.6 - 0.4]
assert got == [round(w, 9) for w in want], (rank, got, want)
torch.distributed.barrier()
os._exit(0)  # gloo's threads now and then abort a regular exit
"""


@pytest.mark.slow
def test_two_ranks_adascale_extrapolation_and_post_local_sgd(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(_RANK)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node=2", str(script)],
        check=False,
        timeout=300,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("scale", [None, 128.0])
def test_lars_divisors_for_a_cpu_are_those_for_every_device(scale: float | None) -> None:
    from mlflow_tula.methods.fused_lars import _divisors, _divisors_one_by_one

    torch.manual_seed(0)
    weights = [torch.randn(4, 3), torch.zeros(3, 3), torch.randn(5, 2, 3, 3), torch.randn(2, 2)]
    weights[3][0, 0] = torch.nan
    group = {"trust_coefficient": 0.02, "zero_factor": 0.5}
    matrices = [(group, torch.nn.Parameter(weight)) for weight in weights]
    norms = torch.tensor([0.3, 2.0, 0.0, 1.0])
    loss_scale = None if scale is None else torch.tensor(scale)
    wanted = torch.stack(_divisors(matrices, norms, loss_scale))
    found = torch.stack(list(_divisors_one_by_one(matrices, norms, loss_scale)))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    assert wanted[1] == (2.0 if scale is None else 256.0)
    assert wanted[2] == 1.0
