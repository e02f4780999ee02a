"""Regret of the chosen batch size against the share of full search spent, for four probe orders.

    python benchmarks/search_curve.py --data FOLDER [--markdown FILE] [--plot PNG] [--max-sizes 12]

Replays published curves (benchmarks/published.py says which files): a probe costs 20 steps of its
measured time. After each probe the predictors are fitted to what was probed so far and a batch
size is chosen among all of the curve's sizes; regret is the true time to target of that choice
over the best, less one. Epochs to target are the measured ones where the tables have them, and
otherwise `1 + B / Bc` with Bc the geometric middle of the sizes; they are known to the search,
which learns step times. The orders:

    adaptive     `mlflow_tula.search.PartialSearch`, with its own stop
    geometric    upwards in steps of at least four, then upwards through what was left out
    ends first   the smallest, the largest, and then the middle of the widest gap
    random       the mean of three shuffles
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
from published import (
    Floats,
    Published,
    markdown_section,
    single_device_curves,
    tasks,
    to_table,
)

import mlflow_tula as tula
from mlflow_tula.search import PartialSearch, Probe

STEPS = 20
SHARES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)
ORDERS = ("adaptive", "geometric", "ends first", "random")


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """One published curve to search: sizes with true step times and known epochs to target."""

    name: str
    frame: pd.DataFrame
    convergence: tula.ConvergencePredictor
    true_s: Floats

    @property
    def costs(self) -> Floats:
        """Seconds of each probe."""
        return STEPS * self.frame.step_time_s.to_numpy(float)


def replays(data: Published, max_sizes: int) -> Iterator[Replay]:
    """Curves of at least six sizes; long ones thinned evenly to `max_sizes`."""
    for task in tasks(data):
        columns = ["global_batch_size", "epochs_to_target", "std", "runs_total", "runs_reached"]
        fitted = tula.ConvergencePredictor.fit(task.frame[columns])
        yield Replay(
            name=f"{task.hardware} {task.name}",
            frame=task.frame[["local_batch_size", "step_time_s"]].reset_index(drop=True),
            convergence=fitted,
            true_s=task.time_to_target_s,
        )
    for curve in single_device_curves(data):
        if len(curve.sizes) < 6 or curve.name.startswith("zeus"):
            continue
        keep = np.unique(np.linspace(0, len(curve.sizes) - 1, max_sizes).round().astype(int))
        frame = curve.frame.iloc[keep].reset_index(drop=True)
        sizes = frame.local_batch_size.to_numpy(float)
        epochs = 10.0 * (1.0 + sizes / np.sqrt(sizes[0] * sizes[-1]))
        known = pd.DataFrame({"global_batch_size": sizes.astype(int), "epochs_to_target": epochs})
        yield Replay(
            name=f"{curve.hardware} {curve.name}",
            frame=frame,
            convergence=tula.ConvergencePredictor.fit(known),
            true_s=frame.step_time_s.to_numpy(float) / sizes * epochs,
        )


def regret(replay: Replay, probed: Sequence[int]) -> float:
    """True time of the size chosen from these probes over the best, less one."""
    rows = replay.frame.iloc[sorted(probed)]
    bundle = tula.fit(to_table(rows, replay.name), replay.convergence)
    out = bundle.predict(replay.frame[["local_batch_size"]])
    chosen = int(np.argmin(out.time_to_target_s.to_numpy(float)))
    return float(replay.true_s[chosen] / replay.true_s.min() - 1.0)


def ends_first(sizes: Sequence[int]) -> list[int]:
    """Both ends, then always the middle (in logarithms) of the widest gap."""
    order, rest = [0, len(sizes) - 1], set(range(1, len(sizes) - 1))
    while rest:
        gaps = [(np.log(sizes[b] / sizes[a]), a, b) for a, b in pairwise(sorted(order))]
        _, low, high = max(gap for gap in gaps if gap[2] - gap[1] > 1)
        goal = np.sqrt(sizes[low] * sizes[high])
        nearest = min(range(low + 1, high), key=lambda i: abs(np.log(sizes[i] / goal)))
        order.append(nearest)
        rest.remove(nearest)
    return order


def geometric(sizes: Sequence[int]) -> list[int]:
    """Upwards in steps of at least four, then the sizes left out, upwards."""
    order = [0]
    for i, size in enumerate(sizes):
        if size >= 4 * sizes[order[-1]]:
            order.append(i)
    return order + [i for i in range(len(sizes)) if i not in order]


def adaptive(replay: Replay) -> list[int]:
    """The order of PartialSearch, until it stops by itself."""
    sizes = replay.frame.local_batch_size.tolist()
    search = PartialSearch(
        [Probe(local_batch_size=int(size)) for size in sizes], convergence=replay.convergence
    )
    empty = to_table(replay.frame.iloc[:1], replay.name)
    order: list[int] = []
    while True:
        table = to_table(replay.frame.iloc[order], replay.name) if order else None
        table = table or tula.ProfileTable(workload=empty.workload, hardware=empty.hardware)
        probe = search.next_probe(table, 0.0)
        if probe is None:
            return order
        order.append(sizes.index(probe.local_batch_size))


def walk(replay: Replay, order: Sequence[int]) -> list[tuple[float, float]]:
    """(share of full search spent, regret) after each probe."""
    costs, memo = replay.costs, []
    for count in range(1, len(order) + 1):
        share = costs[list(order[:count])].sum() / costs.sum()
        memo.append((float(share), regret(replay, order[:count])))
    return memo


def at_share(steps: Sequence[tuple[float, float]], share: float) -> float:
    """Regret once `share` is spent: of the last probe that was finished by then; NaN before it."""
    done = [value for spent, value in steps if spent <= share + 1e-9]
    return done[-1] if done else np.nan


def measure(data: Published, max_sizes: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """One row a (curve, order, share), and one row a curve of where adaptive search stopped."""
    random = np.random.default_rng(0)
    rows, stops = [], []
    fixed: dict[str, Callable[[Sequence[int]], list[int]]] = {
        "geometric": geometric,
        "ends first": ends_first,
    }
    for replay in replays(data, max_sizes):
        sizes = replay.frame.local_batch_size.tolist()
        walks = {name: [walk(replay, order(sizes))] for name, order in fixed.items()}
        walks["random"] = [walk(replay, random.permutation(len(sizes)).tolist()) for _ in range(3)]
        walks["adaptive"] = [walk(replay, adaptive(replay))]
        share, value = walks["adaptive"][0][-1]
        probes = len(walks["adaptive"][0])
        stops.append((replay.name, len(sizes), probes, 100 * share, 100 * value))
        for name, several in walks.items():
            for share in SHARES:
                values = [at_share(steps, share) for steps in several]
                rows.append((replay.name, name, share, 100 * float(np.mean(values))))
    return (
        pd.DataFrame(rows, columns=["curve", "order", "share", "regret"]),
        pd.DataFrame(stops, columns=["curve", "sizes", "probes", "share %", "regret %"]),
    )


def means(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean regret of each order at each share, and the ninetieth percentile of adaptive search.

    Without any finished probe a person can only guess; the guess is charged with a doubled time.
    """
    charged = rows.assign(regret=rows.regret.fillna(100.0))
    table = charged.groupby(["share", "order"]).regret.mean().unstack("order")[list(ORDERS)]
    adaptive_rows = charged[charged.order == "adaptive"]
    table["adaptive P90"] = adaptive_rows.groupby("share").regret.quantile(0.9)
    shares = [f"{share:.0%}" for share in table.index]
    return (
        table.reset_index(drop=True)
        .rename_axis(columns=None)
        .assign(share=shares)[["share", *ORDERS, "adaptive P90"]]
    )


