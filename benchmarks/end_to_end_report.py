"""The tables of benchmarks/end_to_end.py: every run, gains, and when profiling pays for itself."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import click
from end_to_end_facts import LATER, SMALL_BATCH, SOONER, WAYS, Record, Records, Task, disturbed


def spread(rows: Sequence[Record], name: str, form: str = "{:.1f}") -> str:
    """Median and range over seeds."""
    values = [row[name] for row in rows]
    ends = f"{form} - {form}".format(min(values), max(values))
    return f"{form.format(statistics.median(values))} ({ends})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gains:
    """One task: how many times sooner tula's way is, medians over paired seeds; epochs' seconds."""

    over_small: float
    over_largest: float
    largest_reached: bool
    tula_reached: bool
    jobs_until_paid: float | None
    epochs_until_paid: float | None
    first_job: float

    @property
    def over_worse(self) -> float:
        """Over the worse of the two others."""
        return max(self.over_small, self.over_largest)

    @property
    def of_better(self) -> float:
        """Time over that of the better of the two others."""
        return 1.0 / min(self.over_small, self.over_largest)

    @property
    def holds(self) -> bool:
        """Whether both marks are reached."""
        return self.tula_reached and self.over_worse >= SOONER and self.of_better <= LATER


def gains_of(records: Records, task: Task, clock: str) -> Gains:
    """From the seconds that `clock` names."""
    rows = {way: by_seed(records, task, way) for way in WAYS}
    profile = records.find("profile")
    assert profile is not None, "it comes first"

    def ratio(way: str) -> float:
        pairs = zip(rows[way], rows["tula"], strict=True)
        return statistics.median(other[clock] / own[clock] for other, own in pairs)

    def median(value: Callable[[Record], float]) -> tuple[float, float]:
        small, own = (statistics.median(map(value, rows[way])) for way in ("small", "tula"))
        return small, own

    small, own = median(lambda row: float(row[clock]))
    small_epoch, own_epoch = median(lambda row: float(row["training_s"]) / int(row["epochs"]))
    saved = small_epoch - own_epoch
    paid = float(profile["profile_s"])
    return Gains(
        over_small=ratio("small"),
        over_largest=ratio("largest"),
        largest_reached=all(row["reached"] for row in rows["largest"]),
        tula_reached=all(row["reached"] for row in rows["tula"]),
        jobs_until_paid=paid / (small - own) if small > own else None,
        epochs_until_paid=paid / saved if saved > 0 else None,
        first_job=(own + paid) / small,
    )


def by_seed(records: Records, task: Task, way: str) -> list[Record]:
    """The runs of a way; what is missing is named."""
    rows = [records.find("train", way=way, seed=seed) for seed in task.seeds]
    if any(row is None for row in rows) or records.find("profile") is None:
        raise click.ClickException(f"{records.path} lacks runs of {way}: `run` first")
    return [row for row in rows if row is not None]


def section(task: Task, records: Records) -> list[str]:
    """One task of docs/accuracy.md."""
    profile, largest = records.find("profile"), records.find("largest")
    rows = {way: by_seed(records, task, way) for way in WAYS}
    assert profile is not None, "by_seed has looked"
    assert largest is not None, "it comes before the profile"
    lines = [
        f"### {task.name}",
        "",
        f"{task.why} Target {task.target:.0%} on the validation part.",
        "",
        "| way | batch | seed | reached | epochs | updates | seconds, command | "
        "seconds, training | processor seconds | validation % | test % | machine busy otherwise |",
        "|---|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for way in WAYS:
        for row in rows[way]:
            lines.append(
                f"| {way} | {_batch(row)} | {row['seed']} | "
                f"{'yes' if row['reached'] else 'no'} | {row['epochs']} of {row['epochs_planned']} "
                f"| {row['steps']} | {row['command_s']:.1f} | {row['training_s']:.1f} | "
                f"{row['cpu_s']:.1f} | "
                f"{100 * row['validation_accuracy']:.1f} | {100 * row['test_accuracy']:.1f} | "
                f"{disturbed(row):.0%} |"
            )
    lines += [
        "",
        "| medians (range) | seconds, command | seconds, training | epochs | test % |",
        "|---|--:|--:|--:|--:|",
    ]
    for way in WAYS:
        percent = [{**row, "test": 100 * row["test_accuracy"]} for row in rows[way]]
        lines.append(
            f"| {way} | {spread(rows[way], 'command_s')} | {spread(rows[way], 'training_s')} | "
            f"{spread(rows[way], 'epochs', '{:.0f}')} | {spread(percent, 'test')} |"
        )
    return [*lines, "", *verdict(task, records, profile, largest)]


def _batch(row: Record) -> str:
    """The batch, with its ranks where there are several."""
    return f"{row['batch_size']}" + (f" on {row['devices']}" if row["devices"] > 1 else "")


def verdict(task: Task, records: Records, profile: Record, largest: Record) -> list[str]:
    """What it comes to, in sentences."""
    lines = []
    clocks = {
        "command_s": "whole commands",
        "training_s": "training alone",
        "cpu_s": "processor seconds of whole commands",
    }
    for clock, words in clocks.items():
        gains = gains_of(records, task, clock)
        least = "" if gains.largest_reached else "at least "
        lines.append(
            f"- By {words}: {gains.over_small:.2f} times sooner than batch {SMALL_BATCH}, "
            f"{least}{gains.over_largest:.2f} times than the largest batch; {gains.of_better:.2f} "
            f"times the better one's time. The marks ({SOONER:g} times sooner than the worse, at "
            f"most {LATER:g} times the better's time) "
            f"**{'hold' if gains.holds else 'do not hold'}**."
        )
    gains = gains_of(records, task, "command_s")
    paid = "It does not pay for itself here."
    if gains.jobs_until_paid is not None and gains.epochs_until_paid is not None:
        paid = (
            f"It pays for itself after {gains.jobs_until_paid:.1f} such jobs, or "
            f"{gains.epochs_until_paid:.0f} epochs, against batch {SMALL_BATCH}."
        )
    lines.append(
        f"- Profiling (`tula main`, once): {profile['profile_s']:.0f} s; the choice was "
        f"{_batch(profile)}. {paid} The first job, profiling included, takes "
        f"{gains.first_job:.2f} times as long as with batch {SMALL_BATCH}. From the second on "
        f"the question to the registry is part of the command (`tula recommend` alone: "
        f"{profile['recommend_s']:.1f} s)."
    )
    peaks = ", ".join(
        f"{size}: {peak / 2**30:.2f}" for size, peak in largest["peak_memory_bytes"].items()
    )
    lines.append(f"- Peak memory of plain training, GiB: {peaks}; the limit is 2.")
    return lines


def gains_table(tasks: Sequence[tuple[Task, Records]]) -> str:
    """The short table of the README."""
    lines = [
        "| task | batch 32, plain | largest batch, plain | tula's batch, its recipe | sooner than "
        "the worse | of the better's time | profiling |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for task, records in tasks:
        gains = gains_of(records, task, "command_s")
        cells = []
        for way in WAYS:
            rows = by_seed(records, task, way)
            seconds = statistics.median(row["command_s"] for row in rows)
            reached = all(row["reached"] for row in rows)
            size = "" if way == "small" else f" ({_batch(rows[0])})"
            cells.append(f"{'' if reached else 'not in '}{seconds:.0f} s{size}")
        profile = records.find("profile")
        assert profile is not None, "checked before"
        least = "" if gains.largest_reached else "at least "
        name = {"fashion_mnist": "LeNet-5, Fashion-MNIST", "digits": "ResNet18, digits"}
        lines.append(
            f"| {name.get(task.name, task.name)} to {task.target:.0%} | {' | '.join(cells)} | "
            f"{least}{gains.over_worse:.1f} times | {gains.of_better:.2f} | "
            f"{profile['profile_s']:.0f} s once |"
        )
    return "\n".join(lines) + "\n"
