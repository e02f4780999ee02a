"""What this machine is, as a HardwareSpec.

Asks NVML (nvidia-ml-py), /proc, the scheduler and the installed packages' metadata; never imports
torch, because registry look-ups and MLflow tags need the fingerprint in milliseconds. The spec
describes what a process started here and now may use: CPU affinity, cgroup limits and
CUDA_VISIBLE_DEVICES count.

`TULA_DEVICE=cpu` (or `detect("cpu")`) leaves the GPUs out; `TULA_DEVICE=cuda` insists on them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import math
import os
import platform
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

from mlflow_tula.errors import InvalidInputError, UnknownNameError
from mlflow_tula.specs import HardwareSpec

logger = logging.getLogger(__name__)

DEVICE_VARIABLE = "TULA_DEVICE"
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CGROUP_FILE = Path("/proc/self/cgroup")
_NO_LIMIT = 2**59  # cgroup v1 writes a number near 2**63 for "no limit"


def detect(device_type: str | None = None) -> HardwareSpec:
    """Describe this machine's devices; the same answer for the same environment.

    Args:
        device_type: `cpu` or `cuda`; None takes TULA_DEVICE, else CUDA where there is one.

    Raises:
        InvalidInputError: `cuda` was asked for and torch could not use a GPU here.
    """
    wanted = (device_type or os.environ.get(DEVICE_VARIABLE) or "auto").strip().lower()
    if wanted not in ("auto", "cpu", "cuda"):
        raise UnknownNameError("device type", wanted, ("auto", "cpu", "cuda"))
    return _detect(wanted, os.environ.get("CUDA_VISIBLE_DEVICES"))


@lru_cache(maxsize=8)
def _detect(wanted: str, visible: str | None) -> HardwareSpec:
    gpus = None if wanted == "cpu" else _find_gpus(visible)
    if gpus is None and wanted == "cuda":
        raise InvalidInputError(
            "device type cuda needs an NVIDIA GPU, its driver and a CUDA build of torch, and this "
            "machine lacks one of them: use cpu"
        )
    shared: dict[str, Any] = {
        "cpu_model": cpu_model(),
        "cpu_cores": usable_cores(),
        "torch_version": torch_version(),
        "host_name": socket.gethostname(),
    }
    if gpus is None:
        return HardwareSpec(
            device_type="cpu",
            device_name=shared["cpu_model"],
            device_memory_bytes=memory_limit_bytes(),
            devices_per_node=shared["cpu_cores"],
            backend="gloo",
            interconnect="shared-memory",
            free_memory_bytes=min(psutil.virtual_memory().available, memory_limit_bytes()),
            **shared,
        )
    return HardwareSpec(
        device_type="cuda",
        device_name=gpus.name,
        device_memory_bytes=gpus.memory_bytes,
        devices_per_node=gpus.count,
        backend="nccl",
        interconnect=gpus.interconnect,
        driver_version=gpus.driver_version,
        free_memory_bytes=gpus.free_bytes,
        **shared,
    )


def torch_version() -> str:
    """The installed torch's version from its metadata, or an empty string."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def cpu_model() -> str:
    """The processor's marketing name, or the architecture where the system has none."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(\S.*)$", text, re.MULTILINE)
    name = found.group(1) if found else platform.processor() or platform.machine()
    name = " ".join("".join(c if c.isprintable() else " " for c in name).split())
    return name[:120] or "unknown cpu"


def usable_cores() -> int:
    """Cores this process may run on: the scheduler's affinity, at most the cgroup's quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    for folder in _cgroup_folders("cpu"):
        quota = _read_cpu_quota(folder)
        if quota is not None:
            cores = min(cores, max(1, math.floor(quota)))
    return cores


def memory_limit_bytes() -> int:
    """Physical memory, or the cgroup's limit where it is lower."""
    total = psutil.virtual_memory().total
    for folder in _cgroup_folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            value = _read_number(folder / name)
            if value is not None and 0 < value < _NO_LIMIT:
                total = min(total, value)
    return int(total)


