"""Is this installation sound: versions, devices, store, registry, plugin points, stale runs.

Each finding is a `Check`: ok, warning or error, with the way out. Nothing is changed, except that
`close_stale_runs` closes runs whose process on this host has died.
"""

from __future__ import annotations

import importlib.metadata
import logging
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mlflow_tula.errors import TulaError
from mlflow_tula.processes import is_alive
from mlflow_tula.specs import Spec

if TYPE_CHECKING:
    from mlflow.entities import Run

_logger = logging.getLogger(__name__)

Status = Literal["ok", "warning", "error"]

ENTRY_POINTS = {
    "mlflow.run_context_provider": "tula",
    "mlflow.project_backend": "tula",
    "mlflow.model_evaluator": "tula",
    "mlflow.deployments": "tula",
    "mlflow.app": "tula",
}
"""Group -> name of what MLflow must find."""

_DISTRIBUTION = "mlflow-tula"
_REINSTALL = "reinstall with `pip install --force-reinstall --no-deps mlflow-tula`"
_SHOWN = 5
_PAGE = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Check(Spec):
    """One finding: what was looked at, how it is, and what to do where it is not ok."""

    name: str
    status: Status
    message: str
    way_out: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StaleRun(Spec):
    """A run that says RUNNING although its process has died."""

    run_id: str
    run_name: str
    experiment_id: str
    pid: int | None


def examine() -> list[Check]:
    """Every check, in the order in which trouble should be mended; none of them raises."""
    parts: tuple[tuple[str, Callable[[], Iterator[Check]]], ...] = (
        ("versions", check_versions),
        ("environment", check_environment),
        ("devices", check_devices),
        ("plugin", check_entry_points),
        ("store", check_store),
    )
    found = [check for name, part in parts for check in _caught(name, part)]
    if any(check.name == "store" and check.status == "ok" for check in found) and _has_store():
        found += _caught("registry", check_registry)
        found += _caught("runs", check_runs)
    return found


def _caught(name: str, part: Callable[[], Iterator[Check]]) -> list[Check]:
    """A part's findings; one that breaks is a finding too."""
    found: list[Check] = []
    try:
        found.extend(part())
    except TulaError as error:
        found.append(Check(name=name, status="error", message=str(error)))
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        found.append(Check(name=name, status="error", message=text))
    return found


