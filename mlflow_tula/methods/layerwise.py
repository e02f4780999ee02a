"""LARS and LAMB: each layer's step in proportion to its weights.

    LARS (You et al. 2017, arXiv 1708.03888)     lambda = eta |w| / (|g| + beta |w|)
                                                 v <- m v + lambda (g + beta w);  w <- w - lr v
    LAMB (You et al. 2020, arXiv 1904.00962)     m, v as in Adam;  u = m / (sqrt(v) + eps) + beta w
                                                 w <- w - lr min(|w|, 10) / |u| u

Both are pytorch-optimizer's (PyPI, 4.1, Apache-2.0, needs only numpy and torch; LARS without weight
decay is `fused_lars` where torch has the kernel, which takes a third of its time): maintained,
foreach kernels, tested against their papers here on cases computed by hand. torch has neither;
apex's and NVIDIA's need CUDA, torch_optimizer has not been released since 2021.

Its LARS steps scalars and vectors (biases, norm layers) by plain SGD at the group's raw rate, which
for LARS is ten to a hundred times a usual one. So they get a group of their own here with a rate
of their own. Its LAMB is used as version 3 of the paper has it (no bias correction), which takes
two settings that are not its defaults: `weight_decouple=False`, or weight decay would stand outside
the trust ratio; `adam_debias=True`, or the step would be divided by 1 - beta1^t after the trust
ratio has fixed its length, and the first one would be ten times too long.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.methods.clipping import NormClipping
from mlflow_tula.methods.fused import supports_fused
from mlflow_tula.methods.fused_lars import FusedLars
from mlflow_tula.methods.protocol import MethodRun, TrainingPlan
from mlflow_tula.methods.scale_invariance import ignores_gradient_scale
from mlflow_tula.methods.scaling import (
    ScalingRule,
    learning_rate_factor,
    scale_learning_rate,
    warm_up,
)
from mlflow_tula.methods.step_scaling import check_number

Parameters = Iterable[torch.nn.Parameter]

_USUAL_ADAM_RATE = 0.001  # Kingma and Ba 2015, arXiv 1412.6980


def lars(
    parameters: Parameters,
    learning_rate: float,
    *,
    vector_learning_rate: float,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    trust_coefficient: float = 0.001,
    rank_limit: float | None = None,
) -> Optimizer:
    """LARS with scalars and vectors in a group of their own.

    Without weight decay, and where torch has a fused kernel, this package's `FusedLars`, whose
    numbers are those of pytorch-optimizer's but for rounding and all-zero weights; else that one.

    Args:
        parameters: of the model.
        learning_rate: of matrices and kernels, multiplied by each layer's trust ratio.
        vector_learning_rate: of biases and norm layers, used as it is.
        momentum: of both groups.
        weight_decay: of matrices and kernels; vectors have none, as in the paper's experiments.
        nesterov: Nesterov momentum in both groups.
        trust_coefficient: eta.
        rank_limit: eta is sqrt(rank_limit / side) times smaller for a matrix whose shorter side
            (a kernel counts as outputs x the rest) is longer than this; None: the same for all.
            Each such eta has a parameter group of its own.
    """
    groups = _by_dimension(parameters, learning_rate, vector_learning_rate, weight_decay)
    if rank_limit is not None:
        check_number("rank_limit", rank_limit, above=0)
        groups = [*_by_rank(groups[0], trust_coefficient, rank_limit), *groups[1:]]
    if not weight_decay and supports_fused(p for group in groups for p in group["params"]):
        return FusedLars(
            groups,
            lr=learning_rate,
            momentum=momentum,
            nesterov=nesterov,
            trust_coefficient=trust_coefficient,
            zero_factor=vector_learning_rate / learning_rate,
        )
    from pytorch_optimizer import LARS

    return LARS(
        groups,
        lr=learning_rate,
        momentum=momentum,
        weight_decay=weight_decay,
        nesterov=nesterov,
        trust_coefficient=trust_coefficient,
    )


def lamb(
    parameters: Parameters,
    learning_rate: float,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    eps: float = 1e-6,
) -> Optimizer:
    """pytorch-optimizer's LAMB; scalars and vectors without weight decay."""
    from pytorch_optimizer import Lamb

    return Lamb(
        _by_dimension(parameters, learning_rate, learning_rate, weight_decay),
        lr=learning_rate,
        betas=betas,
        weight_decay=weight_decay,
        weight_decouple=False,
        eps=eps,
        adam_debias=True,
    )


def _by_dimension(
    parameters: Parameters, matrix_rate: float, vector_rate: float, weight_decay: float
) -> list[dict[str, Any]]:
    everything = [parameter for parameter in parameters if parameter.requires_grad]
    matrices = [parameter for parameter in everything if parameter.ndim > 1]
    vectors = [parameter for parameter in everything if parameter.ndim <= 1]
    if not matrices:
        raise InvalidInputError(
            "layer-wise rates need a parameter of two or more dimensions, and this model has none:"
            " use another method"
        )
    groups = [{"params": matrices, "lr": matrix_rate, "weight_decay": weight_decay}]
    if vectors:
        groups.append({"params": vectors, "lr": vector_rate, "weight_decay": 0.0})
    return groups


