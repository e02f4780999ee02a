"""Comparisons that really train: fairness, resuming, budgets, controls, the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from mlflow_tula.compare import Plan, compare, known_methods
from mlflow_tula.comparing.facts import Task, Trial, freeze
from mlflow_tula.comparing.local_steps import LocalSteps
from mlflow_tula.comparing.records import RecordFile
from mlflow_tula.comparing.trial import run_trial
from mlflow_tula.errors import InvalidInputError, UnknownNameError, WorkFailedError
from mlflow_tula.methods.averaging import PostLocalMethod
from mlflow_tula.methods.protocol import TrainingPlan

TASK = Task(dataset="digits", network="mlp", learning_rate=0.05, epochs=2.0)
PLAN = Plan(
    task=TASK, methods=("plain", "auto"), batch_sizes=(256,), seeds=2, tune=False, tuning_seeds=1
)


def trial(method="plain", batch=256, seed=0, task=TASK, **settings):
    return Trial(task=task, method=method, settings=freeze(settings), batch_size=batch, seed=seed)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def without_times(outcome):
    return replace(outcome, cpu_time_s=0.0, wall_time_s=0.0)


# --- one training ---------------------------------------------------------------------------


def test_a_training_is_the_same_every_time_and_learns():
    first, again = run_trial(trial(batch=32)), run_trial(trial(batch=32))
    assert without_times(first) == without_times(again)
    assert first.accuracy > 0.9
    assert first.samples == 89 * 32  # what fits into 2 x 1438 samples
    assert first.steps == 89
    assert first.curve[-1][2] == pytest.approx(first.accuracy, abs=1e-5)
    losses = [loss for _, loss, _ in first.curve]
    assert losses[-1] < losses[0]


def test_a_factor_of_one_is_plain_training_bit_for_bit():
    plain = run_trial(trial())
    for method, settings in (
        ("ags", {"scaling_factor": 1.0}),
        ("constant_scaling", {"factor": 1.0}),
        ("scaling_clip", {"rule": "constant", "factor": 1.0, "max_norm": 1e9}),
        ("ags_constant", {"scaling_factor": 1.0}),
    ):
        other = run_trial(trial(method, **settings))
        assert (other.accuracy, other.loss) == (plain.accuracy, plain.loss), method


@pytest.mark.parametrize(
    "method",
    ["ags_shuffled", "adascale", "post_local_sgd", "sam", "extrapolation", "batch_warmup", "lars"],
)
def test_every_kind_of_method_trains(method):
    task = replace(TASK, epochs=3.0)
    settings = {"post_local_sgd": {"start_epoch": 1.0}, "batch_warmup": {"epochs": 1}}
    outcome = run_trial(trial(method, task=task, **settings.get(method, {})))
    assert not outcome.diverged
    assert outcome.accuracy > 0.5
    if method == "batch_warmup":
        assert outcome.steps > 40  # the first epoch in batches of 32


def test_divergence_is_an_outcome():
    outcome = run_trial(trial("constant_scaling", factor=1e6))
    assert outcome.diverged
    assert outcome.train_loss is None
    json.dumps(outcome.to_dict(), allow_nan=False)


def test_the_rate_decays_for_every_method_alike():
    decaying = replace(TASK, decay="linear")
    assert run_trial(trial(task=decaying)).loss != run_trial(trial()).loss
    for method in ("ags", "lars", "sam", "batch_warmup", "post_local_sgd"):
        own = {"post_local_sgd": {"start_epoch": 0.0, "period": 2}}.get(method, {})
        outcome = run_trial(trial(method, task=decaying, **own))
        assert outcome.loss != run_trial(trial(method, **own)).loss, method
    # the last step is as good as none: the rate is zero in it
    longer = run_trial(trial(task=replace(decaying, epochs=40.0), batch=512))
    assert longer.accuracy > 0.9


def test_the_recipe_is_spelled_out_in_its_record(tmp_path):
    result = compare(PLAN, tmp_path / "r.jsonl", workers=1)
    settings = dict(next(row for row in result.rows if row.method == "auto").settings)
    assert settings.pop("method") in known_methods()
    spelled = trial(str(dict(result.rows[-1].settings)["method"]), **settings)
    same = run_trial(spelled)
    assert same.accuracy == result.outcomes[-2].accuracy


def test_weight_decay_and_momentum_reach_the_optimizer():
    with_decay = run_trial(trial(task=replace(TASK, weight_decay=0.1)))
    assert with_decay.loss != run_trial(trial()).loss


# --- post-local SGD in one process ------------------------------------------------------------


def test_local_steps_average_and_part_as_written():
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = PostLocalMethod(rule="constant", start_epoch=1.0, period=2, warmup_epochs=0.0)
    plan = TrainingPlan(global_batch_size=4, reference_batch_size=2, steps_per_epoch=1)
    local = LocalSteps(method, model, optimizer, plan)
    inputs = [torch.randn(4, 3) for _ in range(4)]
    labels = torch.tensor([0, 1, 0, 1])
    mine = [model.weight.detach().clone() for _ in range(2)]

    def gradient(weight, x, y):
        weight = weight.clone().requires_grad_()
        nn.functional.cross_entropy(x @ weight.T, y).backward()
        return weight.grad

    for step, x in enumerate(inputs):
        local.step(x, labels)
        if step == 0:  # before t_0: one step with the whole batch
            whole = mine[0] - 0.1 * gradient(mine[0], x, labels)
            mine = [whole, whole]
            torch.testing.assert_close(model.weight.detach(), whole)
            continue
        halves = zip(mine, x.split(2), labels.split(2), strict=True)
        mine = [w - 0.1 * gradient(w, part, y) for w, part, y in halves]
        if (step - 1) % 2 == 0:
            mine = [(mine[0] + mine[1]) / 2] * 2
    local.finish()
    torch.testing.assert_close(model.weight.detach(), (mine[0] + mine[1]) / 2)


# --- comparisons ----------------------------------------------------------------------------


def test_a_comparison_goes_on_where_it_was(tmp_path):
    whole = compare(PLAN, tmp_path / "a.jsonl", workers=1)
    assert [(row.method, row.batch_size) for row in whole.rows] == [
        ("plain", 32),
        ("plain", 256),
        ("auto", 256),
    ]
    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 6
    (tmp_path / "b.jsonl").write_text("".join(lines[:3]) + lines[3][:40])
    heard = []
    again = compare(
        PLAN, tmp_path / "b.jsonl", workers=1, on_outcome=lambda o, n, of: heard.append((n, of))
    )
    assert heard == [(n, 6) for n in range(1, 7)]
    assert list(map(without_times, again.outcomes)) == list(map(without_times, whole.outcomes))
    untouched = (tmp_path / "b.jsonl").stat().st_mtime_ns
    stored = compare(PLAN, tmp_path / "b.jsonl", only_recorded=True)
    assert stored.rows == again.rows
    assert (tmp_path / "b.jsonl").stat().st_mtime_ns == untouched


def test_only_recorded_trains_nothing(tmp_path):
    with pytest.raises(InvalidInputError, match=r"6 trainings are not in .*: run them first"):
        compare(PLAN, tmp_path / "r.jsonl", only_recorded=True)


def test_settings_are_chosen_on_validation_and_never_on_test(tmp_path):
    plan = replace(
        PLAN,
        methods=("static_scaling", "ags_shuffled"),
        seeds=1,
        tune=True,
        tune_learning_rate=True,
    )
    result = compare(plan, tmp_path / "r.jsonl", workers=1)
    splits = [o.trial.split for o in RecordFile(tmp_path / "r.jsonl").read().values()]
    assert splits == sorted(splits, reverse=True)  # every validation run came first
    assert {o.trial.split for o in result.tuning} == {"validation"}
    assert {o.trial.method for o in result.tuning} == {"static_scaling", "ags"}
    assert {o.trial.split for o in result.outcomes} == {"test"}
    tried = [o for o in result.tuning if o.trial.method == "static_scaling"]
    best = max(tried, key=lambda o: o.accuracy).accuracy
    chosen = next(row for row in result.rows if row.method == "static_scaling").settings
    assert any(o.accuracy == best and o.trial.settings == chosen for o in tried)
    tuning_seeds = {o.trial.seed for o in result.tuning}
    assert not tuning_seeds & {o.trial.seed for o in result.outcomes}


def test_equal_time_gives_each_method_the_time_of_plain_training(tmp_path):
    plan = replace(PLAN, methods=("plain", "sam"), seeds=1, budget="time")
    result = compare(plan, tmp_path / "r.jsonl", workers=1)
    limits = {o.trial.time_limit_s for o in result.outcomes}
    assert len(limits) == 1
    rows = {(row.method, row.batch_size): row for row in result.rows}
    assert rows["sam", 256].steps < 3 * rows["plain", 256].steps
    again = compare(plan, tmp_path / "r.jsonl", workers=1)
    assert again.outcomes == result.outcomes


@pytest.mark.slow
def test_workers_give_the_numbers_of_one_process(tmp_path):
    one = compare(PLAN, tmp_path / "a.jsonl", workers=1)
    two = compare(PLAN, tmp_path / "b.jsonl", workers=2)
    assert list(map(without_times, one.outcomes)) == list(map(without_times, two.outcomes))


@pytest.mark.slow
def test_a_training_that_raises_names_itself(tmp_path):
    (tmp_path / "bad.py").write_text(
        "import torch\n"
        "class Bad(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(2, 10)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x)\n"
        "def make(num_classes):\n"
        "    return Bad()\n"
    )
    plan = replace(PLAN, task=replace(TASK, network=f"{tmp_path}/bad.py:make"))
    for workers in (1, 2):
        with pytest.raises(WorkFailedError, match=r"plain\(\) at batch \d+, seed \d, failed"):
            compare(plan, tmp_path / "r.jsonl", workers=workers)


def test_plans_that_make_no_sense(tmp_path):
    with pytest.raises(InvalidInputError, match="batch sizes must be above the reference"):
        replace(PLAN, batch_sizes=(32,))
    with pytest.raises(UnknownNameError, match="unknown method 'agz': did you mean ags"):
        replace(PLAN, methods=("agz",))
    with pytest.raises(InvalidInputError, match="seeds must be from 1 to 100"):
        replace(PLAN, seeds=0)
    with pytest.raises(UnknownNameError, match="unknown dataset"):
        compare(replace(PLAN, task=replace(TASK, dataset="nothing")), tmp_path / "r", workers=1)


# --- the command ----------------------------------------------------------------------------

COMMAND = [
    *(sys.executable, "-m", "mlflow_tula", "compare", "--network", "mlp", "--epochs", "2"),
    *("--methods", "plain,ags,auto", "--seeds", "2", "--tune", "false", "--batch-sizes", "256"),
    *("--learning-rate", "0.05", "--workers", "1"),
]


@pytest.mark.slow
def test_the_command_logs_every_training_and_resumes_after_a_kill(store):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    # a kill without warning, as soon as the first result is on disk
    records = store.parent / "tula_output" / "compare.digits" / "trainings.jsonl"
    killed = subprocess.Popen(COMMAND, cwd=store.parent, env=env, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not records.exists() and time.monotonic() < deadline and killed.poll() is None:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    kept = len(records.read_text().splitlines())
    done = subprocess.run(
        [*COMMAND, "--json"],
        cwd=store.parent,
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert kept >= 1
    document = json.loads(done.stdout)
    assert [row["method"] for row in document["rows"]] == ["plain", "plain", "ags", "auto"]
    assert document["rows"][2]["scaled_share"] is not None
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{store}")
    parent = client.get_run(document["run_id"])
    assert "gap_recovered/auto" in parent.data.metrics
    assert "| auto | 256 |" in parent.data.tags["mlflow.note.content"]
    children = client.search_runs(
        [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{document['run_id']}'"
    )
    assert len(children) == 8
    names = {file.path for file in client.list_artifacts(document["run_id"])}
    assert {"comparison.json", "comparison.md", "figures"} <= names


def test_the_command_refuses_before_any_work(store):
    from mlflow_tula.cli import run

    assert run(["compare", "--methods", "agz"]) == 2
    assert run(["compare", "--batch-sizes", "16"]) == 2
    assert run(["compare", "--dataset", "nothing", "--tune", "false"]) == 2
