"""Measure a training job at a few batch sizes and world sizes: the ProfileTable.

    from mlflow_tula.profiler import profile

    table = profile(job=Job(model="vgg11"))                        # a built-in model
    table = profile(model_fn=make_net, dataset=load_data)          # your own, from your script

Each probe runs real training steps (forward, backward, all-reduce, optimizer) in child processes
started through torch.distributed.run, one group of ranks for each world size; mlflow_tula.probing
says how a probe is timed and what its memory numbers mean. This process imports no torch and holds
nothing of a probe; a crash, a kill or an out-of-memory of a rank is a row with its reason.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from mlflow_tula.errors import InvalidInputError, ProfilingError, UnknownNameError
from mlflow_tula.hardware import detect
from mlflow_tula.launch import RankFailedError
from mlflow_tula.launch.cluster import Cluster
from mlflow_tula.probing.events import ProfileEvent, SweepRequest
from mlflow_tula.probing.measure import is_input_bound
from mlflow_tula.probing.own import reference, save_tensors
from mlflow_tula.probing.plan import (
    candidates,
    check_batch_sizes,
    check_node_counts,
    check_world_sizes,
)
from mlflow_tula.probing.settings import ProbeSettings
from mlflow_tula.probing.sweep import Sweep
from mlflow_tula.specs import Workload, check_int, check_real
from mlflow_tula.table import Compression, LinkMeasurement, ProfileTable
from mlflow_tula.workloads.job import Job, is_import_path

__all__ = ["ProbeSettings", "ProfileEvent", "ProfileInterrupted", "is_input_bound", "profile"]


class ProfileInterrupted(KeyboardInterrupt):
    """Ctrl-C during a sweep: every rank is gone, and `table` holds what was measured."""

    def __init__(self, table: ProfileTable | None) -> None:
        """Keep the table; None when nothing had begun."""
        super().__init__("profiling was interrupted")
        self.table = table


def profile(
    model_fn: Callable[..., Any] | str | None = None,
    dataset: Any = None,
    loss_fn: Callable[..., Any] | str | None = None,
    optimizer_fn: Callable[..., Any] | str | None = None,
    *,
    job: Job | None = None,
    batch_sizes: Sequence[int] | Literal["auto"] = "auto",
    world_sizes: Sequence[int] | Literal["auto"] = "auto",
    search: Literal["auto", "partial", "full"] = "auto",
    time_budget_s: float | None = None,
    warmup_steps: int = ProbeSettings().warmup_steps,
    max_steps: int = ProbeSettings().max_steps,
    accumulation_steps: int | Sequence[int] = 1,
    gradient_compression: Sequence[Compression | None] = (None,),
    node_counts: Sequence[int] | Literal["auto"] = "auto",
    cluster: Cluster | None = None,
    known_links: Sequence[LinkMeasurement] = (),
    memory_limit_bytes: int | None = None,
    max_batch_size: int | None = None,
    threads_per_rank: int | None = None,
    settings: ProbeSettings | None = None,
    probe_timeout_s: float = 900.0,
    workload: Workload | None = None,
    on_event: Callable[[ProfileEvent], None] | None = None,
    output: Path | str | None = None,
    resume_from: ProfileTable | None = None,
) -> ProfileTable:
    """Measure step time, memory and gradient statistics at a few batch sizes.

    Args:
        model_fn: returns a new model; a function or class at the top level of a module (child
            processes import it), `package.module:function`, or a torchvision name.
        dataset: returns the training data; such a function, a TensorDataset, or a built-in name.
        loss_fn: `loss_fn(output, target) -> scalar`; cross entropy by default.
        optimizer_fn: `optimizer_fn(parameters) -> Optimizer`; SGD with momentum by default.
        job: a whole training job instead; what is named above replaces its parts.
        batch_sizes: samples per rank and pass; `auto` takes powers of two from 8 to the dataset.
        world_sizes: ranks; `auto` takes 1 and all devices (on a CPU: 1 and 2).
        search: `full` measures every candidate, `partial` few of them, chosen by their worth to
            the decision; `auto` is partial for `auto` batch sizes and full for a list.
        time_budget_s: no probe is begun that would end later; None: for a partial search over
            `auto` batch sizes 150 s, or 75 s where the smallest takes less than 0.2 s a step;
            else none.
        warmup_steps: untimed steps of each probe, at least 2.
        max_steps: timed steps of each probe at most.
        accumulation_steps: passes per optimizer step; several numbers are each measured.
        gradient_compression: how gradients are sent among ranks, each is measured: None as they
            are, `bf16` by DDP's compression hook.
        node_counts: numbers of nodes, each with the most of `world_sizes`; `auto`: one and all.
        cluster: the nodes that a launcher started this command on (docs/distributed.md).
        known_links: all-reduce times of this hardware that are known already: a single message
            checks them, and the communication probe is skipped.
        memory_limit_bytes: of one rank; what is predicted to exceed it is not run, and an
            allocation beyond it fails. None: the device's memory, on a CPU the rank's share of
            what is available.
        max_batch_size: no larger local batch size is tried.
        threads_per_rank: OpenMP threads of each rank; None divides the cores among the ranks.
        settings: how a probe is measured, in full; replaces warmup_steps and max_steps.
        probe_timeout_s: a probe without an answer for so long (and ten times what it should take)
            is ended, and its row says so.
        workload: describes the job; None asks the ranks.
        on_event: called at each start and end of a probe, in this thread.
        output: JSON file of the table so far, replaced after each probe.
        resume_from: rows that were measured before count as answers.

    Raises:
        InvalidInputError: the request was wrong; nothing is left running.
        ProfilingError: nothing could be measured; chained to the last failure.
        ProfileInterrupted: Ctrl-C (a KeyboardInterrupt); its `table` keeps what was measured.
    """
    settings = settings or ProbeSettings(warmup_steps=warmup_steps, max_steps=max_steps)
    sizes = check_batch_sizes(batch_sizes)
    if search not in ("auto", "partial", "full"):
        raise UnknownNameError("search", str(search), ("auto", "partial", "full"))
    if max_batch_size is not None:
        max_batch_size = check_int("max_batch_size", max_batch_size)
    partial = search == "partial" or (search == "auto" and sizes is None)
    if time_budget_s is not None:
        check_real("time_budget_s", time_budget_s, strict=True)
    hardware = detect()
    with _own_parts(model_fn, dataset, loss_fn, optimizer_fn, job) as (whole_job, whole):
        for compression in gradient_compression:
            whole_job.replace(gradient_compression=compression)  # refused where it cannot be
        request = SweepRequest(
            job=whole_job,
            whole=whole,
            hardware=hardware,
            world_sizes=tuple(check_world_sizes(world_sizes, hardware)),
            settings=settings,
            search="partial" if partial else "full",
            time_budget_s=time_budget_s,
            auto_budget=time_budget_s is None and partial and sizes is None,
            memory_limit_bytes=_limit(memory_limit_bytes),
            threads_per_rank=threads_per_rank,
            walk_down=sizes is None,
            probe_timeout_s=check_real("probe_timeout_s", probe_timeout_s, strict=True),
            node_counts=tuple(
                check_node_counts(node_counts, 1 if cluster is None else cluster.place.nodes)
            ),
            cluster=cluster,
            known_links=tuple(known_links),
        )
        with Sweep(request, on_event=on_event, output=_writable(output)) as sweep:
            try:
                found = workload or sweep.start()
                _check_resume(resume_from, found)
                probes = candidates(
                    found,
                    request.world_sizes,
                    sizes,
                    accumulation_steps=accumulation_steps,
                    max_batch_size=max_batch_size,
                    node_counts=request.node_counts,
                    compressions=gradient_compression,
                )
                return sweep.run(found, probes, resume_from)
            except RankFailedError as error:
                raise ProfilingError(f"the ranks did not start: {error}") from error
            except KeyboardInterrupt as error:
                raise ProfileInterrupted(sweep.table) from error


@contextlib.contextmanager
def _own_parts(
    model_fn: Callable[..., Any] | str | None,
    dataset: Any,
    loss_fn: Callable[..., Any] | str | None,
    optimizer_fn: Callable[..., Any] | str | None,
    job: Job | None,
) -> Iterator[tuple[Job, bool]]:
    """The job with what the caller named put in, and whether its own dataset is all for training.

    A job's own dataset is split as `tula train` splits it; one that is handed to `profile` is what
    the caller's own loop trains on, all of it.
    """
    if job is None and model_fn is None:
        raise InvalidInputError(
            "profile needs model_fn (a function that returns a model, or a name) or job"
        )
    with tempfile.TemporaryDirectory(prefix="tula-data-") as folder:
        changes: dict[str, Any] = {}
        for name, field, value in (
            ("model_fn", "model", model_fn),
            ("loss_fn", "loss", loss_fn),
            ("optimizer_fn", "optimizer", optimizer_fn),
        ):
            if value is not None:
                changes[field] = reference(value, name)
        if dataset is not None:
            saved = save_tensors(dataset, Path(folder))
            changes["dataset"] = f"{saved}:tensors" if saved else reference(dataset, "dataset")
        whole = dataset is not None and is_import_path(changes["dataset"])
        yield (Job(**changes) if job is None else job.replace(**changes)), whole


def _check_resume(resume_from: ProfileTable | None, workload: Workload) -> None:
    """Rows of another workload or another machine are no answers."""
    if resume_from is None:
        return
    if resume_from.workload.slug != workload.slug:
        raise InvalidInputError(
            f"resume_from holds {resume_from.workload.slug}, not {workload.slug}: profile anew"
        )
    if resume_from.hardware.fingerprint != detect().fingerprint:
        raise InvalidInputError(
            f"resume_from was measured on {resume_from.hardware.slug}, not {detect().slug}: "
            f"profile anew"
        )


def _limit(memory_limit_bytes: int | None) -> int | None:
    if memory_limit_bytes is None:
        return None
    return check_int("memory_limit_bytes", memory_limit_bytes, maximum=2**60)


def _writable(output: Path | str | None) -> Path | None:
    """The output's path, in a folder that exists, or InvalidInputError before anything starts."""
    if output is None:
        return None
    path = Path(output)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(f"cannot write output {str(path)!r}: {error.strerror}") from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise InvalidInputError(
            f"cannot write output {str(path)!r}: give a file in a folder of yours"
        )
    return path
