"""Real stores to do something to: `mlflow server`, PostgreSQL, small and read-only disks."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
from commands import MARK, marked

POSTGRES = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """An `mlflow server` on a sqlite file; it can be killed, stopped in its tracks, restarted."""

    def __init__(self, folder: Path, port: int | None = None) -> None:
        """Nothing is started yet."""
        self.folder, self.port = folder, port or free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.mark = ""
        folder.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        """Start it, and return when it answers."""
        self.mark = uuid.uuid4().hex
        log = (self.folder / "server.log").open("ab")
        where = ["--backend-store-uri", f"sqlite:///{self.folder}/server.db"]
        where += ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        where += ["--artifacts-destination", str(self.folder / "artifacts")]
        subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *where],
            env=os.environ | {MARK: self.mark, "MLFLOW_DISABLE_TELEMETRY": "true"},
            cwd=self.folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        log.close()
        deadline = time.monotonic() + 120.0
        while not self.answers():
            if time.monotonic() > deadline:
                raise SystemExit(f"mlflow server does not start: {self.folder / 'server.log'}")
            time.sleep(0.3)

    def answers(self) -> bool:
        """Whether it is there."""
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=1.0) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def signal(self, number: int) -> None:
        """Send a signal to every process of it."""
        for process in marked(self.mark):
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until nothing of it is left."""
        while marked(self.mark):
            self.signal(signal.SIGKILL)
            time.sleep(0.1)

    def __enter__(self) -> Server:
        """Start it."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.kill()


@contextlib.contextmanager
def postgresql() -> Iterator[str]:
    """A PostgreSQL server of our own with an empty database; its SQLAlchemy address."""
    binaries = POSTGRES[-1].parent
    folder, port = Path(tempfile.mkdtemp(prefix="tula-pg-")), free_port()
    user = []
    if os.getuid() == 0:
        # PostgreSQL refuses to run as root.
        name = next(one for one in ("postgres", "nobody") if _is_user(one))
        shutil.chown(folder, name)
        user = ["runuser", "-u", name, "--"]
    data = folder / "data"

    def call(*command: str) -> None:
        subprocess.run([*user, *command], check=True, capture_output=True, cwd="/", timeout=120)

    try:
        call(str(binaries / "initdb"), "-D", str(data), "-A", "trust", "-U", "tula", "-N")
        options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        server = ["-D", str(data), "-o", options, "-l", str(folder / "log"), "-w"]
        call(str(binaries / "pg_ctl"), *server, "start")
        try:
            call(str(binaries / "createdb"), "-h", "127.0.0.1", "-p", str(port), "-U", "tula", "ml")
            yield f"postgresql+psycopg://tula:hunter2@127.0.0.1:{port}/ml"
        finally:
            call(str(binaries / "pg_ctl"), "-D", str(data), "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int = 8) -> Iterator[Path]:
    """A file system of its own with little room; root only."""
    folder.mkdir(parents=True)
    options = f"size={megabytes}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tula-test", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Write until the disk is full."""
    with contextlib.suppress(OSError), (folder / "ballast").open("ab", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """The folder mounted over itself, read-only: permissions do not bind root."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    try:
        again = ["mount", "-o", "remount,ro,bind", str(folder)]
        subprocess.run(again, check=True)
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def may_mount() -> bool:
    """Whether this process may mount file systems."""
    if os.getuid() != 0:
        return False
    with tempfile.TemporaryDirectory() as name:
        try:
            with small_disk(Path(name) / "disk", 1):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


def old_store(path: Path, steps_back: int = 1) -> str:
    """A sqlite store of an older MLflow, made by MLflow's own migrations; its revision."""
    import alembic.command
    import sqlalchemy
    from alembic.script import ScriptDirectory
    from mlflow.store.db.utils import _get_alembic_config
    from mlflow.store.tracking.dbmodels.initial_models import Base

    uri = f"sqlite:///{path}"
    engine = sqlalchemy.create_engine(uri)
    Base.metadata.create_all(engine)
    engine.dispose()
    config = _get_alembic_config(uri)
    scripts = [one.revision for one in ScriptDirectory.from_config(config).walk_revisions()]
    alembic.command.upgrade(config, scripts[steps_back])
    return str(scripts[steps_back])
