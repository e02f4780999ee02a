"""What stores and disks do to a command: races, deaths, full and read-only disks, old schemas.

    python benchmarks/reliability/stores.py [--short] [--only NAME,...]

Every case is a real command on a real store. Those that need root or PostgreSQL are left out, with
a line that says so, where there is none.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import mlflow
from checks import look
from commands import MODEL, PROBES, Command, finished_probes, run
from facts import Outcome, Recorder
from mlflow import MlflowClient
from servers import (
    POSTGRES,
    Server,
    fill,
    may_mount,
    old_store,
    postgresql,
    read_only,
    small_disk,
)
from verdicts import MOST_STALL_S, complete, one_line, refused, wait_for, well

PROFILE = ("profile", *MODEL, *PROBES, "--world-sizes", "1")
MAIN = ("main", *PROFILE[1:])
SLOW = ("--model", "small:make_slow", "--dataset-size", "512", "--max-steps", "10")
SLOW_PROFILE = ("profile", *SLOW, "--batch-sizes", "8,16,32,64,128", "--world-sizes", "1")
TRAIN = ("train", *SLOW[:4], "--batch-size", "32", "--train-epochs", "3")
TABLE = "local_batch_size,step_time_s\n8,0.011\n16,0.012\n32,0.017\n64,0.033\n128,0.064\n"

Case = Callable[[Path], Iterator[str]]


def eight_on_an_empty_folder(place: Path) -> Iterator[str]:
    """Eight `tula import` at once, no store yet: four predictors of their own, four of one."""
    yield from _race(place, "sqlite:///mlflow.db")


def eight_on_an_empty_database(place: Path) -> Iterator[str]:
    """The same on a PostgreSQL database without tables."""
    with postgresql() as uri:
        yield from _race(place, uri)


def _race(place: Path, uri: str) -> Iterator[str]:
    (place / "table.csv").write_text(TABLE)
    started = []
    for number in range(8):
        name = f"net{number}" if number < 4 else "shared"
        folder = place / f"process{number}"
        folder.mkdir()
        words = ["import", str(place / "table.csv"), "--model", name, "--dataset", "digits"]
        words += ["--dataset-size", "1000", "--hardware", "Some GPU", "--device-memory", "16GiB"]
        here = uri.replace("sqlite:///", f"sqlite:///{place}/")
        started.append(Command(words, folder, environment={"MLFLOW_TRACKING_URI": here}))
    for number, command in enumerate(started):
        done = command.wait()
        if done.code != 0 or done.has_traceback:
            yield f"process {number}: exit code {done.code}: {done.err.strip()[-300:]}"
    mlflow.set_tracking_uri(uri.replace("sqlite:///", f"sqlite:///{place}/"))
    client = MlflowClient()
    names = sorted(model.name.split(".")[1] for model in client.search_registered_models())
    # the recommender is registered with the first predictor
    if names != ["net0", "net1", "net2", "net3", "recommender", "shared"]:
        yield f"registered: {names}"
    for model in client.search_registered_models():
        if "champion" not in model.aliases:
            yield f"{model.name} has no champion"
        for version in client.search_model_versions(f"name = '{model.name}'"):
            mlflow.pyfunc.load_model(f"models:/{model.name}/{version.version}")


def whole_job_on_postgresql(place: Path) -> Iterator[str]:
    """`tula main`, `recommend`, `train` and `doctor` on PostgreSQL; its password is never shown."""
    with postgresql() as uri:
        there = {"MLFLOW_TRACKING_URI": uri}
        for words in (MAIN, ("recommend", *MODEL), (*TRAIN[:1], *MODEL, *TRAIN[5:]), ("doctor",)):
            done = run(words, place, environment=there)
            if done.code != 0 or done.has_traceback:
                yield f"tula {words[0]}: exit code {done.code}: {done.err.strip()[-300:]}"
            if "hunter2" in done.out + done.err:
                yield f"tula {words[0]} shows the password"


def server_dies_in_a_profile(place: Path) -> Iterator[str]:
    """The server is killed after the first probe and never comes back; `tula sync` afterwards."""
    yield from _dies_and_is_told_later(place, SLOW_PROFILE, "batch 8 on")


def server_dies_in_a_training(place: Path) -> Iterator[str]:
    """The same in a training; its values are sent later."""
    yield from _dies_and_is_told_later(place, TRAIN, "epoch   1:")


def _dies_and_is_told_later(place: Path, words: tuple[str, ...], sign: str) -> Iterator[str]:
    with Server(place / "server") as server:
        there = {"MLFLOW_TRACKING_URI": server.uri}
        command = Command(words, place, environment=there)
        wait_for(command, sign)
        server.kill()
        done = command.wait()
        yield from well(done, 0)
        if "tula sync" not in done.err:
            yield f"no word of `tula sync`: {done.err.strip()[-300:]}"
        server.start()
        told = run(("sync",), place, environment=there)
        yield from well(told, 0)
        yield from complete(server.uri, words[0], done)


def server_comes_back_in_a_profile(place: Path) -> Iterator[str]:
    """The server is killed after the first probe, and is there again before the last."""
    with Server(place / "server") as server:
        command = Command(SLOW_PROFILE, place, environment={"MLFLOW_TRACKING_URI": server.uri})
        wait_for(command, "batch 8 on")
        server.kill()
        server.start()
        done = command.wait()
        yield from well(done, 0)
        yield from complete(server.uri, "profile", done)
        if list((place / "tula_output").rglob("operations.jsonl")):
            yield "something still waits"


def server_hangs_in_a_profile(place: Path) -> Iterator[str]:
    """The server is stopped in its tracks (SIGSTOP): the work does not stall for minutes."""
    with Server(place / "server") as server:
        there = {"MLFLOW_TRACKING_URI": server.uri}
        usual = run(SLOW_PROFILE, place, environment=there)
        command = Command(SLOW_PROFILE, place, environment=there)
        wait_for(command, "batch 8 on")
        server.signal(signal.SIGSTOP)
        done = command.wait()
        server.signal(signal.SIGCONT)
        yield from well(done, 0)
        if done.seconds > usual.seconds + MOST_STALL_S:
            yield f"{done.seconds:.0f} s, {usual.seconds:.0f} s with a server"
        yield from well(run(("sync",), place, environment=there), 0)
        yield from complete(server.uri, "profile", done)


def server_is_gone_when_main_registers(place: Path) -> Iterator[str]:
    """`main` decides without the registry, exits 1, and registers when it is started again."""
    slow_main = ("main", *SLOW_PROFILE[1:])
    with Server(place / "server") as server:
        there = {"MLFLOW_TRACKING_URI": server.uri}
        command = Command(slow_main, place, environment=there)
        wait_for(command, "batch 8 on")
        server.kill()
        done = command.wait()
        yield from well(done, 1)
        if "choice: global batch size" not in done.out:
            yield "no decision was printed"
        server.start()
        again = run(slow_main, place, environment=there)
        yield from well(again, 0)
        if finished_probes(again.err):
            yield f"measured again: {finished_probes(again.err)}"
        yield from complete(server.uri, "main", done)
        mlflow.set_tracking_uri(server.uri)
        names = [model.name for model in MlflowClient().search_registered_models()]
        others = ("tula.recommender", "tula.link.", "tula.anymodel.")
        if len([name for name in names if not name.startswith(others)]) != 1:
            yield f"registered: {names}"


def server_is_dead_from_the_start(place: Path) -> Iterator[str]:
    """One line within seconds, and nothing was started."""
    done = run(PROFILE, place, environment={"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"})
    yield from refused(done, "does not answer", place)


def output_is_full_at_once(place: Path) -> Iterator[str]:
    """No room for the first row."""
    with small_disk(place / "tula_output", 1) as disk:
        fill(disk)
        done = run(PROFILE, place)
        yield from well(done, 1, 2)
        yield from one_line(done, "No space left")


def output_fills_in_a_profile(place: Path) -> Iterator[str]:
    """The disk of the table fills up after the first probe: its row is kept."""
    with small_disk(place / "tula_output", 1) as disk:
        command = Command(SLOW_PROFILE, place)
        wait_for(command, "batch 8 on")
        fill(disk)
        done = command.wait()
        yield from well(done, 1)
        yield from one_line(done, "No space left")
        found = look(place)
        yield from found.faults
        if not found.probes:
            yield "no row was kept"
        (disk / "ballast").unlink()
        again = run(SLOW_PROFILE, place)
        yield from well(again, 0)
        if (8, 1) in finished_probes(again.err):
            yield "batch 8 was measured again"


def output_fills_in_a_training(place: Path) -> Iterator[str]:
    """The disk of the checkpoints fills up after the first epoch: it is kept, and resumed from."""
    with small_disk(place / "tula_output", 8) as disk:
        command = Command(TRAIN, place)
        wait_for(command, "epoch   1:")
        fill(disk)
        done = command.wait()
        yield from well(done, 1)
        yield from one_line(done, "cannot write the checkpoint")
        found = look(place)
        yield from found.faults
        (disk / "ballast").unlink()
        yield from well(run(TRAIN, place), 0)


def store_fills_in_a_profile(place: Path) -> Iterator[str]:
    """The disk of mlflow.db fills up after the first probe: the table is whole."""
    with small_disk(place / "store", 4) as disk:
        there = {"MLFLOW_TRACKING_URI": f"sqlite:///{disk}/mlflow.db"}
        command = Command(SLOW_PROFILE, place, environment=there)
        wait_for(command, "batch 8 on")
        fill(disk)
        done = command.wait()
        yield from well(done, 1)
        yield from one_line(done, "full")
        if len(look(place).probes) != 5:
            yield f"{len(look(place).probes)} of 5 rows were kept"
        (disk / "ballast").unlink()
        again = run(SLOW_PROFILE, place, environment=there)
        yield from well(again, 0)
        if finished_probes(again.err):
            yield "measured again"


def store_is_full_at_once(place: Path) -> Iterator[str]:
    """No room for a new mlflow.db."""
    with small_disk(place / "store", 1) as disk:
        fill(disk)
        there = {"MLFLOW_TRACKING_URI": f"sqlite:///{disk}/mlflow.db"}
        done = run(PROFILE, place, environment=there)
        yield from well(done, 2)
        yield from one_line(done, "mlflow.db")


def output_is_read_only(place: Path) -> Iterator[str]:
    """One line, and no run is left behind."""
    for words in (PROFILE, MAIN, TRAIN):
        with read_only(place / "tula_output"):
            done = run(words, place)
            yield from refused(done, "Read-only", place)


def output_cannot_be(place: Path) -> Iterator[str]:
    """`--output-dir /proc/x` is refused before a run is made."""
    for words in (PROFILE, MAIN, TRAIN):
        done = run((*words, "--output-dir", "/proc/x"), place)
        yield from refused(done, "/proc", place)


def store_is_read_only(place: Path) -> Iterator[str]:
    """A store that can be read alone: refused for work, enough to ask."""
    (place / "table.csv").write_text(TABLE)
    folder = place / "store"
    folder.mkdir()
    there = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
    words = ["import", str(place / "table.csv"), "--model", "net", "--dataset", "digits"]
    words += ["--dataset-size", "1000", "--hardware", "Some GPU", "--device-memory", "16GiB"]
    yield from well(run(words, place, environment=there), 0)
    with read_only(folder):
        done = run(PROFILE, place, environment=there)
        yield from well(done, 2)
        yield from one_line(done, "readonly")
        yield from well(run(("registry", "list"), place, environment=there), 0)


def store_of_an_older_schema(place: Path) -> Iterator[str]:
    """MLflow's older tables: one line that names `mlflow db upgrade`, from the doctor as well."""
    for steps_back in (1, 5, 20):
        (place / "mlflow.db").unlink(missing_ok=True)
        old_store(place / "mlflow.db", steps_back)
        before = (place / "mlflow.db").read_bytes()
        done = run(PROFILE, place)
        yield from well(done, 2)
        yield from one_line(done, "mlflow db upgrade sqlite:///")
        doctor = run(("doctor",), place)
        if doctor.code != 1 or "mlflow db upgrade sqlite:///" not in doctor.out:
            yield f"doctor: exit code {doctor.code}: {doctor.out[-300:]}"
        if (place / "mlflow.db").read_bytes() != before:
            yield "the store was changed"


