"""What is trained, on what, at what price: the facts every other module shares.

All of them are frozen, keyword-only dataclasses, checked once when made, and round-trip through
JSON by `to_dict` and `from_dict`. SI units inside: bytes, seconds, dollars.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, cast, get_args

from mlflow_tula.documents import shown
from mlflow_tula.errors import InvalidInputError, SchemaError, UnknownNameError

DeviceType = Literal["cpu", "cuda", "mps", "xpu"]
Precision = Literal["fp32", "bf16", "fp16"]
Strategy = Literal["ddp", "fsdp"]

PAPER_USD_PER_GB_HOUR = 0.15
"""The memory-based price of the Tula paper (arXiv 2603.18112, March 2026)."""

_MAX_NAME = 120
_MAX_COUNT = 10**12
_MAX_REAL = 1e18


def check_int(name: str, value: object, *, minimum: int = 1, maximum: int = _MAX_COUNT) -> int:
    """Return `value` as an int, or raise InvalidInputError that states the rule and the value."""
    rule = f"{name} must be a whole number of at least {minimum}"
    if isinstance(value, int) and not isinstance(value, bool):
        number = value  # as it is: a float would round what is above 2**53
    else:
        real = _as_float(rule, value)
        number = int(real)
        if number != real:
            raise InvalidInputError(f"{rule}, not {shown(value)}")
    if number < minimum:
        raise InvalidInputError(f"{rule}, not {shown(number)}")
    if number > maximum:
        raise InvalidInputError(f"{name} must be at most {maximum}, not {shown(number)}")
    return number


def check_real(
    name: str,
    value: object,
    *,
    minimum: float = 0.0,
    maximum: float = _MAX_REAL,
    strict: bool = False,
) -> float:
    """Return `value` as a finite float from (`strict`: above) `minimum` to `maximum`, or raise."""
    rule = f"{name} must be a finite number {'above' if strict else 'of at least'} {minimum:g}"
    number = _as_float(rule, value)
    if number < minimum or (strict and number == minimum):
        raise InvalidInputError(f"{rule}, not {number:g}")
    if number > maximum:
        raise InvalidInputError(f"{name} must be at most {maximum:g}, not {number:g}")
    return number


def _as_float(rule: str, value: object) -> float:
    """A finite float, or InvalidInputError that begins with the rule."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(f"{rule}, not {shown(value)}") from error
    if isinstance(value, (bool, bytes, bytearray)) or not math.isfinite(number):
        raise InvalidInputError(f"{rule}, not {shown(value)}")
    return number


def check_name(name: str, value: object) -> str:
    """Return `value` as a short, printable, non-empty string, or raise."""
    if not isinstance(value, str) or not value.strip():
        raise InvalidInputError(f"{name} must be a non-empty string, not {shown(value)}")
    return check_text(name, value)


def check_text(name: str, value: object, *, maximum: int = _MAX_NAME) -> str:
    """Return `value` as a short, printable string, which may be empty, or raise."""
    if not isinstance(value, str):
        raise InvalidInputError(f"{name} must be a string, not {shown(value)}")
    if len(value) > maximum or not value.isprintable():
        raise InvalidInputError(
            f"{name} must be at most {maximum} printable characters, not {value[:40]!r}..."
        )
    return value


def check_flag(name: str, value: object) -> bool:
    """Return `value` as the bool that it is, or raise."""
    if not isinstance(value, bool):
        raise InvalidInputError(f"{name} must be true or false, not {shown(value)}")
    return value


def check_choice(name: str, value: object, choices: object) -> None:
    """Raise UnknownNameError unless `value` is one of a Literal's strings."""
    known = get_args(choices)
    if not isinstance(value, str) or value not in known:
        raise UnknownNameError(name, value if isinstance(value, str) else shown(value), known)


def check_strategy(value: object) -> None:
    """Raise UnknownNameError unless `value` is a strategy; DeepSpeed's users are told of FSDP."""
    name = value.lower() if isinstance(value, str) else ""
    if name.startswith(("deepspeed", "zero")):
        raise UnknownNameError(
            "strategy",
            name,
            get_args(Strategy),
            hint="(DeepSpeed is not supported: --strategy fsdp shards parameters, gradients and "
            "optimizer state as its ZeRO-3 does, with torch alone)",
        )
    check_choice("strategy", value, Strategy)


