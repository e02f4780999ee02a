"""Train a job with a decided batch size: `train(job, plan, epochs=10, output_dir="out")`.

    plan = BatchPlan.of(128, devices_per_node=2)
    result = train(Job(model="resnet18"), plan, epochs=10, output_dir="out", on_event=print)

The work is done by one child process per device (DistributedDataParallel where there are several;
gloo on a CPU, NCCL on CUDA), started through torch.distributed.run even where there is only one:
a crash of a rank is an error with its reason, and never the end of the caller. This module does
not import torch.

What `output_dir` holds:

    decision.json             job, plan, epochs, schedule: written before the first step
    checkpoint.pt             see checkpoint.py
    checkpoint.previous.pt
    training.log              what the ranks printed, where they failed
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mlflow_tula import errors
from mlflow_tula.documents import check_document
from mlflow_tula.errors import InvalidInputError, SlowRankWarning, StoreError, TrainingError
from mlflow_tula.files import read_json, write_json
from mlflow_tula.hardware import detect
from mlflow_tula.launch import RankFailedError, RankGroup
from mlflow_tula.launch.cluster import Cluster
from mlflow_tula.launch.failures import RankFailure
from mlflow_tula.specs import DeviceType, check_int
from mlflow_tula.training.checkpoint import (
    has_checkpoint,
    remove_checkpoints,
    remove_partial,
    training_difference,
)
from mlflow_tula.training.elastic import Restarts
from mlflow_tula.training.facts import (
    EVENTS_NAME,
    REQUEST_NAME,
    STOP_NAME,
    BatchPlan,
    EpochRecord,
    Limits,
    Schedule,
    StepRecord,
    TrainEvent,
    TrainRequest,
    TrainResult,
)
from mlflow_tula.training.parent import EventReader, OnEvent, Told, signals_kept
from mlflow_tula.workloads.job import Job

__all__ = [
    "BatchPlan",
    "EpochRecord",
    "Limits",
    "Schedule",
    "StepRecord",
    "TrainEvent",
    "TrainResult",
    "saved_plan",
    "train",
]

DECISION_NAME = "decision.json"
DECISION_KIND = "tula.training_decision"
DECISION_SCHEMA_VERSION = 1
LOG_NAME = "training.log"

_POLL_S = 0.1
_GRACE_S = 60.0
_PEERS_GRACE_S = 10.0
"""After one rank told of its failure, so long may the others take to end by themselves."""

_logger = logging.getLogger(__name__)


def train(
    job: Job,
    plan: BatchPlan,
    *,
    epochs: int,
    output_dir: str | Path,
    resume: bool = True,
    schedule: Schedule | None = None,
    limits: Limits | None = None,
    on_event: OnEvent | None = None,
    threads_per_rank: int | None = None,
    max_restarts: int = 0,
    node_rank: int = 0,
    master: str = "",
    cluster: Cluster | None = None,
) -> TrainResult:
    """Train to the last epoch, or to a limit, and return how it went.

    A folder with a checkpoint of the same job, plan, number of epochs and schedule is resumed from
    there, to the same result that an unbroken run gives (bitwise on one CPU rank); one that is
    done already returns its result at once.

    Args:
        job: what to train.
        plan: the decided batch and devices; see `saved_plan` for the decision of a broken run.
        epochs: passes over the training split; the schedule's length.
        output_dir: for checkpoints; made where it is absent. Shared by all nodes.
        resume: False removes the checkpoints of `output_dir` and starts anew.
        schedule: learning rate and clipping; None takes the defaults.
        limits: when to stop before the last epoch, and when to save.
        on_event: called in this thread, with everything from the first step to the last.
        threads_per_rank: OpenMP threads; None divides the cores among the local ranks.
        max_restarts: so often a training whose ranks failed goes on from its last checkpoint,
            with the same global batch (training/elastic.py says how).
        node_rank: this machine's place among `plan.nodes`; call `train` on each of them.
        master: `host:port` of node 0, where there is more than one node.
        cluster: the nodes of this command, in the place of `node_rank` and `master`: called on
            node 0, the others follow.

    Raises:
        InvalidInputError: the request is wrong, or the checkpoint belongs to another training.
        TrainingError: a rank failed; names it and its reason. The last checkpoint is kept.
        KeyboardInterrupt: and whatever else SIGINT, SIGTERM or SIGHUP do here, after a checkpoint.
    """
    folder = Path(output_dir).absolute()
    request = TrainRequest(
        job=job,
        plan=plan,
        epochs=epochs,
        output_dir=str(folder),
        schedule=schedule or Schedule(),
        limits=limits or Limits(),
        device_type=_device_type(job, plan),
    )
    with _alone_in(folder, node_rank):
        if node_rank == 0:
            _settle(request, folder, resume=resume)

        def start(request: TrainRequest) -> RankGroup:
            return RankGroup(
                "mlflow_tula.training.worker",
                num_ranks=request.plan.devices_per_node,
                threads_per_rank=threads_per_rank,
                nodes=request.plan.nodes,
                node_rank=node_rank,
                master=master,
                cluster=cluster,
                files={REQUEST_NAME: json.dumps(request.to_dict())},
            )

        restarts = Restarts(check_int("max_restarts", max_restarts, minimum=0))
        return _run_on(start, request, restarts, cluster, on_event or (lambda event: None))


def saved_plan(output_dir: str | Path) -> BatchPlan | None:
    """The decision of the training that `output_dir` was made for; None without one.

    A resumed training keeps its batch size, whatever would be recommended today.

    Raises:
        SchemaError: the file is damaged, or of a newer version.
    """
    path = Path(output_dir) / DECISION_NAME
    if not path.exists():
        return None
    return BatchPlan.from_dict(_decision(path)["plan"])


def _decision(path: Path) -> dict[str, Any]:
    document = read_json(path, made_by="tula train")
    check_document(document, kind=DECISION_KIND, version=DECISION_SCHEMA_VERSION)
    return document


def _device_type(job: Job, plan: BatchPlan) -> DeviceType:
    """The device to train on, or an error where this machine does not have what is asked."""
    if job.strategy == "fsdp" and plan.balance:
        raise InvalidInputError(
            "uneven batches of FSDP cannot be found automatically, since its ranks wait for each "
            "other within a pass: give one local batch size a rank, or take ddp"
        )
    hardware = detect()
    if plan.devices_per_node > hardware.devices_per_node:
        kind = "cores, one rank each" if hardware.device_type == "cpu" else "devices"
        raise InvalidInputError(
            f"devices_per_node must be at most this machine's {hardware.devices_per_node} "
            f"({hardware.device_name}: {kind}), not {plan.devices_per_node}"
        )
    return hardware.device_type


@contextmanager
def _alone_in(folder: Path, node_rank: int) -> Iterator[None]:
    """Make the folder and hold it: two trainings would overwrite each other's checkpoints."""
    lock = FileLock(folder / f".training-{node_rank}.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise InvalidInputError(
            f"another training is at work in {folder}: wait for it, or give another output folder"
        ) from error
    except OSError as error:
        raise StoreError(
            f"cannot use {folder} for checkpoints: {error.strerror or error}; give another output "
            "folder"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _settle(request: TrainRequest, folder: Path, *, resume: bool) -> None:
    """Write the decision down, or see that it is the one that the checkpoints were made with."""
    path = folder / DECISION_NAME
    identity = request.identity()
    remove_partial(folder)
    if not resume:
        remove_checkpoints(folder)
    elif has_checkpoint(folder) and path.exists():
        difference = training_difference(_decision(path)["identity"], identity)
        if difference is not None:
            raise InvalidInputError(
                f"{folder} holds another training ({difference}): give another output folder, or "
                "start anew without resuming (--output-dir, --resume false)"
            )
        return
    document = {
        "kind": DECISION_KIND,
        "schema_version": DECISION_SCHEMA_VERSION,
        "plan": request.plan.to_dict(),
        "job": request.job.to_dict(),
        "identity": identity,
    }
    write_json(path, document)


def _run_on(
    start: Callable[[TrainRequest], RankGroup],
    request: TrainRequest,
    restarts: Restarts,
    cluster: Cluster | None,
    on_event: OnEvent,
) -> TrainResult:
    """Run the ranks, and start anew where they failed and may go on."""
    told, began, output_dir = Told(on_event), time.monotonic(), Path(request.output_dir)
    notes: list[str] = []
    while True:
        try:
            result = _run(start(request), request, told)
            for text in result.warnings:
                warnings.warn(text, SlowRankWarning, stacklevel=3)
            return dataclasses.replace(
                result, restarts=restarts.num, warnings=(*notes, *result.warnings)
            )
        except RankFailedError as error:
            following = restarts.after(
                error.failure,
                request.plan,
                saved_step=told.saved_step if has_checkpoint(output_dir) else 0,
                nodes=request.plan.nodes if cluster is None else cluster.present,
            )
            if following.plan is None:
                raise _as_error(error.failure, output_dir, following.reason) from error
            _logger.warning("%s", following.reason)
            notes.append(following.reason)
            told.warn(following.reason)
            limits = request.limits.after(time.monotonic() - began)
            request = dataclasses.replace(request, plan=following.plan, limits=limits)


def _run(group: RankGroup, request: TrainRequest, on_event: OnEvent) -> TrainResult:
    """Start the ranks, pass their events on, and turn their end into a result or an error."""
    output_dir = Path(request.output_dir)
    events = EventReader(group.folder / EVENTS_NAME)
    with signals_kept() as received, group:
        _follow(group, events, on_event, received)
        if received and group.poll() is None:
            _logger.warning("training did not stop within %.0f s and is ended", _GRACE_S)
            group.stop()
        events.pass_on(on_event)
        if not received:
            result = _outcome(group, output_dir)
    if received:
        # What was there before decides: KeyboardInterrupt, the end of the process, a handler.
        signal.raise_signal(received[0])
        raise TrainingError(
            f"training was stopped by {signal.Signals(received[0]).name}; the same call resumes "
            f"from the checkpoint in {output_dir}"
        )
    return result


def _follow(group: RankGroup, events: EventReader, on_event: OnEvent, received: list[int]) -> None:
    """Until the ranks are gone: pass events on, and hand a signal down as the stop file."""
    deadline = math.inf
    while group.poll() is None and time.monotonic() < deadline:
        events.pass_on(on_event)
        if deadline == math.inf and any(group.folder.glob("failure-rank*.json")):
            deadline = time.monotonic() + _PEERS_GRACE_S
        if received and deadline == math.inf:
            (group.folder / STOP_NAME).touch()
            deadline = time.monotonic() + _GRACE_S
        if len(received) > 1:  # asked twice: at once
            break
        time.sleep(_POLL_S)


def _outcome(group: RankGroup, output_dir: Path) -> TrainResult:
    """The result of ranks that have ended, or the error that they ended with."""
    try:
        group.stop_failed()
        group.wait()
    except RankFailedError:
        with contextlib.suppress(OSError):
            shutil.copy(group.folder / "log.txt", output_dir / LOG_NAME)
        raise
    # Every rank reports the same; on a further node they are not numbered from 0.
    reports = sorted(group.folder.glob("result-rank*.json"))
    document = json.loads(reports[0].read_text())["result"] if reports else None
    if document is None:
        raise TrainingError(
            "training was stopped by a signal to its ranks; the same call resumes from the "
            f"checkpoint in {output_dir}"
        )
    return TrainResult.from_dict(document)


def _as_error(failure: RankFailure, output_dir: Path, note: str = "") -> errors.TulaError:
    """A rank's failure in the words and the class that fit the caller."""
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, InvalidInputError | StoreError):
        # UnknownNameError and its kin make their messages themselves.
        plain = StoreError if issubclass(kind, StoreError) else InvalidInputError
        return plain(failure.message)
    way_out = f"its log is {output_dir / LOG_NAME}"
    if failure.status == "oom":
        way_out = "take a smaller local batch size, or more accumulation steps"
    if has_checkpoint(output_dir):
        way_out += f"; the checkpoint in {output_dir} is kept"
    if note:
        way_out = f"{note}; {way_out}"
    return TrainingError(f"training failed: {failure.reason} ({way_out})")
