"""What uneven local batches gain where one of two ranks has half a core: a table in Markdown.

    python benchmarks/uneven_ranks.py [--short] [--markdown build/uneven.md]

Rank 0 is bound to one core, rank 1 to another on which a busy loop runs as well. ResNet18 on
32x32 digits, global batch 64, is trained with an even split and with `--uneven-batches auto`;
compared are the medians of the last epoch's steps. Needs two cores and Linux.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

HERE = Path(__file__).resolve().parent
CORES = sorted(os.sched_getaffinity(0))[:2] if hasattr(os, "sched_getaffinity") else [0]


def bound_resnet(num_classes: int) -> nn.Module:
    """ResNet18 in a process bound to its rank's core."""
    import torch
    import torchvision

    os.sched_setaffinity(
        0, {int(os.environ["TULA_BENCH_CORES"].split(",")[int(os.environ["RANK"])])}
    )
    torch.set_num_threads(1)
    return torchvision.models.resnet18(num_classes=num_classes)


@contextmanager
def busy(core: int) -> Iterator[None]:
    """A loop that takes half of a core from whoever else runs on it."""
    loop = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", loop])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> int:
    """Train twice and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="A few steps of a small batch.")
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    if len(CORES) < 2:
        print("needs two cores", file=sys.stderr)
        return 2
    os.environ["TULA_BENCH_CORES"] = ",".join(map(str, CORES))
    os.environ["TULA_DEVICE"] = "cpu"
    from mlflow_tula.train import BatchPlan, train
    from mlflow_tula.workloads.job import Job

    batch, epochs = (16, 2) if arguments.short else (64, 7)
    job = Job(model=f"{Path(__file__).resolve()}:bound_resnet", dataset_size=10 * batch)
    rows = []
    with busy(CORES[1]), tempfile.TemporaryDirectory() as folder:
        for name, balance in (("even", False), ("auto", True)):
            plan = BatchPlan.of(batch, devices_per_node=2, balance=balance)
            result = train(job, plan, epochs=epochs, output_dir=Path(folder) / name)
            last = result.history[-1]
            own = ", ".join(f"{seconds * 1e3:.0f}" for seconds in last.rank_times_s)
            split = result.rank_batch_sizes or plan.sizes
            rows.append((name, " + ".join(map(str, split)), own, last.step_time_s or 0.0))
    lines = ["| split | local batches | ranks' own ms a step | ms a step |", "|---|---|---|---|"]
    lines += [f"| {name} | {cut} | {own} | {step * 1e3:.0f} |" for name, cut, own, step in rows]
    lines.append(f"\nGain: {rows[0][3] / rows[1][3]:.2f} times as fast.")
    text = "\n".join(lines)
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