MOUNTING = (
    output_is_full_at_once,
    output_fills_in_a_profile,
    output_fills_in_a_training,
    store_fills_in_a_profile,
    store_is_full_at_once,
    output_is_read_only,
    store_is_read_only,
)
POSTGRESQL = (eight_on_an_empty_database, whole_job_on_postgresql)
CASES: tuple[Case, ...] = (
    eight_on_an_empty_folder,
    server_dies_in_a_profile,
    server_dies_in_a_training,
    server_comes_back_in_a_profile,
    server_hangs_in_a_profile,
    server_is_gone_when_main_registers,
    server_is_dead_from_the_start,
    output_cannot_be,
    store_of_an_older_schema,
    *MOUNTING,
    *POSTGRESQL,
)
SHORT = (
    eight_on_an_empty_folder,
    server_dies_in_a_profile,
    store_of_an_older_schema,
    output_fills_in_a_profile,
    output_is_read_only,
)


@contextlib.contextmanager
def slot() -> Iterator[None]:
    """Where one case begins and ends; for those who share a machine to wait in."""
    yield


def missing(case: Case, *, mounts: bool) -> str:
    """Why a case cannot be tried here, or nothing."""
    if case in MOUNTING and not mounts:
        return "needs root"
    if case in POSTGRESQL and not POSTGRES:
        return "needs PostgreSQL's server"
    return ""


