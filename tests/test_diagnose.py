"""What gradients do over a training, against what can be known exactly."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

from mlflow_tula.comparing.facts import Task, Trial, freeze
from mlflow_tula.diagnose import diagnose, largest_hessian_eigenvalue, update_density
from mlflow_tula.errors import InvalidInputError, TrainingError

TASK = Task(dataset="digits", network="mlp", learning_rate=0.05, epochs=2.0)


def trial(method="plain", batch=256, **settings):
    return Trial(task=TASK, method=method, settings=freeze(settings), batch_size=batch, seed=0)


@pytest.mark.parametrize("top", [5.0, -7.0])
def test_the_eigenvalue_of_a_known_hessian(top):
    generator = torch.Generator().manual_seed(3)
    basis, _ = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))
    hessian = basis @ torch.diag(torch.tensor([top, 2, 1, 0.5, 0.1, 0.0]).double()) @ basis.T
    weights = nn.Parameter(torch.randn(6, generator=generator, dtype=torch.float64))
    found = largest_hessian_eigenvalue(
        lambda: 0.5 * weights @ hessian @ weights, [weights], tolerance=1e-9
    )
    assert found == pytest.approx(top, rel=1e-6)


def test_the_eigenvalue_of_a_small_network_is_torchs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    inputs, labels = torch.randn(20, 3), torch.randint(0, 2, (20,))
    parameters = list(model.parameters())
    sizes = [p.numel() for p in parameters]

    def loss_of(flat):
        pieces = flat.split(sizes)
        shaped = {
            name: piece.view_as(p)
            for (name, p), piece in zip(model.named_parameters(), pieces, strict=True)
        }
        out = torch.func.functional_call(model, shaped, (inputs,))
        return nn.functional.cross_entropy(out, labels)

    flat = torch.cat([p.detach().flatten() for p in parameters])
    wanted = torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss_of, flat))
    largest = wanted[wanted.abs().argmax()]
    found = largest_hessian_eigenvalue(
        lambda: nn.functional.cross_entropy(model(inputs), labels),
        parameters,
        iterations=500,
        tolerance=1e-7,
    )
    assert found == pytest.approx(float(largest), rel=1e-3)


def test_no_curvature_is_zero():
    weights = nn.Parameter(torch.ones(3))
    assert largest_hessian_eigenvalue(lambda: (weights * 0).square().sum(), [weights]) == 0.0


def test_the_density_of_known_updates():
    moved = np.random.default_rng(0).normal(0, 0.01, 50_000).astype(np.float32)
    at, density = update_density(moved)
    assert density[np.abs(at).argmin()] == pytest.approx(1 / (0.01 * np.sqrt(2 * np.pi)), rel=0.1)
    assert np.trapezoid(density, at) == pytest.approx(1.0, abs=0.05)
    still, nothing = update_density(np.zeros(100, dtype=np.float32))
    assert (still.tolist(), nothing.tolist()) == ([0.0], [0.0])


def test_watching_does_not_change_the_training():
    watched, unwatched = diagnose(trial(), snapshots=3), diagnose(trial(), snapshots=0)
    assert watched.steps == unwatched.steps
    assert watched.accuracy == unwatched.accuracy
    assert len(watched.steps) == 11  # 2 x 1438 samples in batches of 256
    assert [look.step for look in watched.snapshots] == [4, 7, 11]
    assert all(look.hessian_eigenvalue > 0 for look in watched.snapshots)
    assert all(look.update_norm > 0 for look in watched.snapshots)
    assert watched.steps[0].variability is None
    assert all(facts.variability is not None for facts in watched.steps[1:])
    assert all(facts.noise_scale is None or facts.noise_scale >= 0 for facts in watched.steps)
    json.dumps(watched.to_dict(), allow_nan=False)


def test_noise_is_larger_where_batches_disagree():
    facts = diagnose(trial(batch=32), snapshots=0).steps
    early = [f.noise_scale for f in facts[5:15] if f.noise_scale]
    late = [f.noise_scale for f in facts[-15:] if f.noise_scale]
    assert np.median(late) > np.median(early)  # McCandlish et al.: it grows over a training


def test_methods_that_need_more_of_the_loop_and_divergence():
    with pytest.raises(InvalidInputError, match="diagnose follows methods that step by"):
        diagnose(trial("sam"))
    with pytest.raises(TrainingError, match=r"the loss was .* lower the learning rate"):
        diagnose(trial("constant_scaling", factor=1e8))


@pytest.mark.slow
def test_the_command_logs_curves_and_figures(store):
    from mlflow import MlflowClient

    from mlflow_tula.cli import run

    assert run(["diagnose", "--network", "mlp", "--epochs", "2", "--snapshots", "2"]) == 0
    client = MlflowClient(f"sqlite:///{store}")
    experiment = client.get_experiment_by_name("tula")
    found = client.search_runs([experiment.experiment_id])[0]
    assert "gradient_norm/batch_512" in found.data.metrics
    assert "hessian_eigenvalue/batch_32" in found.data.metrics
    names = {file.path for file in client.list_artifacts(found.info.run_id)}
    assert {"diagnosis.json", "gradients.png", "updates.png"} <= names
