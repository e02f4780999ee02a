"""What the large-batch methods add to an optimizer step: prints a table.

    python benchmarks/method_overhead.py --steps 20 --threads 2

Protocol: ResNet18 (10 classes), 32x32, batch 128, SGD with momentum 0.9. Every method has a model
of its own with the same weights and data; the methods take turns step by step, so that whatever
else the machine does falls on all of them; medians over steps after two untimed ones. With one
thread the clock is the process's own time, else wall time. Timed apart:
forward and backward, `optimizer.step()`, and one pass over the gradients (their norm), which is the
least that any norm-based method can cost.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch
import torchvision
from torch import nn
from torch.optim import Optimizer

from mlflow_tula.methods import AdaptiveGradientScaling, NormClipping, recipe


def _bare(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


METHODS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "bare": _bare,
    "ags, update mode": lambda m: AdaptiveGradientScaling(_bare(m), 4.0, mode="update"),
    "ags, gradient mode": lambda m: AdaptiveGradientScaling(_bare(m), 4.0),
    "norm clip": lambda m: NormClipping(_bare(m), 1.0),
    "recipe": lambda m: recipe(
        m, batch_size=128, reference_batch_size=32, reference_learning_rate=0.0025
    )[0],
}
UNTIMED = 2


def measure(steps: int, batch_size: int, device: str) -> dict[str, tuple[float, float, float]]:
    """Median seconds of forward and backward, step, and norm pass of each method."""
    images = torch.randn(batch_size, 3, 32, 32, device=device)
    labels = torch.randint(0, 10, (batch_size,), device=device)
    running = []
    for name, make in METHODS.items():
        torch.manual_seed(0)
        model = torchvision.models.resnet18(num_classes=10).to(device)
        running.append((name, model, make(model)))
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in METHODS}
    for step in range(steps + UNTIMED):
        # a new order each round: no method always runs on the caches its neighbour left
        first = step % len(running)
        for name, model, optimizer in running[first:] + running[:first]:
            optimizer.zero_grad()
            marks = [_now(device)]
            nn.functional.cross_entropy(model(images), labels).backward()
            marks.append(_now(device))
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            torch.nn.utils.get_total_norm(gradients)
            marks.append(_now(device))
            optimizer.step()
            marks.append(_now(device))
            if step >= UNTIMED:
                passes, norm, stepping = (b - a for a, b in itertools.pairwise(marks))
                times[name].append((passes, stepping, norm))
    return {
        name: (
            statistics.median(t[0] for t in rows),
            statistics.median(t[1] for t in rows),
            statistics.median(t[2] for t in rows),
        )
        for name, rows in times.items()
    }


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    # one thread's own time holds on a machine that does other things as well
    own_time = device == "cpu" and torch.get_num_threads() == 1
    return time.process_time() if own_time else time.perf_counter()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = measure(args.steps, args.batch_size, args.device)
    passes, bare, norm = results["bare"]
    whole = passes + bare
    print(f"whole step {whole * 1e3:.1f} ms, of it optimizer {bare * 1e3:.2f} ms; ", end="")
    print(f"one pass over the gradients {norm * 1e3:.2f} ms ({norm / whole:.2%} of the step)")
    print(f"{'method':20} {'step()':>10} {'added':>10} {'of step':>9} {'of a pass':>10}")
    for name, (_, stepping, _) in results.items():
        added = stepping - bare
        print(
            f"{name:20} {stepping * 1e3:7.2f} ms {added * 1e3:7.2f} ms {added / whole:9.2%} "
            f"{added / norm:9.2f}x"
        )


if __name__ == "__main__":
    main()
