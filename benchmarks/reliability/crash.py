"""SIGINT, SIGTERM and SIGKILL at random moments of `main`, `profile`, `train` and `register`.

    python benchmarks/reliability/crash.py [--count 25] [--workers 2] [--seed 0] [--short]

Each injection has a folder of its own. The command is killed at a moment drawn from its whole
life (as an undisturbed run of it took), and then: it has ended; nothing of it still runs; what it
had reported as measured is on disk; every registered version loads and predicts; a checkpoint is
whole, or the one before it is; `tula doctor --fix` leaves no run RUNNING; and the same command
again ends well, goes on from what was kept, in the same MLflow run, and leaves nothing half done.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from checks import Look, empty_store, look, open_runs, top_runs
from commands import COMMANDS, Command, Ended, finished_epochs, finished_probes, made_up_bundle, run
from facts import Outcome, Recorder

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
_HANG_S = 90.0
_MOST_TRIES = 4
_CODES = {
    signal.SIGINT: {130, -signal.SIGINT, 0},
    signal.SIGTERM: {143, -signal.SIGTERM, 0},
    signal.SIGKILL: {-signal.SIGKILL, 0},
}
"""What a shell sees; 0 where the work was done before the signal had its effect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Injection:
    """One kill: which command, which signal, and after which fraction of its life."""

    number: int
    command: str
    signal: int
    moment: float
    life_s: float
    template: str

    @property
    def case(self) -> str:
        """The row of the table."""
        return f"{self.command}, {signal.Signals(self.signal).name}"


def prepare(folder: Path) -> dict[str, float]:
    """Undisturbed runs: how long each command lives; `folder` then has what `register` needs."""
    lives = {}
    folder.mkdir(parents=True)
    empty_store(folder)
    for name in ("profile", "train", "main"):
        place = folder / name
        place.mkdir()
        shutil.copy(folder / "mlflow.db", place)
        done = run(COMMANDS[name], place)
        if done.code != 0:
            raise SystemExit(f"tula {name} fails by itself: {done.err[-2000:]}")
        lives[name] = done.seconds
    # A registered version, and a bundle that is not registered yet.
    ready = folder / "register"
    shutil.copytree(folder / "profile", ready)
    fitted = run(("fit", *COMMANDS["register"][1:]), ready)
    trial = folder / "register-trial"
    shutil.copytree(ready, trial)
    done = run(COMMANDS["register"], trial)
    if fitted.code or done.code:
        raise SystemExit(f"tula register fails by itself: {fitted.err} {done.err}")
    lives["register"] = done.seconds
    return lives


def make_place(plan: Injection, place: Path) -> None:
    """The folder that a command is started in, as if nothing had happened."""
    shutil.rmtree(place, ignore_errors=True)
    if plan.command == "register":
        shutil.copytree(Path(plan.template) / "register", place)
        return
    place.mkdir(parents=True)
    # MLflow takes seconds to make a store: every fifth time the kill may come in there.
    if plan.number % 5:
        shutil.copy(Path(plan.template) / "mlflow.db", place)


def assume(folder: Path) -> dict[str, float]:
    """As `prepare` without its minute: lives that are guessed, a table that is made up."""
    folder.mkdir(parents=True)
    empty_store(folder)
    ready = folder / "register"
    ready.mkdir()
    shutil.copy(folder / "mlflow.db", ready)
    made_up_bundle(ready)
    return {"main": 10.0, "profile": 10.0, "train": 9.0, "register": 6.0}


def inject(plan: Injection, folder: Path) -> Outcome:
    """One kill and everything that must hold after it."""
    place = folder / f"{plan.command}-{plan.number}"
    make_place(plan, place)
    with slot():
        faults = list(_inject(plan, place))
    if not faults:
        shutil.rmtree(place, ignore_errors=True)
    at = f"#{plan.number} at {plan.moment:.0%}"
    return Outcome(
        part="crash",
        case=plan.case,
        injected=1,
        survived=int(not faults),
        lost=int(bool(faults)),
        detail=f"{at}: {'; '.join(faults)}" if faults else at,
    )


def _inject(plan: Injection, place: Path) -> Iterator[str]:
    command, ended = _killed(plan, place)
    # Ctrl-C before the first line of ours: Python's own exit code
    early = plan.signal == signal.SIGINT and ended.code == 1 and "/mlflow_tula/" not in ended.err
    if ended.code not in _CODES[signal.Signals(plan.signal)] and not early:
        yield f"exit code {ended.code}: {ended.err.strip()[-300:]}"
    if left := command.orphans():
        yield f"orphans: {left}"
    # Python itself may be interrupted while it imports, before there is anybody to catch it.
    if ended.has_traceback and plan.signal != signal.SIGINT:
        yield f"a traceback: {ended.err.strip()[-300:]}"
    left = [one.name for one in (place / "tmp").iterdir() if "inductor" not in one.name]
    if plan.signal != signal.SIGKILL and ended.code > 0 and left:
        yield f"left in the temporary folder: {left}"
    before = look(place)
    yield from before.faults
    yield from _kept(plan.command, ended, before)
    still = open_runs(place)
    if still:
        yield f"RUNNING after `tula doctor --fix`: {still}"
    runs = top_runs(place)
    again = run(COMMANDS[plan.command], place)
    if again.code != 0 or again.has_traceback:
        yield f"the same command again: exit code {again.code}: {again.err.strip()[-300:]}"
        return
    after = look(place)
    yield from after.faults
    yield from _gone_on(plan.command, ended, before, again, after)
    broken_off = {name for name, status in runs.items() if status != "FINISHED"}
    anew = len(top_runs(place)) - len(runs)
    if plan.command != "register" and broken_off and anew:
        yield f"{anew} new runs beside the {len(broken_off)} that were broken off"
    if still := open_runs(place, fix=False):
        yield f"RUNNING at the end: {still}"
    if after.strays:
        yield f"stray files: {after.strays}"


