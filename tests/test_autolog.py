"""autolog() on training loops as people write them, into a real sqlite store."""

from __future__ import annotations

import copy
import io
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest
import torch
from loop_parts import digits, net, train
from mlflow import MlflowClient
from mlflow.tracking import fluent
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

import mlflow_tula as tula
from mlflow_tula.errors import InvalidInputError, UnknownNameError
from mlflow_tula.integrations import loop as loop_module
from mlflow_tula.integrations import sessions


@pytest.fixture(autouse=True)
def _off_again(store: Path) -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    tula.autolog(disable=True)
    torch.set_num_threads(threads)


def logged(run_id: str):
    return MlflowClient().get_run(run_id)


def all_runs() -> list:
    client = MlflowClient()
    found = client.search_runs([one.experiment_id for one in client.search_experiments()])
    return sorted(found, key=lambda run: run.info.start_time)


def history(run_id: str, name: str) -> list[tuple[int, float]]:
    return [(one.step, one.value) for one in MlflowClient().get_metric_history(run_id, name)]


def test_one_line_logs_what_a_loop_is_and_does() -> None:
    tula.autolog(gradient_every_n_steps=10)
    with mlflow.start_run() as run:
        train(epochs=2)
    found = logged(run.info.run_id)
    metrics, tags = found.data.metrics, found.data.tags
    assert found.info.status == "FINISHED"
    assert metrics["local_batch_size"] == metrics["global_batch_size"] == 64
    assert metrics["accumulation_steps"] == metrics["nodes"] == metrics["devices_per_node"] == 1
    assert metrics["throughput"] == pytest.approx(64 / metrics["step_time_s"])
    # 2 x 28 full steps and 2 short ones; warm-up, the first step and the new epoch are not counted
    assert 40 <= metrics["num_steps"] <= 53
    for name in ("step_time_s", "peak_memory_bytes", "gradient_norm", "gradient_variability"):
        assert metrics[name] > 0, name
    assert tags["tula.model"] == "Sequential-5210"
    assert tags["tula.dataset"] == "TensorDataset-1797"
    assert tags["tula.optimizer"] == "sgd"
    assert tags["tula.precision"] == "fp32"
    assert tags["tula.input_shape"] == "1x8x8"
    assert {"tula.fingerprint", "tula.hardware", "tula.hardware_spec"} <= set(tags)
    assert found.data.params["tula.global_batch_size"] == "64"
    assert [step for step, _ in history(run.info.run_id, "step/step_time_s")] == [
        10,
        20,
        30,
        40,
        50,
    ]
    assert [step for step, _ in history(run.info.run_id, "step/gradient_norm")][:4] == [
        4,
        5,
        14,
        15,
    ]


def test_the_noise_scale_is_near_that_of_many_batches() -> None:
    from mlflow_tula.gradients import gradient_norm, noise_scale

    model, _ = train(epochs=2)
    tula.autolog(gradient_every_n_steps=2)
    with mlflow.start_run() as run:
        # A rate of zero: every step sees the same weights, and so does the reference.
        train(model, torch.optim.SGD(model.parameters(), lr=0.0), epochs=3)
    tula.autolog(disable=True)
    images, labels = digits().tensors

    def norm(rows: torch.Tensor) -> float:
        model.zero_grad()
        nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        return gradient_norm(model.parameters())

    small = [norm(torch.randint(0, 1797, (16,))) for _ in range(400)]
    whole = norm(torch.arange(1797))
    true = noise_scale(small, [whole], small_batch=16, large_batch=10**9)
    estimated = logged(run.info.run_id).data.metrics["noise_scale"]
    assert true is not None
    assert 1 / 2 < estimated / true < 2