def _cgroup_folders(controller: str) -> Iterator[Path]:
    """This process's cgroup folders of v2 and v1 up to the root; a parent's limit binds too."""
    try:
        lines = _CGROUP_FILE.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            base = _CGROUP_ROOT
        elif controller in controllers.split(","):
            base = _CGROUP_ROOT / controller
        else:
            continue
        folder = base / path.lstrip("/")
        # Inside a container the path may be the host's and not exist here: its root does.
        yield from (at for at in (folder, *folder.parents) if at.is_relative_to(base))


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _read_cpu_quota(folder: Path) -> float | None:
    """Cores' worth of CPU time a cgroup allows, or None."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    limit, length = (_read_number(folder / f"cpu.cfs_{x}_us") for x in ("quota", "period"))
    return limit / length if limit and length and limit > 0 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gpus:
    """The GPUs that CUDA would show to a process started here."""

    name: str
    count: int
    memory_bytes: int
    free_bytes: int
    driver_version: str
    interconnect: str


def _find_gpus(visible: str | None) -> _Gpus | None:
    """The visible GPUs of the first one's kind, or None where torch could not use any."""
    if not _torch_has_cuda():
        return None
    try:
        with _nvml() as nvml:
            handles = _visible_handles(nvml, visible)
            if not handles:
                return None
            return _describe_gpus(nvml, handles)
    except Exception as error:  # no driver, no library, a driver older than the query
        logger.debug("no GPU through NVML: %s", error)
        return None


@contextmanager
def _nvml() -> Iterator[Any]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _torch_has_cuda() -> bool:
    """Whether the installed torch is a CUDA build, from its version file (not imported)."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        try:
            text = (Path(folder) / "version.py").read_text()
        except OSError:
            continue
        return re.search(r"^cuda\b[^=]*=\s*['\"]\d", text, re.MULTILINE) is not None
    return False


def _visible_handles(nvml: Any, visible: str | None) -> list[Any]:
    """NVML handles in CUDA's order; like CUDA, stop at the first name that does not exist."""
    if visible is None:
        return _expand_mig(nvml, [*map(nvml.nvmlDeviceGetHandleByIndex, range(_count(nvml)))])
    handles = []
    for name in (part.strip() for part in visible.split(",")):
        try:
            if name.startswith(("GPU-", "MIG-")):
                handles.append(nvml.nvmlDeviceGetHandleByUUID(name))
            else:
                handles.append(nvml.nvmlDeviceGetHandleByIndex(int(name)))
        except (ValueError, nvml.NVMLError):
            break
    return _expand_mig(nvml, handles)


def _count(nvml: Any) -> int:
    return int(nvml.nvmlDeviceGetCount())


def _expand_mig(nvml: Any, handles: list[Any]) -> list[Any]:
    """A GPU split into MIG instances offers a process one instance: the first."""
    for handle in handles:
        try:
            split = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
        except nvml.NVMLError:
            continue
        if split:
            try:
                return [nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0)]
            except nvml.NVMLError:
                return [handle]
    return handles


def _describe_gpus(nvml: Any, handles: list[Any]) -> _Gpus:
    names = [_text(nvml.nvmlDeviceGetName(handle)) for handle in handles]
    alike = [handle for handle, name in zip(handles, names, strict=True) if name == names[0]]
    if len(alike) < len(handles):
        logger.warning("GPUs of several kinds: only the %d %s count", len(alike), names[0])
    memory = nvml.nvmlDeviceGetMemoryInfo(alike[0])
    return _Gpus(
        name=names[0],
        count=len(alike),
        memory_bytes=int(memory.total),
        free_bytes=int(memory.free),
        driver_version=_text(nvml.nvmlSystemGetDriverVersion()),
        interconnect=_interconnect(nvml, alike),
    )


def _interconnect(nvml: Any, handles: list[Any]) -> str:
    """`nvlink` where the first two devices reach each other over it, else `pcie`."""
    if len(handles) < 2:
        return "single"
    try:
        status = nvml.nvmlDeviceGetP2PStatus(
            handles[0], handles[1], nvml.NVML_P2P_CAPS_INDEX_NVLINK
        )
    except (nvml.NVMLError, AttributeError):
        return "pcie"
    return "nvlink" if status == nvml.NVML_P2P_STATUS_OK else "pcie"


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
