"""The parts of a comparison: data, samples, records, settings and what follows from outcomes."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlflow_tula.comparing import grids
from mlflow_tula.comparing.data import SampleStream, load
from mlflow_tula.comparing.facts import Outcome, Task, Trial, freeze
from mlflow_tula.comparing.figures import draw_all
from mlflow_tula.comparing.networks import build_network
from mlflow_tula.comparing.records import RecordFile
from mlflow_tula.comparing.summary import (
    accuracy_at_loss,
    best_learning_rate,
    best_settings,
    not_worse,
    summarize,
)
from mlflow_tula.comparing.tables import results_table, table_one, verdicts
from mlflow_tula.comparing.trial import auto_settings, reference_optimizer
from mlflow_tula.errors import InvalidInputError, SchemaError, StoreError, UnknownNameError
from mlflow_tula.methods.catalogue import build_method

TASK = Task(dataset="digits", epochs=2.0)


def outcome(
    accuracy=0.9, *, method="plain", batch=512, seed=0, loss=0.5, curve=(), task=TASK, **settings
):
    trial = Trial(task=task, method=method, settings=freeze(settings), batch_size=batch, seed=seed)
    return Outcome(
        trial=trial,
        accuracy=accuracy,
        loss=loss,
        train_loss=loss,
        train_accuracy=accuracy,
        steps=3,
        samples=1536,
        cpu_time_s=0.25,
        wall_time_s=0.5,
        diverged=loss is None,
        curve=curve,
    )


# --- data -----------------------------------------------------------------------------------


def test_digits_are_the_real_images_and_splits_are_disjoint():
    whole, part = load("digits", "test"), load("digits", "validation")
    assert whole.train_x.shape == (1438, 1, 8, 8)
    assert whole.eval_x.shape == (359, 1, 8, 8)
    assert len(part.train_y) + len(part.eval_y) == 1438
    fit = {row.numpy().tobytes() for row in part.train_x}
    held = {row.numpy().tobytes() for row in part.eval_x}
    assert len(fit & held) <= 2  # digits holds a few identical images
    # the validation split is cut from the training data: no test image is in it
    test = {row.numpy().tobytes() for row in whole.eval_x}
    assert len(held & test) <= 2


def test_fashion_mnist_is_whole():
    pytest.importorskip("torchvision")
    try:
        data = load("fashion_mnist", "test")
    except InvalidInputError as error:
        pytest.skip(str(error))
    assert data.train_x.shape == (60000, 1, 28, 28)
    assert data.eval_x.shape == (10000, 1, 28, 28)
    assert abs(float(data.train_x.mean())) < 0.01


def test_mnist1d_is_deterministic_and_leaves_global_seeds_alone():
    pytest.importorskip("mnist1d")
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    wanted = random.random(), np.random.random()  # noqa: NPY002
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    load.cache_clear()
    first = load("mnist1d", "test")
    assert (random.random(), np.random.random()) == wanted  # noqa: NPY002
    load.cache_clear()
    again = load("mnist1d", "test")
    assert first.train_x.shape == (4000, 1, 40)
    assert first.eval_x.shape == (1000, 1, 40)
    assert torch.equal(first.train_x, again.train_x)
    assert torch.equal(first.eval_y, again.eval_y)


def test_a_dataset_that_does_not_exist():
    with pytest.raises(UnknownNameError, match="did you mean digits"):
        load("digit", "test")


@given(st.lists(st.integers(1, 37), min_size=1, max_size=20), st.integers(0, 3))
def test_every_batch_size_sees_the_same_samples_in_the_same_order(sizes, seed):
    one = SampleStream(10, seed)
    pieces = torch.cat([one.take(size) for size in sizes])
    assert torch.equal(pieces, SampleStream(10, seed).take(sum(sizes)))
    for start in range(0, len(pieces) - 9, 10):  # each epoch holds each sample once
        assert sorted(pieces[start : start + 10].tolist()) == list(range(10))


@pytest.mark.parametrize(
    ("network", "shape"),
    [
        ("mlp", (1, 8, 8)),
        ("conv", (1, 8, 8)),
        ("conv_stride", (1, 28, 28)),
        ("conv_norm", (1, 28, 28)),
        ("conv_pool", (1, 28, 28)),
        ("conv_pool", (1, 30, 30)),
        ("conv1d", (1, 40)),
        ("resnet18", (3, 32, 32)),
    ],
)
def test_networks_fit_their_inputs(network, shape):
    out = build_network(network, "digits", shape, 10)(torch.zeros(2, *shape))
    assert out.shape == (2, 10)


def test_networks_that_do_not_exist_or_fit():
    with pytest.raises(UnknownNameError, match="unknown network 'conw'"):
        build_network("conw", "digits", (1, 8, 8), 10)
    with pytest.raises(InvalidInputError, match="network conv takes images"):
        build_network("conv", "mnist1d", (1, 40), 10)


# --- facts and records ----------------------------------------------------------------------


def test_outcomes_round_trip_through_json():
    settings = {"milestones": ((1, 0.25), (2, 0.25)), "epochs": 3}
    one = outcome(method="batch_growth", curve=((0.5, 1.0, 0.3),), **settings)
    again = Outcome.from_dict(json.loads(json.dumps(one.to_dict())))
    assert again == one
    assert again.trial.key == one.trial.key


def test_trials_that_make_no_sense():
    with pytest.raises(InvalidInputError, match="at least the reference batch size"):
        Trial(task=TASK, method="plain", batch_size=16, seed=0)
    with pytest.raises(InvalidInputError, match="time limit belongs to budget 'time'"):
        Trial(task=TASK, method="plain", batch_size=64, seed=0, time_limit_s=1.0)
    with pytest.raises(InvalidInputError, match="epochs must be a finite number above 0"):
        Task(dataset="digits", epochs=0)
    with pytest.raises(UnknownNameError, match="unknown optimizer 'adagrad'"):
        Task(dataset="digits", optimizer="adagrad")


def test_a_task_of_adam_is_another_and_one_of_sgd_is_recorded_as_before():
    plain, adam = (
        Trial(task=Task(dataset="digits", optimizer=name), method="plain", batch_size=64, seed=0)
        for name in ("sgd", "adam")
    )
    assert "optimizer" not in plain.to_dict()["task"]
    assert Trial.from_dict(adam.to_dict()) == adam
    assert plain.key != adam.key
    made = reference_optimizer(adam.task, torch.nn.Linear(2, 2))
    assert type(made) is torch.optim.Adam
    assert auto_settings(adam.task, 64)["method"] == "scaling_clip"
    assert auto_settings(plain.task, 64)["method"] == "lars"


def test_records_survive_a_line_that_was_cut_short(tmp_path):
    file = RecordFile(tmp_path / "deep" / "trainings.jsonl")
    assert file.read() == {}
    first, second = outcome(seed=0), outcome(seed=1)
    file.append(first)
    file.append(second)
    whole = file.path.read_bytes()
    for cut in range(len(whole)):
        file.path.write_bytes(whole[:cut])
        kept = file.read()
        assert all(kept[key] in (first, second) for key in kept)
        if cut % 97 == 0:
            file.append(second)
            assert second in file.read().values()
            assert file.path.read_bytes().endswith(b"\n")
    assert RecordFile(tmp_path / "none.jsonl").read() == {}


def test_records_of_somebody_else(tmp_path):
    path = tmp_path / "trainings.jsonl"
    for text in ("[]\n", '{"kind": "other"}\n', "words\n"):
        path.write_text(text)
        with pytest.raises(SchemaError, match=r"line 1 of .*is no record of `tula compare`"):
            RecordFile(path).read()
    with pytest.raises(StoreError, match="cannot write"):
        RecordFile("/proc/nothing/here.jsonl").append(outcome())


# --- settings -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", grids.DEFAULT_METHODS)
@pytest.mark.parametrize("epochs", [1.0, 5.0, 60.0])
def test_every_candidate_setting_exists(method, epochs):
    task = Task(dataset="digits", epochs=epochs)
    for settings in grids.settings_of(method, task):
        if method != "auto" and grids.tuned_as(method) == method:
            build_method(method, **dict(settings))
        assert hash(freeze(settings)) is not None


def test_the_best_mean_on_validation_wins_and_the_first_of_equals():
    found = [
        outcome(0.8, method="ags", seed=0, scaling_factor=2.0),
        outcome(0.9, method="ags", seed=1, scaling_factor=2.0),
        outcome(0.99, method="ags", seed=0, scaling_factor=4.0),
        outcome(0.7, method="ags", seed=1, scaling_factor=4.0),
        outcome(0.85, method="ags", seed=0, scaling_factor=8.0),
    ]
    assert best_settings(found) == (("scaling_factor", 2.0),)


def test_the_smallest_rate_within_a_standard_error():
    def at(rate, *accuracies):
        task = Task(dataset="digits", learning_rate=rate)
        return [outcome(a, task=task, seed=seed) for seed, a in enumerate(accuracies)]

    assert best_learning_rate([*at(0.01, 0.80), *at(0.02, 0.895), *at(0.05, 0.89, 0.91)]) == 0.02
    assert best_learning_rate([*at(0.01, 0.80), *at(0.05, 0.9)]) == 0.05


# --- what follows ---------------------------------------------------------------------------


def _rows():
    outcomes = []
    for seed, noise in enumerate((-0.01, 0.0, 0.01)):
        outcomes += [
            outcome(0.98 + noise, batch=32, seed=seed, loss=0.1),
            outcome(0.88 + noise, seed=seed, loss=1.0),
            outcome(
                0.97 + noise,
                method="auto",
                seed=seed,
                loss=0.1,
                curve=((1.0, 10.0, 0.5), (2.0, 0.1, 0.97)),
            ),
            outcome(0.93 + noise, method="ags", seed=seed, loss=0.4),
            outcome(0.1, method="lars", seed=seed, loss=None),
        ]
    return summarize(outcomes)


def test_the_gap_recovered():
    rows = {(row.method, row.batch_size): row for row in _rows()}
    assert rows["auto", 512].recovered == pytest.approx(0.9)
    assert rows["ags", 512].recovered == pytest.approx(0.5)
    assert rows["plain", 512].recovered == pytest.approx(0.0)
    assert rows["plain", 32].recovered is None
    assert rows["auto", 512].std == pytest.approx(0.01)
    assert rows["auto", 512].error == pytest.approx(0.01 / 3**0.5)
    assert rows["auto", 512].recovered_error == pytest.approx(0.1 / 3**0.5)
    assert rows["lars", 512].diverged == 3
    assert rows["lars", 512].train_loss is None
    # half way between losses 10 and 0.1 in the logarithm, so half way between accuracies
    assert rows["auto", 512].at_equal_loss == pytest.approx(0.735)
    assert not_worse(rows["auto", 512], rows["ags", 512])
    assert not not_worse(rows["ags", 512], rows["auto", 512])


def test_no_gap_is_no_division():
    rows = summarize([outcome(0.9, batch=32), outcome(0.9), outcome(0.95, method="auto")])
    assert all(row.recovered is None for row in rows)


def test_accuracy_at_a_loss_that_was_never_passed():
    curve = ((1.0, 2.0, 0.3), (2.0, 1.0, 0.6))
    assert accuracy_at_loss(curve, 0.5) is None
    assert accuracy_at_loss(curve, 3.0) is None
    assert accuracy_at_loss((), 1.0) is None
    assert accuracy_at_loss(curve, 1.0) == pytest.approx(0.6)


def test_tables_say_what_is_in_them(tmp_path):
    rows = _rows()
    table = results_table(rows)
    assert "| auto | 512 | 97.00 ± 1.00 | 90 ± 6 |" in table
    assert "(3 diverged)" in table
    assert "| auto | 97.00 |" in table_one(rows)
    assert verdicts(rows) == [
        "batch 512: auto recovers 90 ± 6 % of the gap; within one standard error of every rival "
        "or above it"
    ]
    assert "behind by more than one standard error: auto (+4.00)" in verdicts(rows, "ags")[0]
    sweep = [
        outcome(0.9, method="ags", scaling_factor=s, threshold=d)
        for s in (2.0, 4.0)
        for d in (0.1, 0.5)
    ]
    files = draw_all(tmp_path, "digits", rows, sweep)
    assert [file.stem for file in files] == [
        "accuracy_vs_batch",
        "gap_recovered",
        "ags_scaling_factor",
        "ags_threshold",
    ]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
