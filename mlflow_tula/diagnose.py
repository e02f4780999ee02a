"""What gradients do over a training: norm, variability, noise scale, updates, curvature.

Protocol: one training as in `compare` (same start, same order of samples). Every step's gradient is
taken in two halves, so that the norm of a half and of the whole batch are known; the noise scale is
that of the last `WINDOW` steps. At evenly spread snapshots: the density of the weights' updates (a
Gaussian kernel over a sample of them), and the largest eigenvalue of the Hessian of the loss on
a fixed batch, by power iteration on Hessian-vector products (which takes a backward pass through
the gradient each: for small models).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mlflow_tula.comparing.data import SampleStream, load, shards
from mlflow_tula.comparing.facts import Trial
from mlflow_tula.comparing.networks import build_network, wants_rgb
from mlflow_tula.comparing.trial import reference_optimizer, resolve_method
from mlflow_tula.errors import InvalidInputError, TrainingError
from mlflow_tula.gradients import gradient_norm, gradient_variability, noise_scale
from mlflow_tula.methods.protocol import TrainingPlan

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

WINDOW = 20
"""Steps whose squared norms are averaged for the noise scale."""
HESSIAN_SAMPLES = 512
DENSITY_POINTS = 200
DENSITY_SAMPLE = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """One optimizer step."""

    step: int
    epoch: float
    loss: float
    gradient_norm: float
    variability: float | None
    """D of the norms so far; None before the second step."""
    noise_scale: float | None
    """In samples, over the last `WINDOW` steps; None where it cannot be told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """Updates and curvature after one step."""

    step: int
    update_values: tuple[float, ...]
    update_density: tuple[float, ...]
    """Of the changes of all weights in this step, at `update_values`."""
    update_norm: float
    hessian_eigenvalue: float
    """The largest by magnitude, with its sign."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """One training, looked at closely."""

    trial: Trial
    steps: tuple[StepFacts, ...]
    snapshots: tuple[Snapshot, ...]
    accuracy: float

    def to_dict(self) -> dict[str, Any]:
        """Flat JSON."""
        return {
            "kind": "tula.diagnosis",
            "schema_version": 1,
            "trial": self.trial.to_dict(),
            "accuracy": self.accuracy,
            "steps": [asdict(step) for step in self.steps],
            "snapshots": [asdict(snapshot) for snapshot in self.snapshots],
        }


def diagnose(
    trial: Trial, *, snapshots: int = 6, on_step: Callable[[int, int], None] | None = None
) -> Diagnosis:
    """Train once and watch.

    Args:
        trial: what to train, with a method that steps by `optimizer.step()`.
        snapshots: how often to look at updates and curvature; 0 never.
        on_step: hears of each step's number and how many there are.

    Raises:
        InvalidInputError: a method that needs more of the loop.
        TrainingError: the loss became infinite or NaN.
    """
    task = trial.task
    data = load(task.dataset, trial.split, task.data_dir, wants_rgb(task.network))
    torch.manual_seed(trial.seed)
    shape = data.train_x.shape[1:]
    model = build_network(task.network, task.dataset, shape, data.num_classes)
    count = len(data.train_y)
    plan = TrainingPlan(
        global_batch_size=trial.batch_size,
        reference_batch_size=task.reference_batch_size,
        steps_per_epoch=max(1, round(count / trial.batch_size)),
        epochs=task.epochs,
    )
    run = resolve_method(trial).wrap(reference_optimizer(task, model), plan)
    if run.needs_closure or run.phases or run.after_backward or run.attach:
        raise InvalidInputError(
            f"diagnose follows methods that step by optimizer.step(), and {trial.method} needs "
            "more of the loop: take plain, ags, lars or a learning-rate scaling"
        )
    total = int(task.epochs * count) // trial.batch_size
    wanted = (
        {round((at + 1) * total / snapshots) for at in range(snapshots)} if snapshots else set()
    )
    stream = SampleStream(count, trial.seed)
    watch = _Watch(trial.batch_size)
    facts, looks = [], []
    for step in range(1, total + 1):
        at = stream.take(trial.batch_size)
        inputs, labels = data.train_x[at], data.train_y[at]
        loss = _two_halves(model, run.optimizer, inputs, labels, watch)
        if not math.isfinite(loss):
            raise TrainingError(f"the loss was {loss} in step {step}: lower the learning rate")
        before = [p.detach().clone() for p in model.parameters()] if step in wanted else []
        run.optimizer.step()
        if run.schedule is not None:
            run.schedule.step()
        facts.append(watch.facts(step, step * trial.batch_size / count, loss))
        if step in wanted:
            fixed = (data.train_x[:HESSIAN_SAMPLES], data.train_y[:HESSIAN_SAMPLES])
            looks.append(_look(step, model, before, *fixed))
        if on_step is not None:
            on_step(step, total)
    model.eval()
    with torch.no_grad():
        right = (model(data.eval_x).argmax(1) == data.eval_y).float().mean()
    return Diagnosis(trial=trial, steps=tuple(facts), snapshots=tuple(looks), accuracy=float(right))


class _Watch:
    """Norms of half and whole batches, and what follows from them."""

    def __init__(self, batch_size: int) -> None:
        self._sizes = (batch_size // 2, batch_size)
        self._halves: deque[float] = deque(maxlen=2 * WINDOW)
        self._wholes: deque[float] = deque(maxlen=WINDOW)
        self._norms: list[float] = []

    def note(self, halves: Sequence[float], whole: float) -> None:
        self._halves.extend(halves)
        self._wholes.append(whole)
        self._norms.append(whole)

    def facts(self, step: int, epoch: float, loss: float) -> StepFacts:
        small, large = self._sizes
        scale = noise_scale(
            list(self._halves), list(self._wholes), small_batch=small, large_batch=large
        )
        return StepFacts(
            step=step,
            epoch=epoch,
            loss=loss,
            gradient_norm=self._norms[-1],
            variability=gradient_variability(self._norms),
            noise_scale=scale,
        )


def _two_halves(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    labels: Tensor,
    watch: _Watch,
) -> float:
    """Leave the whole batch's gradient in place; note the norms of both halves and of it."""
    parameters = list(model.parameters())
    norms, kept, loss = [], [], 0.0
    pieces = shards(2, inputs, labels)
    for x, y in pieces:
        optimizer.zero_grad()
        piece = cross_entropy(model(x), y)
        piece.backward()  # type: ignore[no-untyped-call]
        loss += float(piece.detach()) * len(y) / len(labels)
        norms.append(gradient_norm(parameters))
        kept.append([None if p.grad is None else p.grad.clone() for p in parameters])
    shares = [len(y) / len(labels) for _, y in pieces]
    for at, parameter in enumerate(parameters):
        grads = [(share, own[at]) for share, own in zip(shares, kept, strict=True)]
        known = [share * grad for share, grad in grads if grad is not None]
        parameter.grad = torch.stack(known).sum(0) if known else None
    watch.note(norms, gradient_norm(parameters))
    return loss


