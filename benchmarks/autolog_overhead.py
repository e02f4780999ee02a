"""What `mlflow_tula.autolog()` adds to a training step: prints a table.

    python benchmarks/autolog_overhead.py --rounds 30 --threads 2

Protocol: ResNet18 (10 classes), 32x32, batch 128, SGD with momentum, a DataLoader, in an MLflow run
on sqlite. Blocks of `--steps` steps without and with autolog take turns, so that whatever else the
machine does falls on both; which comes first alternates. The observer stays on one loop over all of
its blocks, as in a long training: between them its hooks are taken off and put back, which costs no
step anything. The overhead is the median over rounds of the ratio of a round's two means, with a
bootstrap interval of 95 %. Apart from it, which a loaded machine cannot hide: seconds inside the
observer's own hooks per step, gradient samples included, and CPU seconds of the thread that sends
to MLflow, as a share of the time that passed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

import mlflow
import numpy as np
import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mlflow_tula.integrations.facts import ObserverSettings
from mlflow_tula.integrations.loop import Loop
from mlflow_tula.integrations.machine import Layout
from mlflow_tula.integrations.sessions import LoopSession, active_target
from mlflow_tula.integrations.watch import Watch

UNTIMED = 6


class Switched(Watch):
    """A watch whose hooks can be lifted for a block of steps and set down again."""

    own_s = 0.0

    def _before(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        begin = time.perf_counter()
        super()._before(optimizer, args, kwargs)
        self.own_s += time.perf_counter() - begin

    def _after(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        begin = time.perf_counter()
        super()._after(optimizer, args, kwargs)
        self.own_s += time.perf_counter() - begin


class TimedSession(LoopSession):
    """Counts the CPU seconds of sending."""

    sending_s = 0.0

    def flush(self) -> None:
        """Send, and count."""
        begin = time.thread_time()
        super().flush()
        TimedSession.sending_s += time.thread_time() - begin


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Seconds a step without and with, paired by round."""
    images = torch.randn(args.batch_size * args.steps, 3, 32, 32)
    loader = DataLoader(
        TensorDataset(images, torch.randint(0, 10, (len(images),))), batch_size=args.batch_size
    )
    model = torchvision.models.resnet18(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def block() -> float:
        batches, times = iter(loader), []
        last = time.perf_counter()
        for inputs, labels in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            now = time.perf_counter()
            times.append(now - last)
            last = now
        return statistics.fmean(times)

    settings = ObserverSettings(gradient_every_n_steps=args.gradient_every)
    enabled = False
    watch = Switched(
        settings,
        lambda loop: TimedSession(loop, settings, active_target, layout=Layout()),
        enabled=lambda: enabled,
    )
    watch.start()
    pairs: list[tuple[float, float]] = []
    with mlflow.start_run():
        enabled = True
        while _steps(watch) < UNTIMED:
            block()
        watch.own_s = TimedSession.sending_s = 0.0
        began = time.perf_counter()
        before = _steps(watch)
        for number in range(args.rounds):
            found = {}
            for wanted in (False, True) if number % 2 else (True, False):
                enabled = wanted
                if not wanted:
                    for session in watch._open_sessions():
                        session.loop.release()
                found[wanted] = block()
            pairs.append((found[False], found[True]))
        steps = _steps(watch) - before
        own = watch.own_s / steps
        sending = TimedSession.sending_s / (time.perf_counter() - began)
        watch.stop()
    ratios = np.array([on / off - 1 for off, on in pairs])
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    plain = statistics.median(off for off, _ in pairs)
    return {
        "step_s": plain,
        "overhead": float(np.median(ratios)),
        "low": float(low),
        "high": float(high),
        "own_s": own,
        "own_share": own / plain,
        "sending_share": sending,
        "steps": steps,
    }


def _steps(watch: Watch) -> int:
    loops: list[Loop] = [session.loop for session in watch._open_sessions()]
    return loops[0].step if loops else 0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=5, help="steps of a block")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--gradient-every", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--markdown", help="also write the table to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
        found = measure(args)
    text = (
        "| step | overhead, paired | 95 % interval | own hooks a step | of the step "
        "| sending | steps |\n|---|---|---|---|---|---|---|\n"
        f"| {found['step_s'] * 1e3:.0f} ms | {found['overhead']:.2%} | {found['low']:.2%} to "
        f"{found['high']:.2%} | {found['own_s'] * 1e3:.2f} ms | {found['own_share']:.2%} | "
        f"{found['sending_share']:.2%} | {found['steps']} |\n"
    )
    print(text, end="")
    if args.markdown:
        Path(args.markdown).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
