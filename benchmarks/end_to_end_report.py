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


QUIET = 0.2
"""Share of the machine used by something else beyond which wall seconds are not compared."""


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
    """The runs of a way, of the seeds that every way has; without any, what is missing is named."""
    found = {
        one: {seed: records.find("train", way=one, seed=seed) for seed in task.seeds}
        for one in WAYS
    }
    seeds = [seed for seed in task.seeds if all(rows[seed] for rows in found.values())]
    if not seeds or records.find("profile") is None:
        lacking = next((one for one in WAYS if not any(found[one].values())), way)
        raise click.ClickException(f"{records.path} lacks runs of {lacking}: `run` first")
    return [row for seed in seeds if (row := found[way][seed]) is not None]


def busiest(records: Records, task: Task) -> float:
    """The largest share of the machine that something else took beside a run."""
    return max(disturbed(row) for way in WAYS for row in by_seed(records, task, way))


def clock_of(records: Records, task: Task) -> str:
    """Seconds of the whole command, or of the processors where the machine was busy."""
    return "cpu_s" if busiest(records, task) > QUIET else "command_s"


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
    measured = len(by_seed(records, task, "tula"))
    if measured < len(task.seeds):
        lines.append(
            f"- **{measured} of {len(task.seeds)} seeds** have been run in all three ways."
        )
    busy = busiest(records, task)
    if busy > QUIET:
        clocks = {"cpu_s": clocks["cpu_s"]}
        lines.append(
            f"- **Wall seconds cannot be compared**: other work took up to {busy:.0%} of the "
            "machine meanwhile. Processor seconds can, within some 20 %."
        )
    for clock, words in clocks.items():
        gains = gains_of(records, task, clock)
        least = "" if gains.largest_reached else "at least "
        lines.append(
            f"- By {words}: {gains.over_small:.2f} times sooner than batch {SMALL_BATCH}, "
            f"{least}{gains.over_largest:.2f} times than the largest batch; {gains.of_better:.2f} "
            f"times the better one's time. The marks ({SOONER:g} times sooner than the worse, at "
            f"most {LATER:g} times the better's time) "
            f"**{'hold' if gains.holds else 'do not hold'}** by this clock"
            f"{'' if measured == len(task.seeds) else ', on these seeds alone'}."
        )
    choice = f"- Profiling (`tula main`, once): {profile['profile_s']:.0f} s; the choice was "
    choice += f"{_batch(profile)}{_noted(profile)}. "
    if busy > QUIET:
        lines.append(f"{choice}When it pays for itself takes an idle machine to say: not measured.")
    else:
        lines.append(choice + _payment(gains_of(records, task, "command_s"), profile))
    peaks = ", ".join(
        f"{size}: {peak / 2**30:.2f}" for size, peak in largest["peak_memory_bytes"].items()
    )
    lines.append(f"- Peak memory of plain training, GiB: {peaks}; the limit is 2.")
    return lines


def _noted(profile: Record) -> str:
    """How the decision came about, where that was not one command."""
    return f" ({profile['note']})" if profile.get("note") else ""


def _payment(gains: Gains, profile: Record) -> str:
    """After how many jobs and epochs profiling has paid for itself."""
    paid = "It does not pay for itself here."
    if gains.jobs_until_paid is not None and gains.epochs_until_paid is not None:
        paid = (
            f"It pays for itself after {gains.jobs_until_paid:.1f} such jobs, or "
            f"{gains.epochs_until_paid:.0f} epochs, against batch {SMALL_BATCH}."
        )
    return (
        f"{paid} The first job, profiling included, takes {gains.first_job:.2f} times as long as "
        f"with batch {SMALL_BATCH}. From the second on the question to the registry is part of "
        f"the command (`tula recommend` alone: {profile['recommend_s']:.1f} s)."
    )


def gains_table(tasks: Sequence[tuple[Task, Records]]) -> str:
    """The short table of the README."""
    lines = [
        "| task | batch 32, plain | largest batch, plain | tula's batch, its recipe | sooner than "
        "the worse | of the better's time | profiling |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for task, records in tasks:
        clock = clock_of(records, task)
        unit = "s" if clock == "command_s" else "processor s"
        gains = gains_of(records, task, clock)
        cells = []
        for way in WAYS:
            rows = by_seed(records, task, way)
            seconds = statistics.median(row[clock] for row in rows)
            reached = all(row["reached"] for row in rows)
            size = "" if way == "small" else f" ({_batch(rows[0])})"
            cells.append(f"{'' if reached else 'not in '}{seconds:.0f} {unit}{size}")
        profile = records.find("profile")
        assert profile is not None, "checked before"
        least = "" if gains.largest_reached else "at least "
        measured, wanted = len(by_seed(records, task, "tula")), len(task.seeds)
        seeds = "" if measured == wanted else f" ({measured} of {wanted} seeds)"
        name = {"fashion_mnist": "LeNet-5, Fashion-MNIST", "digits": "ResNet18, digits"}
        title = f"{name.get(task.name, task.name)} to {task.target:.0%}{seeds}"
        lines.append(
            f"| {title} | {' | '.join(cells)} | "
            f"{least}{gains.over_worse:.1f} times | {gains.of_better:.2f} | "
            f"{profile['profile_s']:.0f} s once |"
        )
    return "\n".join(lines) + "\n"
