"""docs/accuracy-generalization.md from finished comparisons: tables, figures and what they say."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlflow_tula.compare import Comparison
from mlflow_tula.comparing.figures import draw_all
from mlflow_tula.comparing.summary import MethodRow, not_worse
from mlflow_tula.comparing.tables import results_table, table_one, words

DOCS = Path(__file__).resolve().parent.parent / "docs"
DOCUMENT = DOCS / "accuracy-generalization.md"
FIGURES = DOCS / "figures"

TARGET = 0.9
FIRST_SEEDS = 5
_CONTROLS = ("plain", "ags_shuffled", "ags_constant", "static_scaling", "constant_scaling")

HEAD = """\
# Large batches and test accuracy

Made by `make accuracy-generalization` from the trainings in benchmarks/results/generalization
(every single one is a line there); only the section "Reading" is written by hand.

## Protocol

- Three real datasets: scikit-learn's digits (1,438 / 359 images), Fashion-MNIST (all 60,000 /
  10,000 images), MNIST-1D (4,000 / 1,000 signals of the PyPI package). Small networks of this
  package: `conv`, `conv_pool` (batch norm), `conv1d`; SGD with momentum 0.9, no weight decay.
- Reference batch 32. Its learning rate is the smallest of 0.005, 0.01, 0.02, 0.05 whose validation
  accuracy is within one standard error of the best. Large batch 512 (16 times), equal epochs.
- Every training, the reference too, has the same schedule under whatever the method does: the rate
  goes down to zero in a straight line.
- Each method's settings are the best of a grid (`mlflow_tula/comparing/grids.py`) on a validation
  split, a fifth of the training data, with seeds of its own. Then five seeds on all training data,
  measured once on the test split. `auto` is not tuned: it is the rule of
  `mlflow_tula.methods.recipe`, which was chosen on these validation splits.
- The gap is the difference in test accuracy between plain training at batch 32 and at batch 512,
  same rate, same epochs. Much of it is under-training, a sixteenth of the steps: so training loss
  stands beside it, and the accuracy at the moment when a method's training loss equals what plain
  large-batch training ends with.
- Accuracies are percent, mean ± standard deviation over seeds; "gap recovered" is mean ± one
  standard error of the method's own seeds.
