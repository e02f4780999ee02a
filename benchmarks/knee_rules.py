"""Which knee rule leads to the smaller regret when the curve is only predicted.

    python benchmarks/knee_rules.py --data FOLDER [--markdown FILE]

For every published curve of at least six sizes (benchmarks/published.py) four probes are fitted and
time per sample is predicted for all sizes; for tasks with known epochs to target the same with time
to target. Each rule picks a size from the predicted curve and from the measured one. Regret is the
measured time of the predicted pick over that of the measured pick, less one, where the pick is
slower; `within one` counts picks at most one size away.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pandas as pd
from published import (
    Floats,
    Published,
    markdown_section,
    single_device_curves,
    spread_probes,
    tasks,
    to_table,
)

import mlflow_tula as tula
from mlflow_tula.knee import KneeRule, knee


def curves(data: Published) -> Iterator[tuple[str, Floats, Floats, Floats]]:
    """(name, sizes, measured times, predicted times) of every curve."""
    for curve in single_device_curves(data):
        if len(curve.sizes) < 6:
            continue
        probed = curve.frame.local_batch_size.isin(spread_probes(curve.sizes, 4))
        bundle = tula.fit(to_table(curve.frame[probed], curve.name))
        out = bundle.predict(curve.frame[["local_batch_size"]])
        sizes = np.array(curve.sizes, float)
        times = curve.frame.step_time_s.to_numpy(float) / sizes
        yield curve.name, sizes, times, out.step_time_s.to_numpy(float) / sizes
    columns = ["global_batch_size", "epochs_to_target", "std", "runs_total", "runs_reached"]
    for task in tasks(data):
        sizes = task.frame.global_batch_size.to_numpy(float)
        probed = task.frame.global_batch_size.isin(spread_probes([int(size) for size in sizes], 4))
        train = task.frame[probed]
        bundle = tula.fit(to_table(train, task.name), convergence=train[columns])
        out = bundle.predict(task.frame[["global_batch_size"]])
        yield task.name, sizes, task.time_to_target_s, out.time_to_target_s.to_numpy(float)


def main() -> None:
    """Read the folder and print one row a rule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder of published CSVs")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    options = parser.parse_args()
    warnings.simplefilter("ignore", tula.errors.TulaWarning)
    rows = []
    for name, sizes, measured, predicted in curves(Published.read(options.data)):
        for rule in get_args(KneeRule):
            right, picked = knee(sizes, measured, rule=rule), knee(sizes, predicted, rule=rule)
            regret = 100 * max(measured[picked] / measured[right] - 1, 0.0)
            above = 100 * (measured[picked] / measured.min() - 1)
            rows.append((name, rule, picked == right, abs(picked - right) <= 1, regret, above))
    frame = pd.DataFrame(
        rows, columns=["curve", "rule", "exact", "within one", "regret", "above best"]
    )
    grouped = frame.groupby("rule")
    table = pd.DataFrame(
        {
            "curves": grouped.size(),
            "exact": grouped.exact.sum(),
            "within one": grouped["within one"].sum(),
            "mean regret %": grouped.regret.mean(),
            "worst regret %": grouped.regret.max(),
            "mean time above the best %": grouped["above best"].mean(),
        }
    )
    table = table.reset_index()
    print(table.to_string(index=False, float_format=lambda x: f"{x:.1f}"))
    if options.markdown:
        options.markdown.write_text(markdown_section("Knee rules", table), encoding="utf-8")


if __name__ == "__main__":
    main()