def test_switching_off_puts_everything_back() -> None:
    owners = (DataLoader, _BaseDataLoaderIter, mlflow, fluent)
    names = ("__iter__", "__next__", "end_run", "end_run")
    hooks = (
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    before = [vars(owner)[name] for owner, name in zip(owners, names, strict=True)]
    counts = [len(one) for one in hooks]
    level = logging.getLogger("mlflow_tula.integrations").level
    tula.autolog(silent=True)
    assert all(
        vars(owner)[name] is not one for owner, name, one in zip(owners, names, before, strict=True)
    )
    model, _ = train()
    tula.autolog(disable=True)
    after = [vars(owner)[name] for owner, name in zip(owners, names, strict=True)]
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert [len(one) for one in hooks] == counts
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in model.modules())
    assert logging.getLogger("mlflow_tula.integrations").level == level
    assert not [one for one in threading.enumerate() if one.name == "tula-watch"]
    done = len(all_runs())
    train()
    assert len(all_runs()) == done


def test_training_is_the_same_with_and_without() -> None:
    def weights() -> list[torch.Tensor]:
        torch.manual_seed(1)
        model, _ = train(epochs=1)
        return list(model.parameters())

    plain = weights()
    tula.autolog(every_n_steps=1, gradient_every_n_steps=1)
    watched = weights()
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))


def test_without_a_run_one_is_made_and_ended_and_nothing_is_active() -> None:
    tula.autolog()
    train()
    assert mlflow.active_run() is None
    tula.autolog(disable=True)
    (run,) = all_runs()
    assert run.info.status == "FINISHED"
    assert run.data.tags["mlflow.autologging"] == "tula"
    assert run.data.tags["tula.command"] == "autolog"
    assert run.data.tags["mlflow.note.content"].startswith("**")
    assert run.data.metrics["local_batch_size"] == 64


def test_each_training_without_a_run_gets_its_own() -> None:
    tula.autolog()
    for size in (32, 128):
        train(batch_size=size)
    tula.autolog(disable=True)
    assert [run.data.metrics["local_batch_size"] for run in all_runs()] == [32, 128]


def test_accumulation_is_seen() -> None:
    tula.autolog()
    with mlflow.start_run() as run:
        train(batch_size=16, passes=4, epochs=2)
    metrics = logged(run.info.run_id).data.metrics
    assert (metrics["local_batch_size"], metrics["accumulation_steps"]) == (16, 4)
    assert metrics["global_batch_size"] == 64


@pytest.mark.parametrize("kind", ["tensor", "mapping", "tuple", "keywords"])
def test_batches_without_a_loader_are_seen(kind: str) -> None:
    class Taking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, batch=None, *, images=None):
            if isinstance(batch, dict):
                images = batch["images"]
            elif isinstance(batch, tuple):
                images = batch[0]
            elif batch is not None:
                images = batch
            return self.inner(images)

    tula.autolog(every_n_steps=2)
    model = Taking()
    optimizer = torch.optim.Adam(model.parameters())
    images, labels = digits().tensors
    with mlflow.start_run() as run:
        for step in range(25):
            rows = torch.arange(24) + step
            x = images[rows]
            batch = {"tensor": x, "mapping": {"images": x}, "tuple": (x, labels[rows])}.get(kind)
            out = model(images=x) if kind == "keywords" else model(batch)
            optimizer.zero_grad()
            nn.functional.cross_entropy(out, labels[rows]).backward()
            optimizer.step()
    found = logged(run.info.run_id)
    assert found.data.metrics["local_batch_size"] == 24
    assert found.data.metrics["accumulation_steps"] == 1
    assert found.data.tags["tula.model"].startswith("Taking-")
    assert found.data.tags["tula.dataset"] == "unnamed"