def _look(
    step: int, model: nn.Module, before: Sequence[Tensor], inputs: Tensor, labels: Tensor
) -> Snapshot:
    moved = torch.cat(
        [
            (parameter.detach() - old).flatten()
            for parameter, old in zip(model.parameters(), before, strict=True)
        ]
    )
    values, density = update_density(moved.numpy())
    return Snapshot(
        step=step,
        update_values=tuple(float(v) for v in values),
        update_density=tuple(float(d) for d in density),
        update_norm=float(moved.norm()),
        hessian_eigenvalue=largest_hessian_eigenvalue(
            lambda: cross_entropy(model(inputs), labels), list(model.parameters())
        ),
    )


def update_density(
    moved: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """A Gaussian kernel density of updates, over the range of the middle 99 %.

    All zero (nothing moved) gives a density of zero at zero.
    """
    import numpy as np
    from scipy.stats import gaussian_kde

    generator = np.random.default_rng(0)
    sample = moved if len(moved) <= DENSITY_SAMPLE else generator.choice(moved, DENSITY_SAMPLE)
    low, high = np.quantile(sample, [0.005, 0.995])
    if not high > low:
        return np.zeros(1), np.zeros(1)
    at = np.linspace(low, high, DENSITY_POINTS)
    inside = sample[(sample >= low) & (sample <= high)]
    return at, np.asarray(gaussian_kde(inside)(at), dtype=np.float64)


def largest_hessian_eigenvalue(
    loss: Callable[[], Tensor],
    parameters: Sequence[nn.Parameter],
    *,
    iterations: int = 50,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> float:
    """The Hessian's eigenvalue of largest magnitude, by power iteration.

    v <- H v / |H v|, lambda = v' H v, until lambda changes by less than `tolerance` of itself.

    Args:
        loss: gives the loss as a function of the parameters, the same at every call.
        parameters: those the Hessian is of.
        iterations: at most.
        tolerance: relative.
        seed: of the first vector.
    """
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    gradients = torch.autograd.grad(loss(), wanted, create_graph=True)
    generator = torch.Generator().manual_seed(seed)
    vector = [torch.randn(p.shape, generator=generator).to(p) for p in wanted]
    vector = _unit(vector)
    eigenvalue = 0.0
    for _ in range(iterations):
        product = torch.autograd.grad(gradients, wanted, vector, retain_graph=True)
        now = float(sum((p * v).sum() for p, v in zip(product, vector, strict=True)))
        if float(torch.nn.utils.get_total_norm(list(product))) == 0.0:
            return 0.0
        vector = _unit(product)
        if abs(now - eigenvalue) <= tolerance * abs(now):
            return now
        eigenvalue = now
    return eigenvalue


def _unit(tensors: Sequence[Tensor]) -> list[Tensor]:
    norm = torch.nn.utils.get_total_norm(list(tensors))
    return [tensor / norm for tensor in tensors]
