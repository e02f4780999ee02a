"""autolog() on loops that are written in unusual ways; the training must never notice."""

from __future__ import annotations

import copy
import io
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest
import torch
from loop_parts import digits, net, train
from mlflow import MlflowClient
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

import mlflow_tula as tula
from mlflow_tula.integrations.layer_noise import LayerNoise


@pytest.fixture(autouse=True)
def _off_again(store: Path) -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    tula.autolog(disable=True)
    torch.set_num_threads(threads)


def metrics_of(run) -> dict[str, float]:
    return MlflowClient().get_run(run.info.run_id).data.metrics


def tags_of(run) -> dict[str, str]:
    return MlflowClient().get_run(run.info.run_id).data.tags


def step(model, optimizer, images, labels, weight: float = 1.0) -> None:
    optimizer.zero_grad()
    (nn.functional.cross_entropy(model(images), labels) * weight).backward()
    optimizer.step()


def hooks_of(model: nn.Module) -> int:
    parts = list(model.modules())
    return sum(
        len(one)
        for part in parts
        for one in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks)
    ) + sum(len(p._backward_hooks or {}) for p in model.parameters())


def test_another_run_with_another_optimizer_is_another_loop_at_once() -> None:
    """In a notebook the optimizer of the cell before is still alive."""
    tula.autolog(every_n_steps=1)
    kept = []
    for size in (64, 128):
        with mlflow.start_run() as run:
            kept.append(train(batch_size=size))
        metrics = metrics_of(run)
        assert metrics["local_batch_size"] == size
        assert metrics["num_steps"] >= 1797 // size - 5


def test_a_loop_without_a_loader_does_not_take_the_last_loaders_dataset() -> None:
    tula.autolog()
    images, labels = digits().tensors
    train()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with mlflow.start_run() as run:
        for number in range(12):
            rows = slice(number * 16, number * 16 + 16)
            step(model, optimizer, images[rows], labels[rows])
    assert tags_of(run)["tula.dataset"] == "unnamed"


def test_a_module_is_scripted_at_any_step() -> None:
    tula.autolog(every_n_steps=2, gradient_every_n_steps=2)
    images, labels = digits().tensors
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    original = torch.jit.script.__wrapped__
    with mlflow.start_run() as run, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(14):
            rows = slice(number * 16, number * 16 + 16)
            step(model, optimizer, images[rows], labels[rows])
            assert torch.jit.script(model)(images[:2]).shape == (2, 10)
    assert metrics_of(run)["step_time_s"] > 0
    tula.autolog(disable=True)
    assert torch.jit.script is original


def test_models_are_copied_and_stored_in_watched_steps() -> None:
    tula.autolog(every_n_steps=1, gradient_every_n_steps=1)
    model = net()

    def store(number: int) -> None:
        again = copy.deepcopy(model)
        torch.save(model, buffer := io.BytesIO())
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        images = digits().tensors[0][:4]
        assert torch.equal(again(images), loaded(images))

    with mlflow.start_run() as run:
        train(model, after_step=store)
    assert metrics_of(run)["noise_scale"] > 0


def test_switching_off_within_a_step_leaves_nothing_behind() -> None:
    tula.autolog(every_n_steps=1, gradient_every_n_steps=1)
    model = net()
    seen: list[int] = []

    def switch(number: int) -> None:
        if number == 9:
            seen.append(hooks_of(model))
            tula.autolog(disable=True)
            seen.append(hooks_of(model))

    train(model, after_step=switch)
    assert seen[0] > 0
    assert seen[1] == hooks_of(model) == 0


