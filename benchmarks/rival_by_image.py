"""How sure a difference between two methods is: over seeds, and over the images that are asked.

    python benchmarks/rival_by_image.py --rival lamb --seeds 5

Seeds tell how much a difference moves when the same images are asked again. Another test split of
as many images would move it as well: by the standard deviation over images of the difference
between the two methods' shares of seeds that had an image right, over the root of their number.
Settings are those of the record file (Fashion-MNIST, batch 512, benchmarks/generalization.py), on
the test split and on the validation split (a fifth of the training images, with other seeds).
"""

from __future__ import annotations

import argparse
import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
from generalization import PLANS, records_of

from mlflow_tula.compare import compare
from mlflow_tula.comparing.facts import Split, Trial
from mlflow_tula.comparing.trial import right_images

FIRST_SEED: dict[Split, int] = {"test": 0, "validation": 2000}


def trials(dataset: str, rival: str) -> dict[str, Trial]:
    """The recorded trials of `auto` and of the rival at its own best settings."""
    plan = replace(PLANS[dataset], methods=(rival, "auto"))
    found = compare(plan, records_of(plan), only_recorded=True).outcomes
    return {one.trial.method: one.trial for one in found if one.trial.batch_size == 512}


def _right(trial: Trial) -> torch.Tensor:
    torch.set_num_threads(1)
    return right_images(trial).float()


def main() -> None:
    """Train, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dataset", choices=tuple(PLANS), default="fashion_mnist")
    parser.add_argument("--rival", default="lamb")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    of = trials(args.dataset, args.rival)
    splits: tuple[Split, ...] = ("test", "validation")
    todo = [
        replace(of[method], split=split, seed=FIRST_SEED[split] + seed)
        for split, method, seed in product(splits, ("auto", args.rival), range(args.seeds))
    ]
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        right = dict(zip(todo, pool.map(_right, todo), strict=True))
    lines = [
        f"| split | images | auto % | {args.rival} % | difference, points | standard error: seeds "
        "| images |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for split in splits:
        auto, rival = (
            torch.stack([r for t, r in right.items() if (t.split, t.method) == (split, method)])
            for method in ("auto", args.rival)
        )
        difference = 100 * (auto - rival)
        by_seed, by_image = difference.mean(1), difference.mean(0)
        lines.append(
            f"| {split} | {len(by_image):,} | {100 * auto.mean():.2f} | {100 * rival.mean():.2f} | "
            f"{difference.mean():+.2f} | {by_seed.std() / math.sqrt(len(by_seed)):.2f} | "
            f"{by_image.std() / math.sqrt(len(by_image)):.2f} |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    if args.markdown is not None:
        args.markdown.write_text(text)


if __name__ == "__main__":
    main()
