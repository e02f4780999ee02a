"""Job -> Workload: what is known of a job before anything runs."""

from __future__ import annotations

from mlflow_tula.specs import Workload
from mlflow_tula.workloads.datasets import Datasets, build_datasets
from mlflow_tula.workloads.job import Job, import_path_name
from mlflow_tula.workloads.losses import build_loss
from mlflow_tula.workloads.models import build_model, has_batch_norm, num_parameters
from mlflow_tula.workloads.optimizers import build_optimizer
from mlflow_tula.workloads.parallel import blocks, largest_block


def describe(job: Job, datasets: Datasets | None = None) -> Workload:
    """Load the dataset (unless given) and build the model without its weights.

    Unknown names and absent folders raise here, within about a second, before any process is
    started. `describe(job).slug == job.workload_slug`.
    """
    data = datasets or build_datasets(job)
    model = build_model(job, data.num_classes, image_size=data.image_size, device="meta")
    build_loss(job)
    build_optimizer(job, model.parameters())
    return Workload(
        model=job.model_name,
        dataset=job.dataset_name,
        dataset_size=data.train_size,
        image_size=data.image_size,
        num_classes=data.num_classes,
        precision=job.precision,
        optimizer=import_path_name(job.optimizer),
        strategy=job.strategy,
        drop_last=job.drop_last,
        num_parameters=num_parameters(model),
        batch_norm=has_batch_norm(model),
        variant=job.variant,
        block_parameters=largest_block(model) if job.strategy == "fsdp" else None,
        num_blocks=len(blocks(model)) + 1 if job.strategy == "fsdp" else None,
    )
