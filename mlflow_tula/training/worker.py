"""What every rank of a training run executes: `python -m mlflow_tula.training.worker`.

Builds the job on this rank's device, joins the other ranks, resumes where there is a checkpoint,
and runs the loop. Rank 0 writes what happens as JSON lines (`EVENTS_NAME`) for the parent, and
its result through `ranks.report`. A stop is asked for by SIGTERM, SIGINT or a file (`STOP_NAME`):
it is answered with a checkpoint after the current step.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from mlflow_tula.launch.ranks import FOLDER_VARIABLE, report, run_rank
from mlflow_tula.training.facts import (
    EVENTS_NAME,
    REQUEST_NAME,
    STOP_NAME,
    TrainEvent,
    TrainRequest,
)

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

    from mlflow_tula.training.loop import Setup
    from mlflow_tula.training.peers import Peers
    from mlflow_tula.training.sharding import EvaluationBatches, ShardedBatches
    from mlflow_tula.workloads.datasets import Datasets

_TIMEOUT_MINUTES = 30
_SEED_STRIDE = 1_000_003


def main() -> None:
    """Train as the request says and report."""
    from mlflow_tula.training.checkpoint import load_checkpoint
    from mlflow_tula.training.loop import TrainLoop

    folder = Path(os.environ[FOLDER_VARIABLE])
    request = TrainRequest.from_dict(json.loads((folder / REQUEST_NAME).read_text()))
    stop_requested = _stop_flag(folder / STOP_NAME)
    peers = _join(request)
    setup = set_up(request, peers)
    setup.stop_requested = stop_requested
    with (folder / EVENTS_NAME).open("a", buffering=1) as events:
        loop = TrainLoop(setup, peers=peers, emit=_writer(events))
        state = load_checkpoint(setup.folder, identity=setup.identity)
        if state is not None:
            loop.resume(state)
        del state  # as large as model and optimizer together
        result = loop.run()
    report({"result": None if result is None else result.to_dict()})


def _writer(events: Any) -> Callable[[TrainEvent], None]:
    def write(event: TrainEvent) -> None:
        events.write(json.dumps(event.to_dict()) + "\n")

    return write


def _stop_flag(path: Path) -> Callable[[], bool]:
    """Whether this process has been signalled, or the parent has put the stop file."""
    signalled: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        signalled.append(number)

    signal.signal(signal.SIGTERM, remember)
    signal.signal(signal.SIGINT, remember)
    return lambda: bool(signalled) or path.exists()


def _join(request: TrainRequest) -> Peers:
    """This rank's device, and the process group where there are other ranks."""
    import datetime

    import torch

    from mlflow_tula.training.peers import Peers

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if request.device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device(request.device_type)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if world_size > 1:
        torch.distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            timeout=datetime.timedelta(minutes=_TIMEOUT_MINUTES),
            device_id=device if device.type == "cuda" else None,
        )
    return Peers(rank=rank, world_size=world_size, device=device)


def set_up(request: TrainRequest, peers: Peers) -> Setup:
    """Data, model, optimizer and recipe of one rank."""
    import torch

    from mlflow_tula.training.loop import Setup
    from mlflow_tula.training.method import make_recipe
    from mlflow_tula.training.recipe import shorten_batch_norm_memory
    from mlflow_tula.training.sharding import EvaluationBatches, ShardedBatches
    from mlflow_tula.workloads.datasets import build_datasets
    from mlflow_tula.workloads.losses import build_loss
    from mlflow_tula.workloads.models import AUTOCAST, build_model, has_batch_norm
    from mlflow_tula.workloads.optimizers import build_optimizer
    from mlflow_tula.workloads.parallel import compress_gradients, ddp_options, replicate

    job, plan, device = request.job, request.plan, peers.device
    data = build_datasets(job)
    model = build_model(job, data.num_classes, image_size=data.image_size).to(device)
    batches = ShardedBatches(
        data.train_size,
        plan,
        rank=peers.rank,
        seed=job.seed,
        drop_last=job.drop_last,
        smallest=2 if has_batch_norm(model) else 1,
    )
    total_steps = request.epochs * batches.steps_per_epoch
    momentum = shorten_batch_norm_memory(model.modules(), total_steps)
    test = EvaluationBatches(
        data.test_size,
        plan.local_batch_size,
        rank=peers.rank,
        world_size=plan.world_size,
        equal=job.strategy == "fsdp",
    )
    # After the model is built: ranks share their first weights, and not their dropout masks.
    torch.manual_seed((job.seed * _SEED_STRIDE + peers.rank) % 2**63)
    replica = replicate(
        model,
        strategy=job.strategy,
        world_size=plan.world_size,
        device=device,
        **ddp_options(job),
    )
    compress_gradients(replica, job)
    optimizer = build_optimizer(job, (p for p in model.parameters() if p.requires_grad))
    recipe = make_recipe(
        request,
        optimizer,
        total_steps=total_steps,
        steps_per_epoch=batches.steps_per_epoch,
        device=device,
    )
    recipe.attach(replica)
    return Setup(
        plan=plan,
        epochs=request.epochs,
        limits=request.limits,
        identity=request.identity(),
        folder=Path(request.output_dir),
        model=model,
        replica=replica,
        loss=build_loss(job),
        recipe=recipe,
        batches=batches,
        train_loader=_loader(request, data, batches),
        test_loader=_loader(request, data, test),
        num_test_batches=test.num_real,
        strategy=job.strategy,
        autocast=AUTOCAST.get(job.precision),
        description=_description(request, data, device, momentum, recipe.words),
    )


def _loader(
    request: TrainRequest, data: Datasets, batches: ShardedBatches | EvaluationBatches
) -> DataLoader[Any]:
    """A loader as `build_loader` makes it, but of exactly these batches."""
    from torch.utils.data import DataLoader

    from mlflow_tula.training.sharding import ShardedBatches
    from mlflow_tula.workloads.loaders import build_loader

    dataset = data.train if isinstance(batches, ShardedBatches) else data.test
    made = build_loader(request.job, dataset, 1, shuffle=False, drop_last=False)
    return DataLoader(
        made.dataset,
        batch_sampler=batches,
        collate_fn=made.collate_fn,
        num_workers=made.num_workers,
        persistent_workers=made.persistent_workers,
        pin_memory=made.pin_memory,
        generator=made.generator,
    )


def _description(
    request: TrainRequest,
    data: Datasets,
    device: torch.device,
    momentum: float | None,
    recipe: str,
) -> str:
    """One line: what is trained on what, and what was changed on the way."""
    plan = request.plan
    text = (
        f"{request.job.model_name} on {data.train_size} samples of {request.job.dataset_name}, "
        f"batch {plan.words} on {device.type} ({plan.source}), {recipe}"
    )
    if request.job.strategy != "ddp" and plan.world_size > 1:
        text += f", {request.job.strategy}"
    if momentum is not None:
        text += f", batch-norm momentum raised to {momentum:.3g} for a short training"
    return text


if __name__ == "__main__":
    run_rank(main)