def slugify(text: str) -> str:
    """Lower-case letters, digits, `-` and `_` only: safe in MLflow names, file names and tags."""
    text = re.sub(r"\((r|tm|c)\)", "", text.lower())
    return re.sub(r"-{2,}", "-", re.sub(r"[^a-z0-9_]+", "-", text)).strip("-") or "unnamed"


class Spec:
    """Mixin: JSON round trip for the flat dataclasses of this module."""

    __slots__ = ()

    def _take_int(self, name: str, *, minimum: int = 1, maximum: int = _MAX_COUNT) -> None:
        """Check a field that counts, and keep it as an int (of a frame it comes as a float)."""
        number = check_int(name, getattr(self, name), minimum=minimum, maximum=maximum)
        object.__setattr__(self, name, number)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, every field present."""
        return dataclasses.asdict(cast(Any, self))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; unknown keys raise SchemaError, missing ones take defaults."""
        if not isinstance(data, Mapping):
            raise SchemaError(f"{cls.__name__} must be a JSON object, not {type(data).__name__}")
        known = {field.name for field in dataclasses.fields(cast(Any, cls))}
        unknown = sorted(str(key) for key in set(data) - known)
        if unknown:
            wrong = f"{cls.__name__} has no field {shown(unknown[0])}: known {sorted(known)}"
            raise SchemaError(wrong)
        try:
            return cls(**data)
        except TypeError as error:
            raise SchemaError(f"{cls.__name__} is incomplete: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareSpec(Spec):
    """One kind of node: what changes step time, and what is only worth recording.

    `device_memory_bytes` is one device's memory; on a CPU it is the machine's physical memory,
    which all ranks of the node share. `devices_per_node` is how many ranks a node can carry (on a
    CPU: one per core at most). The fields from `host_name` on are recorded but not hashed.
    """

    device_type: DeviceType
    device_name: str
    device_memory_bytes: int
    devices_per_node: int = 1
    cpu_model: str = ""
    cpu_cores: int = 0
    backend: str = ""
    interconnect: str = ""
    matmul_precision: str = "highest"
    torch_version: str = ""
    host_name: str = ""
    driver_version: str = ""
    free_memory_bytes: int = 0

    def __post_init__(self) -> None:
        """Check every field once."""
        check_choice("device type", self.device_type, DeviceType)
        check_name("device_name", self.device_name)
        self._take_int("device_memory_bytes", maximum=2**60)
        self._take_int("devices_per_node", maximum=10**4)
        self._take_int("cpu_cores", minimum=0)
        self._take_int("free_memory_bytes", minimum=0, maximum=2**60)
        for name in ("cpu_model", "backend", "interconnect", "matmul_precision", "torch_version"):
            check_text(name, getattr(self, name))
        for name in ("host_name", "driver_version"):
            check_text(name, getattr(self, name), maximum=255)

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits: equal fingerprints mean equal predictions.

        Hashed is what changes step time; host name, driver and free memory are recorded only.
        """
        facts: dict[str, object] = {
            "device_type": self.device_type,
            "device_name": self.device_name,
            "devices_per_node": self.devices_per_node,
            "device_memory_gib": round(self.device_memory_bytes / 2**30),
            "backend": self.backend,
            "interconnect": self.interconnect,
            "matmul_precision": self.matmul_precision,
            "torch": ".".join(self.torch_version.split("+")[0].split(".")[:2]),
        }
        if self.device_type == "cpu":
            facts |= {"cpu_model": self.cpu_model, "cpu_cores": self.cpu_cores}
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def slug(self) -> str:
        """A readable name part for the registry: `4x-tesla-t4-1a2b3c4d`."""
        return f"{self.devices_per_node}x-{slugify(self.device_name)[:32]}-{self.fingerprint[:8]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec(Spec):
    """How many nodes of the hardware, and the link between them where it is known.

    `inter_node_bandwidth_bytes_per_s` and `inter_node_latency_s` state a link (a what-if); None
    means "as measured".
    """

    nodes: int = 1
    devices_per_node: int = 1
    inter_node_bandwidth_bytes_per_s: float | None = None
    inter_node_latency_s: float | None = None

    def __post_init__(self) -> None:
        """Check every field once."""
        self._take_int("nodes", maximum=10**6)
        self._take_int("devices_per_node", maximum=10**4)
        if self.inter_node_bandwidth_bytes_per_s is not None:
            check_real(
                "inter_node_bandwidth_bytes_per_s",
                self.inter_node_bandwidth_bytes_per_s,
                strict=True,
            )
        if self.inter_node_latency_s is not None:
            check_real("inter_node_latency_s", self.inter_node_latency_s)

    @property
    def world_size(self) -> int:
        """Data-parallel processes, one per device."""
        return self.nodes * self.devices_per_node


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload(Spec):
    """What is trained: the part of a job that decides its step time, memory and epoch length.

    `dataset_size` counts training samples. `num_parameters` (where known) gives the bytes that
    an all-reduce moves. `variant` names what else sets two workloads of one model and dataset
    apart (`64px`, `adam`); it becomes part of the registered name. `block_parameters` are those of
    the largest of the `num_blocks` that FSDP puts together one after the other.
    """

    model: str
    dataset: str
    dataset_size: int
    image_size: int | None = None
    num_classes: int | None = None
    precision: Precision = "fp32"
    optimizer: str = "sgd"
    strategy: Strategy = "ddp"
    drop_last: bool = True
    num_parameters: int | None = None
    batch_norm: bool = False
    variant: str = ""
    block_parameters: int | None = None
    num_blocks: int | None = None

    def __post_init__(self) -> None:
        """Check every field once."""
        check_name("model", self.model)
        check_name("dataset", self.dataset)
        self._take_int("dataset_size")
        check_choice("precision", self.precision, Precision)
        check_strategy(self.strategy)
        check_name("optimizer", self.optimizer)
        check_text("variant", self.variant)
        check_flag("drop_last", self.drop_last)
        check_flag("batch_norm", self.batch_norm)
        for name in (
            "image_size",
            "num_classes",
            "num_parameters",
            "block_parameters",
            "num_blocks",
        ):
            if getattr(self, name) is not None:
                self._take_int(name)

    @property
    def gradient_bytes(self) -> int | None:
        """Bytes of one full gradient in fp32 (DDP reduces in the parameters' type), or None."""
        return None if self.num_parameters is None else 4 * self.num_parameters

    @property
    def sharded_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer state that FSDP's ranks share; else 0.

        Momentum is one number a parameter, Adam's moments are two.
        """
        if self.strategy != "fsdp" or self.gradient_bytes is None:
            return 0
        states = 2 if "adam" in self.optimizer.lower() else 1
        states -= "no-momentum" in self.variant
        return (2 + states) * self.gradient_bytes

    @property
    def slug(self) -> str:
        """`<model>.<dataset>`, with everything that is not a default appended to the dataset."""
        extras: list[str] = [self.precision] if self.precision != "fp32" else []
        extras += [slugify(self.optimizer)] if self.optimizer != "sgd" else []
        extras += [self.strategy] if self.strategy != "ddp" else []
        extras += [slugify(self.variant)] if self.variant else []
        return f"{slugify(self.model)}.{'-'.join([slugify(self.dataset), *extras])}"

    def registered_name(self, hardware: HardwareSpec) -> str:
        """`tula.<model>.<dataset>.<hardware slug>`: one per (workload, hardware) pair."""
        return f"tula.{self.slug}.{hardware.slug}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pricing(Spec):
    """Dollars: per device and hour, per GB of peak memory and hour (GB = 1e9 bytes), or both."""

    usd_per_device_hour: float | None = None
    usd_per_gb_hour: float | None = None

    def __post_init__(self) -> None:
        """Check every field once."""
        for name in ("usd_per_device_hour", "usd_per_gb_hour"):
            if getattr(self, name) is not None:
                check_real(name, getattr(self, name))
        if self.usd_per_device_hour is None and self.usd_per_gb_hour is None:
            raise InvalidInputError(
                "pricing needs usd_per_device_hour or usd_per_gb_hour (the paper's price is "
                f"usd_per_gb_hour={PAPER_USD_PER_GB_HOUR})"
            )
