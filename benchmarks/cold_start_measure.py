"""Live profiles of many torchvision models on this machine, for benchmarks/cold_start.py.

    python benchmarks/cold_start_measure.py [--models resnet18,vgg11] [--image-sizes 32,64]
    python benchmarks/cold_start_measure.py --threads 1 --image-sizes 32    # another "hardware"

One table a (model, image size): batch sizes 8 to 128 on one rank, digits scaled up, SGD with
momentum. Each is a JSON file in benchmarks/results/cold_start; those that exist are not measured
again. With one thread the same machine stands for another one, half as fast: hardware with one
core. Run it on an idle machine: about 15 minutes on two cores. Some of the files here hold two
trials of a size, because something else ran during the first: the faster one counts.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from mlflow_tula.files import write_json
from mlflow_tula.probing.settings import ProbeSettings
from mlflow_tula.profiler import profile
from mlflow_tula.workloads.job import Job

RESULTS = Path(__file__).parent / "results" / "cold_start"
BATCH_SIZES = (8, 16, 32, 64, 128)
IMAGE_SIZES = (32, 64)
MODELS = (
    *("resnet18", "resnet34", "resnet50", "resnext50_32x4d", "vgg11", "vgg13"),
    *("mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large", "mnasnet1_0"),
    *("shufflenet_v2_x1_0", "squeezenet1_1", "densenet121", "efficientnet_b0"),
    *("regnet_y_400mf", "googlenet"),
)
SETTINGS = ProbeSettings(warmup_steps=2, min_steps=4, max_steps=12, time_limit_s=2.5)


@click.command()
@click.option("--models", default=",".join(MODELS), help="Torchvision names.")
@click.option("--image-sizes", default=",".join(map(str, IMAGE_SIZES)), help="Pixels a side.")
@click.option("--threads", default=0, help="Threads of the rank; 0: all cores.")
def main(models: str, image_sizes: str, threads: int) -> None:
    """Measure what is not there yet."""
    for model in models.split(","):
        for size in map(int, image_sizes.split(",")):
            suffix = f"-{threads}thread" if threads else ""
            path = RESULTS / f"{model}-{size}{suffix}.json"
            if path.exists():
                continue
            table = profile(
                job=Job(model=model, image_size=size),
                batch_sizes=BATCH_SIZES,
                world_sizes=[1],
                search="full",
                settings=SETTINGS,
                threads_per_rank=threads or None,
            )
            if threads:
                part = dataclasses.replace(table.hardware, cpu_cores=threads, devices_per_node=1)
                table = dataclasses.replace(table, hardware=part)
            write_json(path, table.to_dict())
            times = ", ".join(f"{row.local_batch_size}: {row.step_time_s:.4f}" for row in table.ok)
            print(f"{model} at {size} px: {times}", flush=True)


if __name__ == "__main__":
    main()