"""


def write_report(
    found: Mapping[str, Comparison],
    lacking: Mapping[str, Sequence[str]],
    *,
    main: Sequence[str],
) -> None:
    """Write the document and its figures; keeps the hand-written reading that is there."""
    FIGURES.mkdir(parents=True, exist_ok=True)
    main = [name for name in main if name in found]
    reading = _reading()
    parts = [HEAD, "## In one table\n", _overview([found[name] for name in main]), reading]
    for name in main:
        parts.append(_dataset(name, found[name]))
    for name, comparison in found.items():
        if name not in main:
            parts.append(_more(name, comparison))
    with_ags = [found[name] for name in main if set(_CONTROLS) <= set(found[name].plan.methods)]
    if with_ags:
        parts.append(_ags(with_ags))
    if lacking:
        parts.append("## Not run yet\n")
        parts += [f"- {name}: {', '.join(methods)}" for name, methods in lacking.items()]
    DOCUMENT.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")


def _reading() -> str:
    """The hand-written section of the present document."""
    begin, end = "## Reading\n", "\n<!-- end of reading -->\n"
    text = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.exists() else ""
    inside = text.partition(begin)[2].partition(end)[0] if begin in text else "\n(to be written)\n"
    return f"{begin}{inside}{end}"


def _overview(comparisons: Sequence[Comparison]) -> str:
    lines = [
        "| dataset | rate | batch 32 | batch 512, plain | auto | gap recovered % | "
        "AGS recovered % | best rival | rivals ahead of auto by more than one standard error |",
        "|---|--:|--:|--:|--:|--:|--:|---|---|",
    ]
    for comparison in comparisons:
        rows = comparison.rows
        size = max(comparison.plan.batch_sizes)
        by_name = {row.method: row for row in rows if row.batch_size == size}
        auto, ags = by_name["auto"], by_name.get("ags")
        rivals = [row for name, row in by_name.items() if name != "auto"]
        best = max(rivals, key=lambda row: row.mean)
        ahead = [r for r in rivals if not not_worse(auto, r)]
        names = ", ".join(f"{r.method} (+{100 * (r.mean - auto.mean):.2f})" for r in ahead)
        lines.append(
            f"| {comparison.plan.task.dataset} | {comparison.plan.task.learning_rate:g} | "
            f"{_accuracy(rows[0])} | {_accuracy(by_name['plain'])} | {_accuracy(auto)} | "
            f"{_recovered(auto)} | {_recovered(ags)} | {best.method} {_accuracy(best)} | "
            f"{names or 'none'} |"
        )
    return "\n".join(lines) + "\n"


def _dataset(name: str, comparison: Comparison) -> str:
    task = comparison.plan.task
    title = f"{task.dataset}, {task.epochs:g} epochs, {comparison.plan.seeds} seeds"
    stem = f"generalization-{name}"
    _figures(stem, title, comparison)
    return (
        f"## {name}\n\n{task.epochs:g} epochs, reference rate {task.learning_rate:g}, tuned on "
        f"{comparison.plan.tuning_seeds} seed(s) a setting.\n\n{results_table(comparison.rows)}\n\n"
        f"![gap recovered](figures/{stem}-gap_recovered.png)\n"
    )


def _more(name: str, comparison: Comparison) -> str:
    table = results_table(comparison.rows)
    if len(comparison.plan.batch_sizes) > 1:
        stem = "generalization-batch-sizes"
        _figures(stem, name, comparison)
        table = (
            f"The paper's Table I layout: test accuracy, each method at its own best settings.\n\n"
            f"{table_one(comparison.rows)}\n\n"
            f"![accuracy against batch size](figures/{stem}-accuracy_vs_batch.png)"
        )
    elif comparison.plan.budget == "time":
        limit = comparison.outcomes[-1].trial.time_limit_s
        table = (
            f"Every training, the reference too, has the {limit:.2f} process seconds that plain "
            f"training takes for its epochs at batch 512.\n\n{table}"
        )
    elif comparison.plan.seeds > FIRST_SEEDS and "auto" in comparison.plan.methods:
        table = f"{_paired(comparison)}\n\n{table}"
    return f"## {name[0].upper()}{name[1:]}\n\n{table}\n"


def _paired(comparison: Comparison) -> str:
    """`auto` less each rival by seed, over all seeds and over those that came later."""
    rows = {row.method: row for row in comparison.rows[1:]}
    auto = rows["auto"]
    rivals = sorted((r for r in rows.values() if r is not auto), key=lambda row: -row.mean)
    seeds = comparison.plan.seeds
    lines = [
        f"`auto` less each rival, by seed, in points, mean ± standard error. Seeds {FIRST_SEEDS} "
        f"to {seeds - 1} came later: the rivals had been picked, for being close, by the first "
        f"{FIRST_SEEDS}.\n",
        f"| rival | all {seeds} seeds | the later {seeds - FIRST_SEEDS} |",
        "|---|--:|--:|",
    ]
    lines += [
        f"| {rival.method} | {_difference(auto, rival)} | {_difference(auto, rival, FIRST_SEEDS)} |"
        for rival in rivals
    ]
    return "\n".join(lines)


def _figures(stem: str, title: str, comparison: Comparison) -> None:
    for path in draw_all(FIGURES / ".new", title, comparison.rows, comparison.tuning):
        path.replace(FIGURES / f"{stem}-{path.name}")
    (FIGURES / ".new").rmdir()


def _ags(comparisons: Sequence[Comparison]) -> str:
    lines = [
        "## Adaptive gradient scaling and its controls\n",
        "AGS at its own best settings, beside its multipliers at other times (shuffled), their "
        "mean in every step (constant), scaling in every step (static), and the best constant "
        "learning-rate factor. Differences are paired by seed, in points, mean ± standard error.\n",
        "| dataset | AGS | settings | scaled steps | less plain | less shuffled | less constant | "
        "less static | less constant factor |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for comparison in comparisons:
        size = max(comparison.plan.batch_sizes)
        rows = {row.method: row for row in comparison.rows if row.batch_size == size}
        ags = rows["ags"]
        differences = " | ".join(_difference(ags, rows[other]) for other in _CONTROLS)
        lines.append(
            f"| {comparison.plan.task.dataset} | {_accuracy(ags)} | {words(ags.settings)} | "
            f"{100 * (ags.scaled_share or 0):.0f} % | {differences} |"
        )
    lines.append("\nSweeps on the validation splits (the paper's figures 7 and 8):\n")
    for comparison in comparisons:
        stem = f"figures/generalization-{comparison.plan.task.dataset}"
        lines.append(f"![scaling factor]({stem}-ags_scaling_factor.png)")
        lines.append(f"![threshold]({stem}-ags_threshold.png)")
    return "\n".join(lines) + "\n"


def _difference(row: MethodRow, other: MethodRow, first: int = 0) -> str:
    pairs = list(zip(row.accuracies, other.accuracies, strict=True))[first:]
    points = [100 * (a - b) for a, b in pairs]
    error = statistics.stdev(points) / math.sqrt(len(points)) if len(points) > 1 else 0.0
    return f"{statistics.fmean(points):+.2f} ± {error:.2f}"


def _accuracy(row: MethodRow) -> str:
    return f"{100 * row.mean:.2f} ± {100 * row.std:.2f}"


def _recovered(row: MethodRow | None) -> str:
    if row is None or row.recovered is None:
        return ""
    mark = "" if row.recovered >= TARGET else " (below 90)"
    return f"{100 * row.recovered:.0f} ± {100 * (row.recovered_error or 0):.0f}{mark}"
