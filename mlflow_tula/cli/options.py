"""Options that several commands share, each written once.

A decorator adds a group of options; a function of the same subject turns their values into the
core's types. Imports click only: `tula COMMAND --help` must not wait for torch.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlflow_tula.cli import types
from mlflow_tula.cli.types import switch

if TYPE_CHECKING:
    from mlflow_tula.predictors.bundle import PredictorBundle
    from mlflow_tula.specs import ClusterSpec, HardwareSpec, Pricing
    from mlflow_tula.workloads.job import Job

Command = Callable[..., Any]


def _all(*decorators: types.Decorator) -> types.Decorator:
    """Several decorators as one, the first on top of the help."""
    return lambda function: functools.reduce(lambda f, one: one(f), reversed(decorators), function)


def option(name: str, kind: Any, default: str, text: str, **more: Any) -> types.Decorator:
    """A click option that always shows its default."""
    chosen = types.Text() if kind is str else kind
    return click.option(name, type=chosen, default=default, show_default=True, help=text, **more)


json_option = click.option(
    "--json",
    "as_json",
    type=types.Switch(),
    is_flag=False,
    flag_value="true",
    default="false",
    show_default=True,
    metavar="[true|false]",
    help="Print one JSON document instead of tables; progress goes to stderr.",
)

name_options = _all(
    option("--model", str, "vgg11", "Model: a torchvision name or package.module:function."),
    option("--dataset", str, "digits", "Dataset: a name of `tula models` or package.module:func."),
    option("--data-dir", types.OpenText("none"), "none", "Folder that holds the dataset."),
    option(
        "--image-size",
        types.count("32", open_word="auto"),
        "auto",
        "Pixels a side; auto: the dataset's own.",
    ),
    option(
        "--precision",
        click.Choice(["fp32", "bf16", "fp16"]),
        "fp32",
        "fp32, bf16 autocast, or fp16 with a gradient scaler.",
    ),
    option(
        "--strategy",
        str,
        "ddp",
        "How ranks share a model: ddp (a copy each) or fsdp (a part each: FSDP2, as ZeRO-3).",
    ),
    option("--optimizer", str, "sgd", "Optimizer: sgd, adam, adamw, ... or package.module:class."),
    option("--momentum", types.real("0.9", strict=False), "0.9", "Momentum of SGD, 0 to below 1."),
    option("--loss", str, "cross_entropy", "Loss: cross_entropy, ... or package.module:function."),
    option(
        "--dataset-size",
        types.count("2048", open_word="auto"),
        "auto",
        "Training samples; auto: all (a stratified subset otherwise).",
    ),
)

data_options = _all(
    switch("--download", default=False, text="Download the dataset where it is absent."),
    option(
        "--num-workers",
        types.count("2", minimum=0),
        "0",
        "Loader processes per rank; 0 loads in the training process.",
    ),
    option("--seed", types.count("0", minimum=0), "0", "Seed of weights, order and splits."),
)

optimizer_options = _all(
    option(
        "--learning-rate",
        types.real("0.05", open_word="auto"),
        "auto",
        "Learning rate at the reference batch size; auto: the optimizer's default.",
    ),
    option("--weight-decay", types.real("5e-4", strict=False), "0", "Weight decay (L2), per step."),
)

output_option = option(
    "--output-dir",
    str,
    "tula_output",
    "Folder for tables, bundles and checkpoints, one sub-folder a workload.",
)

device_option = option(
    "--device",
    click.Choice(["auto", "cpu", "cuda"]),
    "auto",
    "Device type; auto: CUDA where there is a GPU, else the CPU.",
)

tracking_uri_option = option(
    "--tracking-uri",
    types.OpenText("auto"),
    "auto",
    "MLflow store; auto: MLFLOW_TRACKING_URI, else sqlite:///mlflow.db here.",
)

store_options = _all(
    tracking_uri_option,
    option(
        "--experiment",
        types.OpenText("auto"),
        "auto",
        "MLflow experiment; auto: the project run's own, else `tula`.",
    ),
)

system_metrics_option = switch(
    "--system-metrics",
    default=False,
    text="Log processor, memory, disk, network and GPU of the machine while it works.",
)

bucket_option = option(
    "--bucket-mb",
    types.real("25", open_word="auto"),
    "auto",
    "Most MiB of gradients that DDP sends at once; auto: its own 25.",
)

sweep_options = _all(
    option(
        "--batch-sizes",
        types.Listed(example="8,32,128"),
        "auto",
        "Local batch sizes to probe, comma-separated; auto: powers of two, by --search.",
    ),
    option(
        "--world-sizes",
        types.Listed(example="1,2"),
        "auto",
        "Numbers of ranks to probe, comma-separated; auto: 1 and the number of devices.",
    ),
    option(
        "--search",
        click.Choice(["auto", "partial", "full"]),
        "auto",
        "partial: probe few, predict the rest; full: every pair; auto: full for a list of sizes.",
    ),
    option(
        "--time-budget",
        types.duration("150s", open_word="auto"),
        "auto",
        "Time for the whole sweep (s, m or h); auto: 150 s, 75 s where steps are quick.",
    ),
    option("--warmup-steps", types.count("2", minimum=0), "2", "Untimed steps before each probe."),
    option("--max-steps", types.count("40"), "40", "Most timed steps a probe."),
    option(
        "--accumulation-steps",
        types.Listed(example="1,4", open_word=None),
        "1",
        "Passes per optimizer step, comma-separated: each is measured.",
    ),
    option(
        "--gradient-compression",
        types.Words("none", "bf16"),
        "none",
        "How gradients are sent among ranks, none or bf16, comma-separated: each is measured.",
    ),
    bucket_option,
    option(
        "--node-counts",
        types.Listed(example="1,2"),
        "auto",
        "Numbers of nodes to probe, of those that run the command; auto: one and all of them.",
    ),
    option(
        "--max-batch-size",
        types.count("1024", open_word="auto"),
        "auto",
        "Largest local batch size to probe; auto: the dataset and the memory.",
    ),
    option(
        "--threads-per-rank",
        types.count("1", open_word="auto"),
        "auto",
        "CPU threads of each rank; auto: cores / local ranks.",
    ),
)

memory_option = option(
    "--memory-limit",
    types.num_bytes("20GiB", open_word="auto"),
    "auto",
    "Memory one device may use, with KB ... TB or KiB ... TiB; auto: what it has.",
)

decision_options = _all(
    option(
        "--objective",
        str,
        "knee",
        "knee, min_time, min_cost, min_time_to_target or min_cost_to_target.",
    ),
    option(
        "--knee-rule",
        click.Choice(["diminishing_returns", "kneedle"]),
        "diminishing_returns",
        "What a knee is: the smallest batch within 10 % of the best time, or Kneedle's.",
    ),
    option(
        "--epochs",
        types.real("90", open_word="none"),
        "none",
        "Epochs that time, cost, deadline and budget are about; none: one.",
    ),
    option(
        "--deadline",
        types.duration("6h", open_word="none"),
        "none",
        "Longest training time (s, m, h or d).",
    ),
    option("--budget", types.real("100", open_word="none"), "none", "Most dollars for the run."),
    option(
        "--price-per-device-hour",
        types.real("2.5", open_word="none", strict=False),
        "none",
        "Dollars per device and hour.",
    ),
    option(
        "--price-per-gb-hour",
        types.real("0.15", open_word="none", strict=False),
        "none",
        "Dollars per GB of peak memory and hour (the Tula paper: 0.15).",
    ),
    option("--nodes", types.Listed(example="1,2,4", open_word=None), "1", "Numbers of nodes."),
    option(
        "--inter-node-bandwidth",
        types.bandwidth("1Gbit", open_word="auto"),
        "auto",
        "What a node's link carries, in kbit ... Tbit or KB ... TB a second; auto: as measured.",
    ),
    option(
        "--inter-node-latency",
        types.latency("50us", open_word="auto"),
        "auto",
        "Latency of that link (us, ms or s); auto: as measured.",
    ),
    option(
        "--scaling",
        click.Choice(["any", "strong", "weak"]),
        "any",
        "Of several clusters compare all sizes, one global batch (strong) or one local (weak).",
    ),
    option(
        "--devices-per-node",
        types.Listed(example="1,2"),
        "auto",
        "Devices per node to choose from; auto: the numbers that were measured.",
    ),
    option(
        "--candidates",
        types.Listed(example="64,128,256"),
        "auto",
        "Global batch sizes to choose from; auto: powers of two per rank.",
    ),
    option(
        "--current-batch-size",
        types.count("128", open_word="none"),
        "none",
        "Global batch size in use today; kept unless another gains more than the noise.",
    ),
)


def make_job(values: Mapping[str, Any]) -> Job:
    """The Job that the options describe."""
    from mlflow_tula.workloads.job import Job

    names = set(Job.__dataclass_fields__)
    given = {key: value for key, value in values.items() if key in names}
    # several ways to be profiled are no property of the job; the one to train with is
    if given.get("gradient_compression") != "bf16":
        given.pop("gradient_compression", None)
    return Job(**given)


_NAMING = (
    "dataset",
    "data_dir",
    "image_size",
    "dataset_size",
    "precision",
    "strategy",
    "optimizer",
    "momentum",
    "loss",
)
"""Options that set one workload apart from another."""


def command_line(verb: str, job: Job) -> str:
    """The command that does `verb` for this very job: what is not a default is named."""
    from mlflow_tula.workloads.job import Job

    plain = Job(model=job.model)
    # quoted: names may be from somebody else's run, and people paste this line
    words = [f"tula {verb} --model {shlex.quote(job.model)}"]
    for name in _NAMING:
        if getattr(job, name) != getattr(plain, name):
            words.append(f"--{name.replace('_', '-')} {shlex.quote(str(getattr(job, name)))}")
    return " ".join(words)


def make_pricing(values: Mapping[str, Any]) -> Pricing | None:
    """The prices, or None where neither was given."""
    from mlflow_tula.specs import Pricing

    device, memory = values["price_per_device_hour"], values["price_per_gb_hour"]
    if device is None and memory is None:
        return None
    return Pricing(usd_per_device_hour=device, usd_per_gb_hour=memory)


def check_devices(values: Mapping[str, Any], hardware: HardwareSpec) -> None:
    """Refuse more devices per node than a node has."""
    from mlflow_tula.errors import InvalidInputError

    asked = max(values["devices_per_node"] or (1,))
    if asked > hardware.devices_per_node:
        raise InvalidInputError(
            f"devices-per-node must be at most {hardware.devices_per_node}, what a node of "
            f"{hardware.device_name} has, not {asked}"
        )


def make_clusters(values: Mapping[str, Any], bundle: PredictorBundle) -> list[ClusterSpec]:
    """Every (nodes, devices per node) to choose from; by default only counts that were measured."""
    from mlflow_tula.specs import ClusterSpec

    bandwidth, latency = values["inter_node_bandwidth"], values["inter_node_latency"]
    most = bundle.hardware.devices_per_node
    measured = {world for _, world in bundle.probed.ok if world <= most}
    return [
        ClusterSpec(
            nodes=nodes,
            devices_per_node=count,
            inter_node_bandwidth_bytes_per_s=bandwidth if nodes > 1 else None,
            inter_node_latency_s=latency if nodes > 1 else None,
        )
        for nodes in values["nodes"]
        for count in values["devices_per_node"] or sorted(measured or {1})
    ]


def detect_hardware(device: str) -> HardwareSpec:
    """This machine, or the part of it that `--device` names; workers are told by TULA_DEVICE."""
    import os

    from mlflow_tula import hardware

    if device != "auto":
        os.environ[hardware.DEVICE_VARIABLE] = device
    return hardware.detect()


def use_store(values: Mapping[str, Any], *, write: bool) -> None:
    """Point MLflow at the store and check that it answers, before any work."""
    import mlflow

    from mlflow_tula import stores

    if values["tracking_uri"] is not None:
        # The registry follows the tracking store unless MLFLOW_REGISTRY_URI says otherwise.
        mlflow.set_tracking_uri(values["tracking_uri"])
    stores.check_store(write=write)


def workload_folder(values: Mapping[str, Any], job: Job, hardware: HardwareSpec) -> Path:
    """`<output-dir>/<workload>.<hardware>`: where this workload's files lie on this hardware."""
    return Path(values["output_dir"]) / f"{job.workload_slug}.{hardware.slug}"