def test_of_two_optimizers_the_first_counts() -> None:
    """A GAN: the discriminator steps first; the generator's step lies within its interval."""
    generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))
    critic = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
    first = torch.optim.Adam(critic.parameters())
    second = torch.optim.Adam(generator.parameters())
    tula.autolog(every_n_steps=1)
    with mlflow.start_run() as run:
        for images, _ in DataLoader(digits(), batch_size=64, drop_last=True):
            real, made = images.flatten(1), generator(torch.randn(64, 8))
            first.zero_grad()
            (critic(made.detach()).mean() - critic(real).mean()).backward()
            first.step()
            second.zero_grad()
            (-critic(made).mean()).backward()
            second.step()
    metrics = logged(run.info.run_id).data.metrics
    assert metrics["local_batch_size"] == 64
    assert max(step for step, _ in history(run.info.run_id, "step/step_time_s")) == 28
    assert metrics["num_steps"] == 24


def test_a_second_training_with_another_optimizer_takes_over() -> None:
    tula.autolog(every_n_steps=5)
    model = net()
    head = torch.optim.SGD(model[3].parameters(), lr=0.1)
    everything = torch.optim.Adam(model.parameters())
    with mlflow.start_run() as run:
        train(model, head)
        train(model, everything, epochs=3)
    found = logged(run.info.run_id)
    assert found.data.tags["tula.optimizer"] == "adam"
    assert found.data.metrics["num_steps"] > 20


def test_lbfgs_and_its_closure() -> None:
    tula.autolog(every_n_steps=1, gradient_every_n_steps=4)
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    with mlflow.start_run() as run:
        for images, labels in DataLoader(digits(), batch_size=128, drop_last=True):

            def closure(images=images, labels=labels):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                return loss

            optimizer.step(closure)
    metrics = logged(run.info.run_id).data.metrics
    assert (metrics["local_batch_size"], metrics["accumulation_steps"]) == (128, 1)
    assert metrics["gradient_norm"] > 0
    assert metrics["num_steps"] >= 8


def test_gradient_scaler_and_autocast() -> None:
    tula.autolog(every_n_steps=1, gradient_every_n_steps=1)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with mlflow.start_run() as run:
        for images, labels in DataLoader(digits(), batch_size=64):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    found = logged(run.info.run_id)
    assert found.data.tags["tula.precision"] == "bf16"
    assert 0.01 < found.data.metrics["gradient_norm"] < 50  # unscaled


def test_evaluation_in_between_is_no_step() -> None:
    tula.autolog(every_n_steps=1)

    def evaluate(number: int) -> None:
        if number % 7 == 0:
            model.eval()
            with torch.no_grad():
                for images, _ in DataLoader(digits(), batch_size=256):
                    model(images)
            threading.Event().wait(0.1)
            model.train()

    model = net()
    with mlflow.start_run() as run:
        train(model, after_step=evaluate)
    metrics = logged(run.info.run_id).data.metrics
    assert metrics["local_batch_size"] == 64
    assert max(value for _, value in history(run.info.run_id, "step/step_time_s")) < 0.1
    # of 28 intervals without the 3 that warm up and the 4 with an evaluation
    assert metrics["num_steps"] == 21