def plot(rows: pd.DataFrame, path: Path) -> None:
    """Mean regret against share spent, one line an order."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name in ORDERS:
        table = means(rows)
        axes.plot(table.share.str.rstrip("%").astype(float), table[name], marker="o", label=name)
    axes.set(xlabel="share of full-search time spent, %", ylabel="mean regret, %", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Read the folder, replay every curve, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder of published CSVs")
    parser.add_argument("--plot", type=Path, help="write the figure there as PNG")
    parser.add_argument("--markdown", type=Path, help="write the tables there")
    parser.add_argument("--max-sizes", type=int, default=12, help="thin longer curves to so many")
    options = parser.parse_args()
    warnings.simplefilter("ignore", tula.errors.TulaWarning)
    rows, stops = measure(Published.read(options.data), options.max_sizes)
    mean = stops.mean(numeric_only=True).to_frame().T.assign(curve="mean")
    stops = pd.concat([stops, mean], ignore_index=True)
    tables = [
        (f"Regret of the chosen size, percent, mean of {rows.curve.nunique()} curves", means(rows)),
        ("Where adaptive search stopped by itself", stops),
    ]
    for title, frame in tables:
        print(f"\n{title}\n")
        print(frame.to_string(index=False, float_format=lambda x: f"{x:.1f}"))
    if options.markdown:
        page = "\n".join(markdown_section(*table) for table in tables)
        options.markdown.write_text(page, encoding="utf-8")
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
