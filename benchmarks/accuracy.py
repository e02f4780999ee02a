"""How well the predictors do on other people's measurements, claim by claim.

    python benchmarks/accuracy.py --data FOLDER [--adaptdl-python PATH] [--markdown FILE]

FOLDER holds the CSVs that benchmarks/published.py describes. Every claim fits a few probes of a
published curve through the public interface and predicts the rows that were left out:

    between     4 sizes spread geometrically over a curve of one device -> the others
    beyond      the same from sizes up to a quarter of the largest -> the larger ones
    nodes P     4 sizes at each node count of the plan P -> all sizes at the other node counts
    memory      32 and 64 (or the smaller half) -> the larger sizes
    epochs      all sizes but one -> that one, inside or the largest
    choice      4 sizes of a task with known epochs to target -> time to target of the others, and
                the regret of `recommend` (true time of the chosen size over the best, less one)

Beside each stand the plain line (relative least squares with coefficients of at least zero) and,
with --adaptdl-python, AdaptDL's own fit on the same probes (benchmarks/adaptdl_fit.py says how to
install it), the two in alternating order with the wall time of each fit. AdaptDL is given the
synchronisation time of each probe where the tables have it, which the others do not see.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from claims import Case, Claim, interval
from published import (
    Floats,
    Published,
    line_through,
    markdown_section,
    node_tables,
    plain_line,
    single_device_curves,
    spread_probes,
    to_table,
)
from regret import choices

import mlflow_tula as tula
from mlflow_tula.hardware import detect

NODE_PLANS = ((1, 4, 16), (1, 2, 4), (1, 2))
LEGEND = """\
Errors are absolute and relative to the truth, in percent; `covered` is the share of truths inside
the 90 % interval, `width` the median width of that interval over the truth; `line` is the plain
line and AdaptDL its own fit, both on the same probes; `fit ms` is the median wall time of one fit.
Regret is the true time of the chosen size over the best, less one. Two choices show what noise
leaves possible: `all known` has the true epoch times and a convergence curve fitted to every size;
`measured again` is full search with other seeds (500 draws).
"""
SETTINGS = ["local_batch_size", "nodes", "devices_per_node"]


class AdaptDL:
    """AdaptDL's fit in its own interpreter; one question, one answer."""

    def __init__(self, python: Path | None) -> None:
        """Start the helper, or answer nothing without a path."""
        self.process: subprocess.Popen[str] | None = None
        if python is not None:
            helper = Path(__file__).with_name("adaptdl_fit.py")
            self.process = subprocess.Popen(
                [str(python), str(helper)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )

    def __call__(self, train: pd.DataFrame, test: pd.DataFrame) -> tuple[Floats | None, float]:
        """Predicted step times of the test rows, and the seconds of the fit."""
        if self.process is None or self.process.stdin is None or self.process.stdout is None:
            return None, np.nan
        sync = train["sync_time_s"].fillna(0.0) if "sync_time_s" in train else 0.0
        alone = (train.step_time_s - sync).clip(lower=0.05 * train.step_time_s)
        timed = {"accum_time_s": alone.tolist(), "step_time_s": train.step_time_s.tolist()}
        question = {"train": self._settings(train) | timed, "test": self._settings(test)}
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the AdaptDL helper ended; run benchmarks/adaptdl_fit.py by hand")
        reply = json.loads(line)
        return np.array(reply["step_time_s"]), float(reply["fit_s"])

    @staticmethod
    def _settings(frame: pd.DataFrame) -> dict[str, list[float]]:
        return {
            "nodes": frame.nodes.tolist(),
            "replicas": (frame.nodes * frame.devices_per_node).tolist(),
            "local_batch_size": frame.local_batch_size.tolist(),
        }


class StepTimes:
    """Step-time cases, the two fits in alternating order."""

    def __init__(self, adaptdl: AdaptDL) -> None:
        """Take the rival."""
        self.adaptdl = adaptdl
        self.count = 0

    def case(self, name: str, train: pd.DataFrame, test: pd.DataFrame) -> Case:
        """Fit `train` with both, predict `test`."""
        self.count += 1
        theirs = self.adaptdl(train, test) if self.count % 2 else None
        start = time.perf_counter()
        bundle = tula.fit(to_table(train, name))
        fit_s = time.perf_counter() - start
        out = bundle.predict(test[SETTINGS])
        guess, guess_s = theirs or self.adaptdl(train, test)
        return Case(
            truth=test.step_time_s.to_numpy(float),
            **interval(out, "step_time_s"),
            line=self._line(train, test),
            fit_s=fit_s,
            adaptdl=guess,
            adaptdl_fit_s=guess_s,
        )

    @staticmethod
    def _line(train: pd.DataFrame, test: pd.DataFrame) -> Floats:
        """The plain line with a constant for more than one node."""

        def columns(frame: pd.DataFrame) -> Floats:
            return np.c_[np.ones(len(frame)), frame.local_batch_size, frame.nodes > 1].astype(float)

        return np.asarray(columns(test) @ plain_line(columns(train), train.step_time_s.to_numpy()))


def step_time_claims(data: Published, steps: StepTimes) -> Iterator[Claim]:
    """One device, between the probes and up to four times beyond them."""
    between, beyond = Claim(name="step time, between"), Claim(name="step time, beyond")
    for curve in single_device_curves(data):
        sizes = curve.sizes
        frame = curve.frame.assign(nodes=1, devices_per_node=1)
        low = [size for size in sizes if size <= max(sizes) / 4]
        plans = [(between, spread_probes(sizes, 4), 0)] if len(sizes) >= 6 else []
        if len(low) >= 3:
            probes = spread_probes(low, 4)
            plans.append((beyond, probes, max(probes)))
        for claim, probes, above in plans:
            probed = frame.local_batch_size.isin(probes)
            left_out = frame[~probed & (frame.local_batch_size > above)]
            if len(left_out):
                claim.cases.append(steps.case(curve.name, frame[probed], left_out))
    yield from (between, beyond)


def node_claims(data: Published, steps: StepTimes) -> Iterator[Claim]:
    """Some node counts from others."""
    for plan in NODE_PLANS:
        claim = Claim(name=f"step time, nodes {{{','.join(map(str, plan))}}}")
        for name, frame in node_tables(data):
            left_out = frame[~frame.nodes.isin(plan)]
            if not set(plan) <= set(frame.nodes) or not len(left_out):
                continue
            probes = []
            for nodes in plan:
                here = frame[frame.nodes == nodes]
                wanted = spread_probes(here.local_batch_size.tolist(), 4)
                probes.append(here[here.local_batch_size.isin(wanted)])
            claim.cases.append(steps.case(name, pd.concat(probes), left_out))
        yield claim


def memory_claims(data: Published) -> Iterator[Claim]:
    """Peak bytes beyond the probes."""
    claim = Claim(name="peak memory, beyond")
    groups = () if data.memory is None else data.memory.groupby(["source", "model"])
    for (_, model), group in groups:
        frame = group.groupby("local_batch_size", as_index=False).peak_memory_bytes.max()
        sizes = frame.local_batch_size.tolist()
        usual = {32, 64} <= set(sizes) and max(sizes) > 64
        probes = [32, 64] if usual else sizes[: max(3, len(sizes) // 2)]
        train = frame[frame.local_batch_size.isin(probes)]
        test = frame[frame.local_batch_size > max(probes)]
        if not len(test):
            continue
        # The memory tables hold no times; a placeholder makes them valid rows.
        rows = train.assign(step_time_s=0.1 + 0.001 * train.local_batch_size)
        start = time.perf_counter()
        bundle = tula.fit(to_table(rows, str(model)))
        seconds = time.perf_counter() - start
        sizes_in, bytes_in = train.local_batch_size.to_numpy(), train.peak_memory_bytes.to_numpy()
        claim.cases.append(
            Case(
                truth=test.peak_memory_bytes.to_numpy(float),
                **interval(bundle.predict(test[["local_batch_size"]]), "peak_memory_bytes"),
                line=line_through(sizes_in, bytes_in, test.local_batch_size.to_numpy()),
                fit_s=seconds,
            )
        )
    yield claim


def convergence_claims(data: Published) -> Iterator[Claim]:
    """Epochs to target of a size that was left out."""
    inside, largest = Claim(name="epochs to target, inside"), Claim(name="epochs, largest size")
    keys = ["source", "task", "version_or_target"]
    columns = ["global_batch_size", "epochs_to_target", "std", "runs_total", "runs_reached"]
    for _, group in () if data.convergence is None else data.convergence.groupby(keys):
        reached = group.epochs_to_target.notna() & (group.runs_reached == group.runs_total)
        known = group[reached].sort_values("global_batch_size")
        if len(known) < 4:
            continue
        for i in range(1, len(known)):
            test, train = known.iloc[[i]], known.drop(known.index[i])
            start = time.perf_counter()
            fitted = tula.ConvergencePredictor.fit(train[columns])
            seconds = time.perf_counter() - start
            out = fitted.predict(test.global_batch_size.to_numpy())
            sizes, epochs = train.global_batch_size.to_numpy(), train.epochs_to_target.to_numpy()
            (largest if i == len(known) - 1 else inside).cases.append(
                Case(
                    truth=test.epochs_to_target.to_numpy(float),
                    **interval(out, "epochs_to_target"),
                    line=line_through(sizes, epochs, test.global_batch_size.to_numpy()),
                    fit_s=seconds,
                )
            )
    yield from (inside, largest)


def report(data: Published, adaptdl: AdaptDL) -> list[tuple[str, pd.DataFrame]]:
    """(title, table) of everything."""
    steps = StepTimes(adaptdl)
    claims = [*step_time_claims(data, steps), *node_claims(data, steps)]
    claims += [*memory_claims(data), *convergence_claims(data)]
    to_target, tasks_chosen = choices(data)
    rows = [claim.row() for claim in [*claims, to_target] if claim.cases]
    tables = [("Errors of the predictions, percent", pd.DataFrame(rows))]
    if len(tasks_chosen):
        regrets = tasks_chosen.iloc[:, 3:].agg(["mean", "median", "max"])
        summary = regrets.rename_axis("of the tasks").reset_index()
        tables.append(("Regret of the recommended batch size, percent", summary))
        tables.append(("Regret by task, percent", tasks_chosen))
    return tables


def preface() -> str:
    """What made the tables, on what, and how to read them."""
    machine = detect()
    return (
        f"Made by `make accuracy` on {machine.cpu_model} ({machine.cpu_cores} cores), Python "
        f"{platform.python_version()}, numpy {np.__version__}.\n\n{LEGEND}"
    )


def main() -> int:
    """Read the folder, print the tables, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder of published CSVs")
    parser.add_argument("--adaptdl-python", type=Path, help="interpreter that has AdaptDL")
    parser.add_argument("--markdown", type=Path, help="also write the tables there")
    options = parser.parse_args()
    warnings.simplefilter("ignore", tula.errors.TulaWarning)
    tables = report(Published.read(options.data), AdaptDL(options.adaptdl_python))
    for title, frame in tables:
        print(f"\n{title}\n")
        print(frame.to_string(index=False, float_format=lambda x: f"{x:.1f}", na_rep=""))
    if options.markdown:
        page = "\n".join([preface(), *(markdown_section(*table) for table in tables)])
        options.markdown.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