def main() -> int:
    """Try each case in a folder of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="Five cases.")
    parser.add_argument("--repeats", type=int, default=3, help="So often each case.")
    parser.add_argument("--only", default="")
    parser.add_argument("--results", type=Path, help="Where to write; build/reliability.")
    arguments = parser.parse_args()
    wanted = {name for name in arguments.only.split(",") if name}
    cases = list(SHORT if arguments.short else CASES)
    if wanted:
        cases = [one for one in CASES if one.__name__ in wanted]
    mounts = may_mount()
    with Recorder("stores", short=arguments.short, folder=arguments.results) as record:
        for case in cases:
            name = case.__name__.replace("_", " ")
            if reason := missing(case, mounts=mounts):
                print(f"left out: {name} ({reason})", flush=True)
                continue
            for _ in range(1 if arguments.short else arguments.repeats):
                with slot():
                    record(_tried(case, name))
    return record.exit_code


def _tried(case: Case, name: str) -> Outcome:
    place, began = Path(tempfile.mkdtemp(prefix="tula-stores-")), time.monotonic()
    try:
        faults = list(case(place))
    except Exception as error:
        faults = [f"{type(error).__name__}: {error}"[:300]]
    if not faults:
        shutil.rmtree(place, ignore_errors=True)
    took = time.monotonic() - began
    print(f"{name}: {'; '.join(faults) or 'survived'} ({took:.0f} s, {place})", flush=True)
    return Outcome(
        part="stores",
        case=name,
        survived=int(not faults),
        lost=int(bool(faults)),
        detail="; ".join(faults),
    )


if __name__ == "__main__":
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    sys.exit(main())
