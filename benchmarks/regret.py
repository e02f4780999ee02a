"""Time to target and regret of the recommended size, beside what the data's own noise allows."""

from __future__ import annotations

import time

import numpy as np
import pandas as pd
from claims import Case, Claim, interval
from published import (
    NUM_SAMPLES,
    Floats,
    Published,
    Task,
    line_through,
    spread_probes,
    tasks,
    to_table,
)

import mlflow_tula as tula

COLUMNS = ["global_batch_size", "epochs_to_target", "std", "runs_total", "runs_reached"]
REDRAWS = 500


def choices(data: Published) -> tuple[Claim, pd.DataFrame]:
    """Time to target of unseen sizes, and one row a task with the regret of the choice."""
    claim, rows = Claim(name="time to target, unseen size"), []
    for task in tasks(data):
        frame, truth = task.frame, task.time_to_target_s
        sizes = [int(size) for size in frame.global_batch_size]
        probed = frame.global_batch_size.isin(spread_probes(sizes, 4)).to_numpy()
        train = frame[probed]
        start = time.perf_counter()
        bundle = tula.fit(to_table(train, task.name), convergence=train[COLUMNS])
        seconds = time.perf_counter() - start
        out = bundle.predict(frame[["global_batch_size"]])
        at = [train[name].to_numpy(float) for name in COLUMNS[:2]]
        step = line_through(at[0], train.step_time_s.to_numpy(float), np.array(sizes))
        line = step * NUM_SAMPLES / np.array(sizes) * line_through(at[0], at[1], np.array(sizes))
        ends = {name: ends[~probed] for name, ends in interval(out, "time_to_target_s").items()}
        claim.cases.append(Case(truth=truth[~probed], **ends, line=line[~probed], fit_s=seconds))
        choice = tula.recommend(
            bundle,
            cluster=tula.ClusterSpec(),
            candidates=sizes,
            objective="min_time_to_target",
        )
        chosen = sizes.index(choice.global_batch_size)
        rows.append(
            {
                "task": f"{task.hardware} {task.name}",
                "chosen": sizes[chosen],
                "best": sizes[int(np.argmin(truth))],
                "regret": _regret(truth, chosen),
                "line regret": _regret(truth, int(np.argmin(line))),
                "all known": _regret(truth, _smoothed(task)),
                "measured again": _measured_again(task),
            }
        )
    return claim, pd.DataFrame(rows)


def _regret(truth: Floats, chosen: int) -> float:
    return float(100 * (truth[chosen] / truth.min() - 1))


def _smoothed(task: Task) -> int:
    """The choice from the true epoch times and a convergence fit to every size, none left out."""
    fitted = tula.ConvergencePredictor.fit(task.frame[COLUMNS])
    epochs = fitted.predict(task.frame.global_batch_size.to_numpy()).epochs_to_target
    return int(np.argmin(epochs.to_numpy(float) * task.frame.epoch_time_s.to_numpy(float)))


def _measured_again(task: Task) -> float:
    """Mean regret of full search: every size measured, as often as the table did, by other seeds.

    Its epochs are drawn around the published means with their standard errors (the median spread
    where a size gives none); regret is still that on the published means.
    """
    frame = task.frame
    epochs, runs = frame.epochs_to_target.to_numpy(float), frame.runs_reached.to_numpy(float)
    error = frame["std"].fillna(frame["std"].median()).to_numpy(float) / np.sqrt(runs)
    draws = np.random.default_rng(0).standard_normal((REDRAWS, len(frame)))
    chosen = np.argmin((epochs + error * draws) * frame.epoch_time_s.to_numpy(float), axis=1)
    return float(np.mean([_regret(task.time_to_target_s, int(i)) for i in chosen]))
