import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlflow_tula import hardware
from mlflow_tula.errors import InvalidInputError, UnknownNameError
from mlflow_tula.specs import HardwareSpec


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.delenv("TULA_DEVICE", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    hardware._detect.cache_clear()
    yield
    hardware._detect.cache_clear()


def test_this_machines_cpu() -> None:
    spec = hardware.detect("cpu")
    assert spec.device_type == "cpu"
    assert spec.device_name == spec.cpu_model
    assert 1 <= spec.devices_per_node == spec.cpu_cores <= (os.cpu_count() or 1)
    assert 2**20 < spec.device_memory_bytes <= psutil.virtual_memory().total
    assert (spec.backend, spec.interconnect) == ("gloo", "shared-memory")
    assert HardwareSpec.from_dict(spec.to_dict()) == spec


def test_version_is_what_torch_says() -> None:
    import torch

    assert torch.__version__.startswith(hardware.torch_version())
    assert hardware._torch_has_cuda() is (torch.version.cuda is not None)


def test_another_process_sees_the_same_hardware_and_imports_no_torch() -> None:
    code = (
        "import sys; from mlflow_tula.hardware import detect; print(detect('cpu').fingerprint, "
        "[m for m in ('torch', 'mlflow', 'pandas') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == f"{hardware.detect('cpu').fingerprint} []"


def test_affinity_counts() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("the system has no CPU affinity")
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
        "from mlflow_tula.hardware import detect; print(detect('cpu').devices_per_node)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "1"


def test_environment_forces_the_cpu(monkeypatch, nvml) -> None:
    assert hardware.detect().device_type == "cuda"
    monkeypatch.setenv("TULA_DEVICE", "cpu")
    assert hardware.detect().device_type == "cpu"
    assert hardware.detect("cuda").device_type == "cuda"


def test_unknown_device_and_absent_gpu(monkeypatch) -> None:
    with pytest.raises(UnknownNameError, match="unknown device type 'gpu'"):
        hardware.detect("gpu")
    monkeypatch.setattr(hardware, "_torch_has_cuda", lambda: False)
    with pytest.raises(InvalidInputError, match=r"needs an NVIDIA GPU.* use cpu"):
        hardware.detect("cuda")
    assert hardware.detect().device_type == "cpu"


class NVMLError(Exception):
    pass


class FakeNvml(SimpleNamespace):
    """NVML of a machine with some GPUs: this project's machines have none."""

    NVMLError = NVMLError
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0

    def __init__(self, names, *, mig=False, nvlink=False, broken=False) -> None:
        super().__init__(names=names, mig=mig, nvlink=nvlink, broken=broken, open=0)

    def nvmlInit(self) -> None:  # noqa: N802
        if self.broken:
            raise NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        if not 0 <= index < len(self.names):
            raise NVMLError("Invalid Argument")
        return self.names[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        return self.nvmlDeviceGetHandleByIndex(int(uuid.rsplit("-", 1)[1]))

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return handle.encode() if handle.startswith("Old") else handle

    def nvmlDeviceGetMigMode(self, handle):  # noqa: N802
        if self.mig is None or "MIG" in handle:
            raise NVMLError("Not Supported")
        return [int(self.mig), int(self.mig)]

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):  # noqa: N802
        return f"{handle} MIG 1g.10gb"

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        gib = 10 if "MIG" in handle else 80
        return SimpleNamespace(total=gib * 2**30, free=gib * 2**29)

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "570.1"

    def nvmlDeviceGetP2PStatus(self, one, two, index):  # noqa: N802
        if self.nvlink is None:
            raise NVMLError("Not Supported")
        return 0 if self.nvlink else 3


@pytest.fixture
def nvml(monkeypatch):
    def install(*names: str, **options) -> FakeNvml:
        fake = FakeNvml(list(names), **options)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        monkeypatch.setattr(hardware, "_torch_has_cuda", lambda: True)
        hardware._detect.cache_clear()
        return fake

    install("NVIDIA A100")
    return install


def test_four_gpus(nvml) -> None:
    fake = nvml(*["NVIDIA A100"] * 4, nvlink=True, mig=None)
    spec = hardware.detect()
    assert (spec.device_type, spec.device_name, spec.devices_per_node) == ("cuda", "NVIDIA A100", 4)
    assert (spec.backend, spec.interconnect, spec.driver_version) == ("nccl", "nvlink", "570.1")
    assert spec.device_memory_bytes == 80 * 2**30
    assert spec.slug.startswith("4x-nvidia-a100-")
    assert fake.open == 0


@pytest.mark.parametrize(("nvlink", "link"), [(True, "nvlink"), (False, "pcie"), (None, "pcie")])
def test_interconnect(nvml, nvlink, link) -> None:
    nvml("Old GPU", "Old GPU", nvlink=nvlink)
    assert hardware.detect().interconnect == link


@pytest.mark.parametrize(
    ("visible", "count"),
    [("0", 1), ("2,1", 2), ("GPU-x-3", 1), ("0,9,1", 1), ("0, 1", 2), ("0,-1,1", 1)],
)
def test_visible_devices(nvml, monkeypatch, visible, count) -> None:
    nvml(*["NVIDIA A100"] * 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert hardware.detect().devices_per_node == count


@pytest.mark.parametrize("visible", ["", "-1", "none"])
def test_no_visible_device_is_a_cpu(nvml, monkeypatch, visible) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert hardware.detect().device_type == "cpu"


def test_several_kinds_count_the_first(nvml, caplog) -> None:
    nvml("NVIDIA A100", "NVIDIA T4", "NVIDIA A100")
    assert hardware.detect().devices_per_node == 2
    assert "GPUs of several kinds" in caplog.text


def test_a_split_gpu_is_one_instance(nvml) -> None:
    nvml("NVIDIA A100", "NVIDIA A100", mig=True)
    spec = hardware.detect()
    assert (spec.devices_per_node, spec.device_memory_bytes) == (1, 10 * 2**30)
    assert "MIG" in spec.device_name


def test_no_driver_is_a_cpu(nvml) -> None:
    nvml("NVIDIA A100", broken=True)
    assert hardware.detect().device_type == "cpu"


@settings(max_examples=30)
@given(st.text(max_size=200))
def test_any_cpuinfo_gives_a_name(text) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware.Path, "read_text", lambda *_, **__: f"model name : {text}")
        name = hardware.cpu_model()
    assert 0 < len(name) <= 120
    assert name.isprintable()


@pytest.mark.parametrize(
    ("files", "cores", "memory"),
    [
        ({"cpu.max": "150000 100000", "memory.max": "1000000"}, 1, 1_000_000),
        ({"a/cpu.max": "max 100000", "a/memory.max": "max"}, None, None),
        ({"a/cpu.max": "50000 100000", "a/memory.max": "2000000", "memory.max": "9"}, 1, 9),
        ({"memory/a/memory.limit_in_bytes": "3000000"}, None, 3_000_000),
        ({"memory/memory.limit_in_bytes": str(2**63 - 4096)}, None, None),
        ({"cpu/a/cpu.cfs_quota_us": "100000", "cpu/a/cpu.cfs_period_us": "100000"}, 1, None),
        ({"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, None, None),
    ],
)
def test_container_limits(tmp_path, monkeypatch, files, cores, memory) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content + "\n")
    lines = tmp_path / "self"
    lines.write_text("0::/a\n4:memory:/a\n3:cpuacct,cpu:/a\n2:name=systemd:/\n")
    monkeypatch.setattr(hardware, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(hardware, "_CGROUP_FILE", lines)
    assert hardware.usable_cores() == (cores or len(os.sched_getaffinity(0)))
    assert hardware.memory_limit_bytes() == (memory or psutil.virtual_memory().total)


def test_no_cgroups_no_limits(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(hardware, "_CGROUP_FILE", tmp_path / "absent")
    assert hardware.memory_limit_bytes() == psutil.virtual_memory().total