def test_loops_in_threads_log_to_their_own_runs() -> None:
    tula.autolog()
    seen: dict[int, str] = {}

    def work(size: int) -> None:
        with mlflow.start_run() as run:
            train(batch_size=size, epochs=2)
            seen[size] = run.info.run_id

    threads = [threading.Thread(target=work, args=(size,)) for size in (32, 64, 100)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(set(seen.values())) == 3
    for size, run_id in seen.items():
        assert logged(run_id).data.metrics["local_batch_size"] == size


def test_nested_runs_get_their_own_training() -> None:
    tula.autolog()
    with mlflow.start_run() as parent:
        for size in (32, 64):
            with mlflow.start_run(nested=True):
                train(batch_size=size)
    children = [run for run in all_runs() if "mlflow.parentRunId" in run.data.tags]
    assert [run.data.metrics["local_batch_size"] for run in children] == [32, 64]
    assert "step_time_s" not in logged(parent.info.run_id).data.metrics


def test_a_run_that_is_ended_within_the_loop_keeps_its_part() -> None:
    tula.autolog(every_n_steps=1)
    mlflow.start_run()
    first = mlflow.active_run().info.run_id

    def change(number: int) -> None:
        if number == 14:
            mlflow.end_run()
            mlflow.start_run()

    train(after_step=change)
    second = mlflow.active_run().info.run_id
    mlflow.end_run()
    steps = [[step for step, _ in history(one, "step/step_time_s")] for one in (first, second)]
    assert max(steps[0]) <= 14 < min(steps[1])
    assert max(steps[1]) == 29


def test_exceptions_reach_the_user_and_the_run_fails() -> None:
    tula.autolog(every_n_steps=1)

    def break_off(number: int) -> None:
        if number == 12:
            raise RuntimeError("the data ran out")

    with pytest.raises(RuntimeError, match="the data ran out"), mlflow.start_run() as run:
        train(after_step=break_off)
    found = logged(run.info.run_id)
    assert found.info.status == "FAILED"
    assert found.data.metrics["num_steps"] == 8


def test_a_fault_of_the_observer_only_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("observer")

    monkeypatch.setattr(loop_module.Loop, "begin_step", broken)
    tula.autolog()
    with mlflow.start_run() as run:
        train()
    warnings = [one for one in caplog.records if "stops observing" in one.getMessage()]
    assert len(warnings) == 1
    assert logged(run.info.run_id).info.status == "FINISHED"


def test_a_store_that_fails_only_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    tula.autolog()
    mlflow.set_tracking_uri("http://127.0.0.1:9")
    train()
    tula.autolog(disable=True)
    assert any("was not logged" in one.getMessage() for one in caplog.records)
    mlflow.set_tracking_uri(None)


def test_exclusive_leaves_the_users_runs_alone() -> None:
    tula.autolog(exclusive=True)
    with mlflow.start_run() as run:
        train()
    tula.autolog(disable=True)
    assert "step_time_s" not in logged(run.info.run_id).data.metrics


def test_mlflows_own_switch_is_obeyed() -> None:
    from mlflow.utils.autologging_utils import disable_autologging

    tula.autolog()
    with disable_autologging(), mlflow.start_run() as run:
        train()
    assert "step_time_s" not in logged(run.info.run_id).data.metrics


def test_mlflow_autolog_around(caplog: pytest.LogCaptureFixture) -> None:
    mlflow.autolog()
    try:
        tula.autolog()
        with mlflow.start_run() as run:
            train()
    finally:
        mlflow.autolog(disable=True)
    assert logged(run.info.run_id).data.metrics["local_batch_size"] == 64


def test_models_can_be_copied_stored_and_scripted_at_any_step() -> None:
    tula.autolog(every_n_steps=1, gradient_every_n_steps=1)
    model, kept = net(), []

    def keep(number: int) -> None:
        if number in (1, 3, 8):
            buffer = io.BytesIO()
            torch.save(model, buffer)
            kept.append((buffer, copy.deepcopy(model)))

    with mlflow.start_run():
        train(model, after_step=keep)
    tula.autolog(disable=True)
    images = digits().tensors[0][:4]
    for buffer, copied in kept:
        buffer.seek(0)
        stored = torch.load(buffer, weights_only=False)
        assert b"mlflow_tula" not in buffer.getvalue()
        assert torch.equal(stored(images), copied(images))


@pytest.mark.slow
def test_compiled_models_are_compiled_as_before() -> None:
    counts = []
    for on in (False, True):
        compiled = []

        def backend(graph, inputs, compiled=compiled):
            compiled.append(graph)
            return graph.forward

        torch._dynamo.reset()
        if on:
            tula.autolog(every_n_steps=2, gradient_every_n_steps=5)
        model = net()
        model.compile(backend=backend)
        with mlflow.start_run() as run:
            train(model)
        wrapped = torch.compile(net(), backend=backend)
        with mlflow.start_run() as other:
            train(wrapped)
        counts.append(len(compiled))
    assert counts[0] == counts[1]
    for one in (run, other):
        assert logged(one.info.run_id).data.metrics["local_batch_size"] == 64


def test_our_own_wrapped_optimizers_count_one_step() -> None:
    from mlflow_tula.methods import AdaptiveGradientScaling

    tula.autolog(every_n_steps=1)
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with mlflow.start_run() as run:
        train(model, AdaptiveGradientScaling(inner, 4.0))
    assert max(step for step, _ in history(run.info.run_id, "step/step_time_s")) == 29


def test_frozen_models_parts_and_raw_tensors() -> None:
    """Parts that are called one by one, a frozen backbone, and a loop without any module."""
    tula.autolog(every_n_steps=1)
    images, labels = digits().tensors
    weight = torch.zeros(64, 10, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with mlflow.start_run() as run:
        for step in range(20):
            rows = slice(step * 32, step * 32 + 32)
            optimizer.zero_grad()
            nn.functional.cross_entropy(images[rows].flatten(1) @ weight, labels[rows]).backward()
            optimizer.step()
    metrics = logged(run.info.run_id).data.metrics
    assert metrics["step_time_s"] > 0
    assert "local_batch_size" not in metrics

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = net()[:3], nn.Linear(512, 10)
            self.backbone.requires_grad_(False)

    holder = Holder()
    optimizer = torch.optim.SGD(holder.head.parameters(), lr=0.1)
    with mlflow.start_run() as run:
        for step in range(20):
            rows = slice(step * 32, step * 32 + 32)
            optimizer.zero_grad()
            out = holder.head(holder.backbone(images[rows]))
            nn.functional.cross_entropy(out, labels[rows]).backward()
            optimizer.step()
    assert logged(run.info.run_id).data.metrics["local_batch_size"] == 32


def test_models_are_not_kept_alive() -> None:
    import gc
    import weakref

    # The next step is watched, and its gradients are to be read.
    tula.autolog(every_n_steps=1, gradient_every_n_steps=1)
    with mlflow.start_run():
        model, optimizer = train()
        gone = [weakref.ref(model), weakref.ref(optimizer)]
        del model, optimizer
        gc.collect()
        assert [one() for one in gone] == [None, None]


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("every_n_steps", 0, "every_n_steps must be a whole number of at least 1, not 0"),
        ("every_n_steps", 2.5, "every_n_steps must be a whole number"),
        ("gradient_every_n_steps", -1, "gradient_every_n_steps must be a whole number of at least"),
        ("log_noise_scale", "yes", "log_noise_scale must be True or False, not 'yes'"),
        ("model", "", "model must be a non-empty string"),
    ],
)
def test_bad_settings_are_one_line(setting: str, value: object, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        tula.autolog(**{setting: value})
    assert issubclass(UnknownNameError, InvalidInputError)


def test_names_of_the_users_choice() -> None:
    tula.autolog(model="resnet18", dataset="digits")
    with mlflow.start_run() as run:
        train()
    tags = logged(run.info.run_id).data.tags
    # digits are 32 pixels by default; these are 8
    assert tags["tula.workload"] == "resnet18.digits-8px"


def test_the_worker_sends_while_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow_tula.integrations import watch

    monkeypatch.setattr(watch, "FLUSH_EVERY_S", 0.05)
    monkeypatch.setattr(sessions, "PATIENCE_S", 0.0)
    tula.autolog(every_n_steps=1)
    found: list[bool] = []

    def look(number: int) -> None:
        if number > 5 and not (found and found[-1]):
            threading.Event().wait(0.3)
            found.append(any("step_time_s" in run.data.metrics for run in all_runs()))

    train(after_step=look)
    assert found[-1]
    (run,) = all_runs()
    assert run.info.status == "RUNNING"
    tula.autolog(disable=True)
    assert logged(run.info.run_id).info.status == "FINISHED"