def _killed(plan: Injection, place: Path) -> tuple[Command, Ended]:
    """The command after its signal; one that was done before is begun again, for a shorter time.

    Its life is longer on a busy machine, and shorter on an idle one.
    """
    wait_s = plan.moment * plan.life_s
    for number in range(_MOST_TRIES):
        command = Command(COMMANDS[plan.command], place)
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.process.wait(wait_s)
        if command.signal(plan.signal) or number == _MOST_TRIES - 1:
            break
        wait_s *= 0.7
        command.wait()
        make_place(plan, place)
    return command, command.wait(_HANG_S)


def _kept(command: str, ended: Ended, found: Look) -> Iterator[str]:
    """What was reported as done before the kill is on disk."""
    lost = set(finished_probes(ended.err)) - set(found.probes)
    if lost:
        yield f"measured, but not kept: {sorted(lost)}"
    epochs = finished_epochs(ended.err)
    # The last epoch's checkpoint may be the one that was being written.
    if command == "train" and len(epochs) > 1 and found.epoch < epochs[-1] - 1:
        yield f"epoch {epochs[-1]} was reported, and the checkpoint is of epoch {found.epoch}"


def _gone_on(command: str, ended: Ended, before: Look, again: Ended, after: Look) -> Iterator[str]:
    """The second start does not do again what was kept, and comes to the end."""
    if command in ("main", "profile") and ended.code != 0:
        repeated = set(finished_probes(again.err)) & set(before.probes)
        if repeated:
            yield f"measured again: {sorted(repeated)}"
        changed = [key for key, row in before.probes.items() if after.probes.get(key) != row]
        if changed:
            yield f"rows changed: {changed}"
    if command == "train":
        epochs = finished_epochs(again.err)
        if epochs and epochs[0] <= before.epoch:
            yield f"epoch {epochs[0]} was trained again, the checkpoint is of {before.epoch}"
        if after.epoch != 25:
            yield f"the training ended at epoch {after.epoch}"
    if command in ("main", "register") and not (after.versions and after.champion):
        yield f"versions {after.versions}, champion {after.champion}"
    if after.versions > before.versions + 1:
        yield f"{after.versions - before.versions} versions came of one command"


@contextlib.contextmanager
def slot() -> Iterator[None]:
    """Where one injection begins and ends; for those who share a machine to wait in."""
    yield


def plans(
    count: int, names: list[str], seed: int, lives: dict[str, float], template: Path
) -> list[Injection]:
    """`count` moments of each command, spread over its whole life, the signals in turn."""
    draw, made = random.Random(seed), []
    for name in names:
        for number in range(count):
            made.append(
                Injection(
                    number=number,
                    command=name,
                    signal=SIGNALS[(number + names.index(name)) % len(SIGNALS)],
                    moment=(number + draw.random()) / count,
                    life_s=lives[name],
                    template=str(template),
                )
            )
    draw.shuffle(made)
    return made


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=25, help="Injections a command.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true", help="One injection a command.")
    parser.add_argument("--commands", default=",".join(COMMANDS))
    parser.add_argument("--folder", type=Path, help="Work here, and keep what failed.")
    parser.add_argument("--results", type=Path, help="Where to write; build/reliability.")
    arguments = parser.parse_args()
    count = 1 if arguments.short else arguments.count
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="tula-crash-"))
    with Recorder(
        "crash", short=arguments.short, seed=arguments.seed, folder=arguments.results
    ) as record:
        with slot():
            ready = assume if arguments.short else prepare
            lives = ready(folder / "template")
        print(json.dumps({name: round(life, 1) for name, life in lives.items()}), flush=True)
        todo = plans(
            count, arguments.commands.split(","), arguments.seed, lives, folder / "template"
        )
        with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
            jobs = [pool.submit(inject, plan, folder) for plan in todo]
            for number, job in enumerate(as_completed(jobs), start=1):
                outcome = job.result()
                record(outcome)
                print(f"{number}/{len(jobs)} {outcome.case} {outcome.detail}", flush=True)
    if arguments.folder is None and not record.lost:
        shutil.rmtree(folder, ignore_errors=True)
    return record.exit_code


if __name__ == "__main__":
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    sys.exit(main())