def test_the_step_may_be_made_in_another_thread() -> None:
    tula.autolog(every_n_steps=1)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with mlflow.start_run():
        for images, labels in DataLoader(digits(), batch_size=64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            worker = threading.Thread(target=optimizer.step)
            worker.start()
            worker.join()
    tula.autolog(disable=True)
    assert hooks_of(model) == 0


def test_optimizers_that_step_within_the_backward_pass() -> None:
    """One per parameter, as large models are trained with little memory."""
    tula.autolog(every_n_steps=1)
    model = net()
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

    def update(parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    with mlflow.start_run() as run:
        for images, labels in DataLoader(digits(), batch_size=64):
            nn.functional.cross_entropy(model(images), labels).backward()
    metrics = metrics_of(run)
    assert metrics["local_batch_size"] == 64
    assert metrics["num_steps"] == 24


def test_gradients_that_are_not_numbers_cost_the_curves_only() -> None:
    tula.autolog(every_n_steps=1, gradient_every_n_steps=5)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with mlflow.start_run() as run:
        for number, (images, labels) in enumerate(DataLoader(digits(), batch_size=64)):
            step(model, optimizer, images, labels, float("nan") if number > 8 else 1.0)
    metrics = metrics_of(run)
    assert metrics["num_steps"] == 24
    assert metrics["noise_scale"] > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_that_are_computed_again(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = net()[:3], nn.Linear(512, 10)

        def forward(self, images):
            images.requires_grad_(reentrant)
            return self.head(checkpoint(self.body, images, use_reentrant=reentrant))

    tula.autolog(every_n_steps=1, gradient_every_n_steps=1)
    model = Checkpointed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with mlflow.start_run() as run:
        for images, labels in DataLoader(digits(), batch_size=64, drop_last=True):
            step(model, optimizer, images, labels)
    metrics = metrics_of(run)
    assert metrics["local_batch_size"] == 64
    assert metrics["accumulation_steps"] == 1
    assert 0 < metrics["noise_scale_coverage"] <= 1.001


def test_a_model_that_is_called_twice_has_no_noise_scale() -> None:
    """A siamese network: what one sample contributes is not what one call does."""
    tula.autolog(every_n_steps=1, gradient_every_n_steps=1)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with mlflow.start_run() as run:
        pairs = [DataLoader(digits(), batch_size=32, shuffle=True) for _ in range(2)]
        for (left, _), (right, _) in zip(*pairs, strict=True):
            optimizer.zero_grad()
            (model(left) - model(right)).square().mean().backward()
            optimizer.step()
    metrics = metrics_of(run)
    assert metrics["gradient_norm"] > 0
    assert "noise_scale" not in metrics


def test_two_models_of_one_optimizer_and_replicas() -> None:
    tula.autolog(every_n_steps=1, gradient_every_n_steps=2)
    body, head = nn.DataParallel(net()[:3]), nn.Linear(512, 10)
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=0.01)
    with mlflow.start_run() as run:
        for images, labels in DataLoader(digits(), batch_size=64, drop_last=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(head(body(images)), labels).backward()
            optimizer.step()
    assert metrics_of(run)["local_batch_size"] == 64


def test_iterable_datasets_workers_and_a_batch_size_that_grows() -> None:
    class Stream(IterableDataset):
        def __iter__(self):
            yield from zip(*digits().tensors, strict=True)

    tula.autolog()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    with mlflow.start_run() as run:
        for images, labels in DataLoader(Stream(), batch_size=50):
            step(model, optimizer, images, labels)
    assert metrics_of(run)["local_batch_size"] == 50
    assert tags_of(run)["tula.dataset"] == "Stream"
    with mlflow.start_run() as run:
        for size in (256, 16):
            for images, labels in DataLoader(digits(), batch_size=size):
                step(model, optimizer, images, labels)
    assert metrics_of(run)["local_batch_size"] == 16


def test_sparse_gradients_and_sequences_of_any_length() -> None:
    tula.autolog(every_n_steps=2, gradient_every_n_steps=2)
    words = nn.EmbeddingBag(100, 8, sparse=True)
    optimizer = torch.optim.SGD(words.parameters(), lr=0.1)
    with mlflow.start_run() as run:
        for _ in range(12):
            optimizer.zero_grad()
            words(torch.randint(0, 100, (9, 4))).sum().backward()
            optimizer.step()
    assert metrics_of(run)["local_batch_size"] == 9
    assert "noise_scale" not in metrics_of(run)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(100, 16)
            self.memory = nn.LSTM(16, 16, batch_first=True)
            self.out = nn.Linear(16, 100)

        def forward(self, ids):
            return self.out(self.memory(self.words(ids))[0])

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with mlflow.start_run() as run:
        for number in range(16):
            ids = torch.randint(0, 100, (12, 5 + number % 7))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
    metrics = metrics_of(run)
    assert metrics["local_batch_size"] == 12
    assert 0.2 < metrics["noise_scale_coverage"] <= 1.001  # all but the LSTM's own


def test_batch_normalization_makes_the_noise_scale_a_rough_one() -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))
    tula.autolog(gradient_every_n_steps=2)
    with mlflow.start_run() as run:
        train(model, epochs=2)
    assert "batch normalization" in tags_of(run)["tula.noise_scale_doubt"]
    assert metrics_of(run)["noise_scale_coverage"] < 1
    with mlflow.start_run() as run:
        train(epochs=2)
    assert "tula.noise_scale_doubt" not in tags_of(run)
    assert metrics_of(run)["noise_scale_coverage"] == pytest.approx(1, abs=1e-3)


@pytest.mark.long
def test_compiled_steps_and_models_are_seen() -> None:
    tula.autolog(every_n_steps=1, gradient_every_n_steps=2)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    update = torch.compile(optimizer.step, backend="eager")
    with mlflow.start_run() as run:
        for images, labels in DataLoader(digits(), batch_size=64, drop_last=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            update()
    metrics = metrics_of(run)
    assert metrics["local_batch_size"] == 64
    assert metrics["num_steps"] == 24
    model = net()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with mlflow.start_run() as run:
        for images, labels in DataLoader(digits(), batch_size=64, drop_last=True):
            step(compiled, optimizer, images, labels)
    metrics = metrics_of(run)
    assert metrics["local_batch_size"] == 64
    assert metrics["gradient_norm"] > 0


LAYERS = {
    "linear": (nn.Linear(12, 5), (6, 12)),
    "linear over a sequence": (nn.Linear(12, 5), (6, 3, 12)),
    "linear over a long sequence": (nn.Linear(4, 3), (6, 40, 4)),
    "convolution": (nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2), (6, 4, 9, 7)),
    "convolution to one pixel": (nn.Conv2d(4, 6, 3), (6, 4, 3, 3)),
    "grouped convolution": (nn.Conv2d(4, 6, 3, groups=2, bias=False), (6, 4, 8, 8)),
    "depthwise convolution": (nn.Conv2d(4, 4, 3, groups=4), (6, 4, 5, 5)),
    "convolution over one dimension": (nn.Conv1d(4, 6, 5, stride=2, padding=2), (6, 4, 21)),
    "layer normalization": (nn.LayerNorm(7), (6, 5, 7)),
    "group normalization": (nn.GroupNorm(2, 4), (6, 4, 5)),
    "root mean square": (nn.RMSNorm(7), (6, 7)),
    "embedding": (nn.Embedding(9, 4, padding_idx=0), (6, 11)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_norms_of_samples_are_those_of_batches_of_one(kind: str) -> None:
    layer, shape = LAYERS[kind]
    layer = copy.deepcopy(layer)
    words = isinstance(layer, nn.Embedding)
    inputs = torch.randint(0, 9, shape) if words else torch.randn(shape)
    with torch.no_grad():
        target = torch.randn_like(layer(inputs))

    def backward(rows) -> float:
        layer.zero_grad()
        losses = (torch.tanh(layer(inputs[rows])) - target[rows]).square().flatten(1).sum(1)
        losses.mean().backward()
        return sum(float(p.grad.square().sum()) for p in layer.parameters())

    ones = [backward([number]) for number in range(len(inputs))]
    noise = LayerNoise()
    noise.arm(layer)
    whole = backward(list(range(len(inputs))))
    noise.finish()
    assert noise._mean is not None
    one, mean, all_of_it = noise._mean.tolist()
    assert one == pytest.approx(sum(ones) / len(ones), rel=1e-4)
    assert mean == pytest.approx(whole, rel=1e-4)
    assert all_of_it == pytest.approx(whole, rel=1e-4)


def test_of_large_batches_some_samples_are_read() -> None:
    layer = nn.Linear(3, 2)
    inputs = torch.randn(500, 3)
    noise = LayerNoise()
    for _ in range(20):
        noise.arm(layer, 500)
        layer.zero_grad()
        (layer(inputs) - 1).square().sum(1).mean().backward()
        noise.finish()
    noise.arm(layer, 499)
    layer(inputs).sum().backward()
    noise.finish()
    out = layer(inputs).detach()
    ones = (2 * (out - 1)).square().sum(1) * (1 + inputs.square().sum(1))
    assert noise._mean is not None
    assert float(noise._mean[0]) == pytest.approx(float(ones.mean()), rel=0.1)