def check_versions() -> Iterator[Check]:
    """Every requirement of this package against what is installed, from the metadata."""
    from packaging.requirements import Requirement

    try:
        own = importlib.metadata.distribution(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        yield Check(
            name="versions",
            status="error",
            message="mlflow-tula is imported but not installed, so MLflow finds no plugin of it",
            way_out="install it with `pip install -e .` in its folder",
        )
        return
    python = ".".join(map(str, sys.version_info[:3]))
    present = {name: _version(name) for name in ("mlflow", "torch", "numpy")}
    listed = ", ".join(f"{name} {version or 'absent'}" for name, version in present.items())
    yield Check(
        name="versions",
        status="ok",
        message=f"mlflow-tula {own.version}, Python {python}, {listed}",
    )
    for text in own.requires or []:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        version = _version(wanted.name)
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            yield Check(
                name="versions",
                status="error",
                message=f"{wanted.name} must be {wanted.specifier}, is {version or 'absent'}",
                way_out=f"`pip install '{wanted.name}{wanted.specifier}'`",
            )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_environment() -> Iterator[Check]:
    """`python` in a project's command must be the interpreter that has this package."""
    on_path = shutil.which("python")
    here = Path(sys.executable).parent
    if on_path is not None and Path(on_path).parent == here:
        yield Check(name="environment", status="ok", message=f"python is {on_path}")
        return
    yield Check(
        name="environment",
        status="warning",
        message=f"`mlflow run .` would run {on_path or 'no python at all'}, not {sys.executable}",
        way_out=f"activate the environment: `. {here / 'activate'}`, or use `mlflow run -b tula`",
    )


def check_devices() -> Iterator[Check]:
    """What work would run on, and the fingerprint that predictors are registered under."""
    from mlflow_tula import hardware

    seen = hardware.detect()
    gib = seen.device_memory_bytes / 2**30
    yield Check(
        name="devices",
        status="ok",
        message=f"{seen.devices_per_node} x {seen.device_name}, {gib:.1f} GiB, {seen.backend}",
    )
    if seen.device_type == "cpu" and _nvidia_gpu():
        yield Check(
            name="devices",
            status="warning",
            message="there is an NVIDIA GPU, but the installed torch cannot use it",
            way_out="install a CUDA build of torch (https://pytorch.org/get-started)",
        )
    if seen.free_memory_bytes and seen.free_memory_bytes < 0.1 * seen.device_memory_bytes:
        yield Check(
            name="devices",
            status="warning",
            message=f"only {seen.free_memory_bytes / 2**30:.1f} GiB of device memory is free",
            way_out="end what holds the memory before profiling",
        )
    yield Check(name="fingerprint", status="ok", message=f"{seen.fingerprint} ({seen.slug})")


def _nvidia_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def check_entry_points() -> Iterator[Check]:
    """Each plugin point is found by its name, is ours, and loads."""
    for group, name in ENTRY_POINTS.items():
        found = [one for one in importlib.metadata.entry_points(group=group) if one.name == name]
        ours = [one for one in found if one.value.startswith("mlflow_tula.")]
        if not ours:
            yield Check(
                name="plugin",
                status="error",
                message=f"MLflow finds no {group} {name!r}",
                way_out=_REINSTALL,
            )
        elif len(found) > len(ours):
            other = next(one for one in found if one not in ours)
            yield Check(
                name="plugin",
                status="warning",
                message=f"another package registers {group} {name!r} as well: {other.value}",
                way_out="uninstall the other package",
            )
        else:
            yield _loaded(group, ours[0])


def _loaded(group: str, point: importlib.metadata.EntryPoint) -> Check:
    try:
        point.load()
    except Exception as error:
        text = f"{group} cannot be loaded: {type(error).__name__}: {error}"
        return Check(name="plugin", status="error", message=text, way_out=_REINSTALL)
    return Check(name="plugin", status="ok", message=f"{group}: {point.value}")


def _has_store() -> bool:
    from mlflow_tula.stores import store_exists

    return store_exists()


def check_store() -> Iterator[Check]:
    """The store answers, its schema is this MLflow's, and it can be written."""
    import mlflow

    from mlflow_tula import stores

    uri = stores.masked(mlflow.get_tracking_uri())
    if not stores.store_exists():
        text = f"{uri} does not exist yet: made when it is used"
        yield Check(name="store", status="ok", message=text)
        return
    try:
        stores.check_store(write=True)
    except TulaError as error:
        yield Check(name="store", status="error", message=str(error))
        return
    yield Check(name="store", status="ok", message=f"{uri} answers, is migrated and can be written")


def check_registry() -> Iterator[Check]:
    """How much is registered, and whether every champion is there."""
    from mlflow_tula import registry
    from mlflow_tula.registry import versions

    registered = registry.find()
    yield Check(name="registry", status="ok", message=f"registered predictors: {len(registered)}")
    for one in registered:
        try:
            versions.list_versions(one.name)
        except TulaError as error:
            yield Check(name="registry", status="error", message=str(error))


def check_runs() -> Iterator[Check]:
    """Runs that say RUNNING although their process on this host has died."""
    stale = stale_runs()
    if not stale:
        yield Check(name="runs", status="ok", message="no stale runs of this host")
        return
    names = ", ".join(one.run_name or one.run_id for one in stale[:_SHOWN])
    more = f" and {len(stale) - _SHOWN} more" if len(stale) > _SHOWN else ""
    yield Check(
        name="runs",
        status="warning",
        message=f"RUNNING runs whose process has died: {len(stale)} ({names}{more})",
        way_out="`tula doctor --fix` closes them",
    )


def stale_runs() -> list[StaleRun]:
    """RUNNING runs of dead processes of this host, and RUNNING runs nested in them."""
    running = list(_running_runs())
    host = socket.gethostname()
    stale: dict[str, StaleRun] = {}
    for run in running:
        tags = run.data.tags
        if tags.get("tula.host") == host and not is_alive(
            tags.get("tula.pid"), tags.get("tula.pid_started")
        ):
            stale[run.info.run_id] = _stale(run)
    # A nested run was made by its parent's process, and carries no process of its own.
    for run in running:
        tags = run.data.tags
        if tags.get("mlflow.parentRunId") in stale and "tula.pid" not in tags:
            stale.setdefault(run.info.run_id, _stale(run))
    return list(stale.values())


def _stale(run: Run) -> StaleRun:
    pid = run.data.tags.get("tula.pid", "")
    return StaleRun(
        run_id=run.info.run_id,
        run_name=run.info.run_name or "",
        experiment_id=run.info.experiment_id,
        pid=int(pid) if pid.isdigit() else None,
    )


def _running_runs() -> Iterator[Run]:
    """Every RUNNING run of every experiment."""
    from mlflow import MlflowClient

    from mlflow_tula.stores import store_errors

    with store_errors("search for running runs"):
        client = MlflowClient()
        everywhere = [
            one.experiment_id
            for one in _pages(
                lambda token: client.search_experiments(max_results=_PAGE, page_token=token)
            )
        ]
        yield from _pages(
            lambda token: client.search_runs(
                everywhere,
                "attributes.status = 'RUNNING'",
                max_results=_PAGE,
                page_token=token,
            )
        )


def _pages(ask: Callable[[str | None], Any]) -> Iterator[Any]:
    """Everything that a paged search finds."""
    token = None
    while True:
        page = ask(token)
        yield from page
        token = page.token
        if not token:
            return


def close_stale_runs() -> list[StaleRun]:
    """Set every stale run to KILLED, with a tag that says who did it; returns them."""
    from mlflow import MlflowClient

    from mlflow_tula.stores import store_errors

    stale = stale_runs()
    for one in stale:
        with store_errors(f"close the run {one.run_id}"):
            client = MlflowClient()
            client.set_tag(one.run_id, "tula.closed_by", "tula doctor: its process had died")
            client.set_terminated(one.run_id, "KILLED")
    return stale
