"""Real `tula` commands in folders of their own: started, killed, and looked for afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
MARK = "TULA_CAMPAIGN_MARK"
MODEL = ("--model", "small:make", "--dataset-size", "512")
PROBES = ("--batch-sizes", "8,16,32,64,128", "--max-steps", "10")
COMMANDS: dict[str, tuple[str, ...]] = {
    "main": ("main", *MODEL, *PROBES, "--world-sizes", "1"),
    "profile": ("profile", *MODEL, *PROBES, "--world-sizes", "2"),
    "train": ("train", *MODEL, "--batch-size", "32", "--devices", "2", "--train-epochs", "25"),
    "register": ("register", *MODEL),
}
"""Each lives some ten seconds, of which a good part is work."""


@dataclass(kw_only=True)
class Ended:
    """How a command ended."""

    code: int
    seconds: float
    out: str
    err: str
    was_alive: bool = True

    @property
    def has_traceback(self) -> bool:
        """A stack trace in front of a person."""
        return "Traceback (most recent call last)" in self.err


class Command:
    """One `tula` command in a folder, with a mark that every process below it inherits."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it, in a session of its own."""
        self.mark, self.folder = uuid.uuid4().hex, folder
        scratch = folder / "tmp"
        scratch.mkdir(parents=True, exist_ok=True)
        variables = {name: text for name, text in os.environ.items() if "MLFLOW" not in name}
        variables |= {
            MARK: self.mark,
            "TMPDIR": str(scratch),
            "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
            **(environment or {}),
        }
        self._out = (folder / "out.txt").open("w+b")
        self._err = (folder / "err.txt").open("w+b")
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlflow_tula", *arguments],
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )

    def signal(self, number: int) -> bool:
        """Send a signal as a person would: Ctrl-C to the whole group; whether it still ran."""
        if self.process.poll() is not None:
            return False
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGINT:
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)
        return True

    def wait(self, timeout_s: float = 600.0) -> Ended:
        """Its end; one that hangs is killed and has the code 999."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = 999
            for process in self.processes():
                with contextlib.suppress(psutil.Error):
                    process.kill()
            self.process.wait()
        took = time.monotonic() - self.began
        texts = []
        for stream in (self._out, self._err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
            stream.close()
        return Ended(code=code, seconds=took, out=texts[0], err=texts[1])

    def processes(self) -> list[psutil.Process]:
        """Whatever still runs and has inherited the mark."""
        return marked(self.mark)

    def orphans(self, patience_s: float = 20.0) -> list[str]:
        """What still runs when the command has ended, after some patience; it is killed."""
        deadline = time.monotonic() + patience_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        names = []
        for process in left:
            with contextlib.suppress(psutil.Error):
                names.append(" ".join(process.cmdline())[:120])
                process.kill()
        return names


def marked(mark: str) -> list[psutil.Process]:
    """Live processes with this mark in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def run(arguments: Sequence[str], folder: Path, **more: Mapping[str, str]) -> Ended:
    """Start a command and wait for its end."""
    return Command(arguments, folder, **more).wait()


def finished_probes(text: str) -> list[tuple[int, int]]:
    """(local batch size, ranks) of the probes that progress lines on stderr report."""
    lines = re.findall(r"^batch (\d+) on (\d+) ranks?: (?!oom|failed)", text, re.MULTILINE)
    return [(int(size), int(ranks)) for size, ranks in lines]


def finished_epochs(text: str) -> list[int]:
    """Epochs that progress lines on stderr report."""
    return [int(number) for number in re.findall(r"^epoch +(\d+): train", text, re.MULTILINE)]


def made_up_bundle(folder: Path) -> None:
    """What `tula profile` and `tula fit` would have left in a folder, from numbers of our own."""
    import pandas as pd

    import mlflow_tula as tula
    from mlflow_tula.files import write_json
    from mlflow_tula.hardware import detect
    from mlflow_tula.workloads.describe import describe
    from mlflow_tula.workloads.job import Job

    if str(HERE) not in sys.path:
        sys.path.append(str(HERE))
    workload, hardware = describe(Job(model=MODEL[1], dataset_size=int(MODEL[3]))), detect()
    rows = {
        "local_batch_size": [8, 16, 32, 64, 128],
        "step_time_s": [2e-3, 3e-3, 5e-3, 9e-3, 17e-3],
    }
    table = tula.ProfileTable.from_frame(pd.DataFrame(rows), workload=workload, hardware=hardware)
    place = folder / "tula_output" / f"{workload.slug}.{hardware.slug}"
    write_json(place / "table.json", table.to_dict())
    write_json(place / "bundle.json", tula.fit(table).to_dict())
