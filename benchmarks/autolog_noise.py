"""How near autolog's noise scale comes to that of whole batches: prints a table.

    python benchmarks/autolog_noise.py

Protocol: four small networks learn scikit-learn's digits with SGD (momentum 0.9, batch 64). At five
moments of the training the weights are held, and the noise scale is measured as its definition has
it, from the norms of `--batches` batches of 64 and of the gradient of all samples; beside it stands
what `LayerNoise` makes of ten steps at the same weights, as autolog does of the steps it samples.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from mlflow_tula.gradients import gradient_norm, noise_scale
from mlflow_tula.integrations.layer_noise import LayerNoise

BATCH = 64
MOMENTS = (5, 20, 60, 100, 160)


def cnn() -> nn.Module:
    """Convolution and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 64, 10)
    )


def cnn_with_batch_norm() -> nn.Module:
    """Three convolutions with batch normalization, no biases before it."""
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((1, 32, 1), (32, 64, 2), (64, 64, 1)):
        layers += [
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def mlp() -> nn.Module:
    """Three linear layers."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),
        nn.Linear(256, 10),
    )  # fmt: skip


class Transformer(nn.Module):
    """Two encoder layers over the rows of an image."""

    def __init__(self) -> None:
        """Build."""
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
        self.rows, self.head = nn.Linear(8, 64), nn.Linear(64, 10)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Class scores of 1x8x8 images."""
        scores: torch.Tensor = self.head(self.encoder(self.rows(images.squeeze(1))).mean(1))
        return scores


NETWORKS = {
    "convolution": cnn,
    "convolutions, batch norm": cnn_with_batch_norm,
    "MLP": mlp,
    "transformer": Transformer,
}


def compare(model: nn.Module, batches: int) -> list[tuple[float, float | None]]:
    """True and estimated noise scale at each moment."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def gradient(rows: torch.Tensor) -> float:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        return gradient_norm(model.parameters())

    def draw() -> torch.Tensor:
        return torch.randint(0, len(images), (BATCH,))

    found = []
    for step in range(1, max(MOMENTS) + 1):
        gradient(draw())
        optimizer.step()
        if step in MOMENTS:
            small = [gradient(draw()) for _ in range(batches)]
            whole = gradient(torch.arange(len(images)))
            true = noise_scale(small, [whole], small_batch=BATCH, large_batch=10**9)
            watched = LayerNoise()
            for _ in range(10):
                watched.arm(model)
                gradient(draw())
                watched.finish()
            assert true is not None
            found.append((true, watched.noise_scale()))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--markdown", help="also write the table to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    heads = " | ".join(f"step {moment}" for moment in MOMENTS)
    lines = [f"| network | {heads} | ratio, median |", "|---" * (len(MOMENTS) + 2) + "|"]
    for name, make in NETWORKS.items():
        torch.manual_seed(0)
        found = compare(make(), args.batches)
        cells = [
            f"{'none' if seen is None else round(seen)} ({round(true)})" for true, seen in found
        ]
        ratios = [seen / true for true, seen in found if seen is not None and true > 0]
        middle = f"{statistics.median(ratios):.2f}" if ratios else "none"
        lines.append(f"| {name} | {' | '.join(cells)} | {middle} |")
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if args.markdown:
        Path(args.markdown).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