def _by_rank(
    group: dict[str, Any], trust_coefficient: float, rank_limit: float
) -> list[dict[str, Any]]:
    """Split matrices by their trust coefficient, longest steps first.

    A gradient has few directions, so a step of the same Frobenius norm has a spectral norm that,
    next to the weights' own, grows with the root of the shorter side.
    """
    by_share: dict[float, list[torch.nn.Parameter]] = defaultdict(list)
    for matrix in group["params"]:
        side = min(len(matrix), matrix[0].numel()) if len(matrix) else 1
        by_share[min(1.0, math.sqrt(rank_limit / max(side, 1)))].append(matrix)
    return [
        {**group, "params": by_share[share], "trust_coefficient": trust_coefficient * share}
        for share in sorted(by_share, reverse=True)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerwiseMethod:
    """LARS or LAMB in place of the given optimizer, with warm-up, and clipping where asked for.

    Takes parameters, reference rate, momentum and weight decay from the optimizer it replaces. The
    rate of matrices is `learning_rate` where given, else the reference rate scaled by `rule`; LARS
    gives vectors the reference rate scaled by `vector_rule`. LAMB in place of SGD begins from
    Adam's usual 0.001 instead, because a rate of SGD says nothing about it. A layer's relative step
    is rate times trust coefficient (LARS) or the rate (LAMB): tune it, it does not carry over.
    """

    name: str = "lars"
    rule: ScalingRule = "linear"
    vector_rule: ScalingRule = "sqrt"
    learning_rate: float | None = None
    relative_step: float | None = None
    """LARS without a rate to tune: a matrix's gradient step is this share of its norm, times the
    square root of the batch ratio (up to `cap`). In place of rate and trust coefficient."""
    trust_coefficient: float = 0.01
    """The paper's 0.001 goes with rates of 10 and more, not with a scaled rate of SGD."""
    rank_limit: float | None = None
    """Of LARS: see `lars`."""
    nesterov: bool | None = None
    """Of LARS: Nesterov's momentum, with the optimizer's own coefficient; None: as it has it."""
    warmup_epochs: float | None = None
    """None: a tenth of the training, at most 5 epochs."""
    max_norm: float | None = None
    cap: float | None = None

    def __post_init__(self) -> None:
        """Refuse a name that stands for neither."""
        if self.name.split("_")[0] not in ("lars", "lamb"):
            raise InvalidInputError(f"the name must begin with lars or lamb, not {self.name!r}")
        check_number("trust_coefficient", self.trust_coefficient, above=0)
        if self.relative_step is not None:
            check_number("relative_step", self.relative_step, above=0)
            if self.learning_rate is not None or self.name.startswith("lamb"):
                raise InvalidInputError(
                    "relative_step is LARS's, in place of a learning_rate: give one of the two"
                )
        if self.rank_limit is not None:
            check_number("rank_limit", self.rank_limit, above=0)

    def wrap(self, optimizer: Optimizer, plan: TrainingPlan) -> MethodRun:
        """Replace the optimizer, keeping its parameters and settings."""
        settings = optimizer.param_groups[0]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        factor = learning_rate_factor(self.rule, plan.ratio, cap=self.cap)
        if self.relative_step is not None:
            factor = plan.ratio  # warm-up begins where linear scaling's would
        if self.name.startswith("lars"):
            stepping = self._lars(parameters, settings, plan)
        else:
            stepping = lamb(
                parameters,
                self.learning_rate
                if self.learning_rate is not None
                else self._lamb_rate(optimizer),
                betas=settings.get("betas", (0.9, 0.999)),
                weight_decay=float(settings.get("weight_decay", 0.0)),
            )
            if self.learning_rate is None:
                scale_learning_rate(stepping, factor)
        schedule = warm_up(stepping, plan.warmup_steps(self.warmup_epochs), factor)
        if self.max_norm is not None:
            stepping = NormClipping(stepping, self.max_norm)
        return MethodRun(
            optimizer=stepping, schedule=schedule, global_batch_size=plan.global_batch_size
        )

    def _lars(
        self, parameters: list[torch.nn.Parameter], settings: dict[str, Any], plan: TrainingPlan
    ) -> Optimizer:
        given = float(settings["lr"])
        trust = self.trust_coefficient
        if self.relative_step is not None:
            rate = 1.0
            trust = self.relative_step * learning_rate_factor("sqrt", plan.ratio, cap=self.cap)
        elif self.learning_rate is not None:
            rate = self.learning_rate
        else:
            rate = given * learning_rate_factor(self.rule, plan.ratio, cap=self.cap)
        vector_factor = learning_rate_factor(self.vector_rule, plan.ratio, cap=self.cap)
        momentum = float(settings.get("momentum", 0.9))
        nesterov = settings.get("nesterov", False) if self.nesterov is None else self.nesterov
        return lars(
            parameters,
            rate,
            vector_learning_rate=given * vector_factor,
            momentum=momentum,
            weight_decay=float(settings.get("weight_decay", 0.0)),
            nesterov=bool(nesterov) and momentum > 0,
            trust_coefficient=trust,
            rank_limit=self.rank_limit,
        )

    @staticmethod
    def _lamb_rate(replaced: Optimizer) -> float:
        if ignores_gradient_scale(replaced):
            return float(replaced.param_groups[0]["lr"])
        return _USUAL_ADAM_RATE
