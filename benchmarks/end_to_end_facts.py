"""What benchmarks/end_to_end.py compares, and the lines it keeps."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "end_to_end"
WORK = Path("build/end_to_end")
OWN = Path(__file__).with_name("end_to_end_task.py").absolute()
WAYS = ("small", "largest", "tula")
SMALL_BATCH = 32
MEMORY_LIMIT = 2 * 2**30
"""What a core has on common cloud machines: 2 GiB and more."""
SEEDS = (0, 1, 2)
SOONER, LATER = 3.0, 1.05
"""The marks: so many times sooner than the worse of the others, never later than so many times the
better one."""

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A job, its target (a fraction of the validation samples), and the epochs of its schedule.

    `large_epochs` are those of the largest batch, `large_sizes` the batches tried for it. No
    training takes longer than `time_limit_s`.
    """

    name: str
    model: str
    dataset: str
    image_size: int
    learning_rate: float
    target: float
    epochs: int
    large_epochs: int
    time_limit_s: int
    why: str
    large_sizes: tuple[int, ...]
    seeds: tuple[int, ...] = SEEDS
    profile_options: tuple[str, ...] = field(default=())

    @property
    def names(self) -> list[str]:
        """The options that name the job."""
        return [
            *("--model", self.model, "--dataset", self.dataset),
            *("--image-size", str(self.image_size)),
        ]


TASKS = {
    task.name: task
    for task in (
        Task(
            name="fashion_mnist",
            model=f"{OWN}:lenet5",
            dataset=f"{OWN}:fashion_mnist",
            image_size=28,
            learning_rate=0.02,
            target=0.89,
            epochs=5,
            large_epochs=18,
            time_limit_s=900,
            why=(
                "LeNet-5 on Fashion-MNIST (54,000 images to train, 6,000 to validate, 10,000 to "
                "test): the best known small convolution network, an epoch takes seconds on two "
                "cores. The target, 89 %, is what batch 32 reaches by the end of five epochs."
            ),
            large_sizes=tuple(2**k for k in range(10, 16)),
        ),
        Task(
            name="digits",
            model="resnet18",
            dataset=f"{OWN}:digits",
            image_size=32,
            learning_rate=0.05,
            target=0.97,
            epochs=5,
            large_epochs=30,
            time_limit_s=600,
            why=(
                "ResNet18 on scikit-learn's digits at 32 pixels (1,150 images to train, 288 to "
                "validate, 359 to test): a network of the paper's kind on a set so small that a "
                "large batch leaves a handful of updates."
            ),
            large_sizes=(256, 512, 1024),
        ),
        Task(
            name="tiny",
            model=f"{OWN}:lenet5",
            dataset=f"{OWN}:digits",
            image_size=16,
            learning_rate=0.05,
            target=0.15,
            epochs=2,
            large_epochs=3,
            time_limit_s=600,
            why="A test of this script.",
            large_sizes=(256,),
            seeds=(0,),
            profile_options=("--batch-sizes", "16,64", "--world-sizes", "1", "--max-steps", "3"),
        ),
    )
}
SHOWN = ("fashion_mnist", "digits")


class Records:
    """The lines of one task's file."""

    def __init__(self, folder: Path, task: Task) -> None:
        """Read what is there."""
        self.path = folder / f"{task.name}.jsonl"
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.rows: list[Record] = [json.loads(line) for line in lines]

    def add(self, row: Record) -> Record:
        """Keep a line, on disk at once."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        return row

    def find(self, piece: str, **values: Any) -> Record | None:
        """The least disturbed line of a piece with these values; of equals the last."""
        rows = [
            row
            for row in reversed(self.rows)
            if row["piece"] == piece and all(row.get(key) == v for key, v in values.items())
        ]
        return min(rows, key=disturbed, default=None)


def disturbed(row: Record) -> float:
    """Share of the processors' time that something else took meanwhile."""
    seconds = row.get("command_s") or row.get("profile_s") or 1.0
    return float(row.get("others_cpu_s") or 0.0) / (seconds * (row.get("cores") or 2))
