"""Small networks that train in seconds on one core; conv_norm and conv_pool have batch norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from mlflow_tula.errors import InvalidInputError, UnknownNameError
from mlflow_tula.workloads.job import is_import_path
from mlflow_tula.workloads.resolve import resolve_callable

DEFAULT_NETWORKS = {"mnist1d": "conv1d", "digits": "conv"}
"""For other datasets: conv_stride for images of 28 pixels and more."""


def _mlp(shape: Sequence[int], classes: int) -> nn.Module:
    size = int(torch.Size(shape).numel())
    return nn.Sequential(nn.Flatten(), nn.Linear(size, 128), nn.ReLU(), nn.Linear(128, classes))


def _conv(shape: Sequence[int], classes: int) -> nn.Module:
    _needs(shape, 3, "conv")
    side = (shape[1] + 1) // 2 * ((shape[2] + 1) // 2)
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * side, classes),
    )


def _conv_stride(shape: Sequence[int], classes: int, *, norm: bool = False) -> nn.Module:
    _needs(shape, 3, "conv_stride")

    def block(inputs: int, outputs: int, kernel: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, kernel, stride=2, padding=kernel // 2)
        return [convolution, *([nn.BatchNorm2d(outputs)] if norm else []), nn.ReLU()]

    body = nn.Sequential(*block(shape[0], 8, 5), *block(8, 16, 3), nn.Flatten())
    with torch.no_grad():
        width = body.eval()(torch.zeros(1, *shape)).shape[1]
    return nn.Sequential(body.train(), nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, classes))


def _conv_norm(shape: Sequence[int], classes: int) -> nn.Module:
    return _conv_stride(shape, classes, norm=True)


def _conv_pool(shape: Sequence[int], classes: int) -> nn.Module:
    """Half the resolution first: a third of conv_norm's time."""
    _needs(shape, 3, "conv_pool")
    side = -(-(shape[1] // 2) // 4) * -(-(shape[2] // 2) // 4)
    return nn.Sequential(
        nn.AvgPool2d(2),
        nn.Conv2d(shape[0], 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * side, classes),
    )


def _conv1d(shape: Sequence[int], classes: int) -> nn.Module:
    _needs(shape, 2, "conv1d")
    body = nn.Sequential(
        nn.Conv1d(shape[0], 25, 5, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv1d(25, 25, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv1d(25, 25, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
    )
    with torch.no_grad():
        width = body(torch.zeros(1, *shape)).shape[1]
    return nn.Sequential(body, nn.Linear(width, classes))


NETWORKS: dict[str, Callable[[Sequence[int], int], nn.Module]] = {
    "mlp": _mlp,
    "conv": _conv,
    "conv_stride": _conv_stride,
    "conv_norm": _conv_norm,
    "conv_pool": _conv_pool,
    "conv1d": _conv1d,
}


def network_for(dataset: str) -> str:
    """The network that `auto` stands for."""
    return DEFAULT_NETWORKS.get(dataset, "conv_stride")


def wants_rgb(network: str) -> bool:
    """Whether the network is one of torchvision's, which take three channels of 32 pixels."""
    return network not in (*NETWORKS, "auto") and not is_import_path(network)


def build_network(network: str, dataset: str, shape: Sequence[int], classes: int) -> nn.Module:
    """The network by name for inputs of this shape (without the batch dimension).

    Raises:
        UnknownNameError: neither one of `NETWORKS` nor a torchvision model.
    """
    name = network_for(dataset) if network == "auto" else network
    if name in NETWORKS:
        return NETWORKS[name](shape, classes)
    if is_import_path(name):
        made: Any = resolve_callable(name)(num_classes=classes)
        return cast(nn.Module, made)
    from torchvision.models import get_model, list_models

    if name not in list_models():
        raise UnknownNameError("network", name, [*NETWORKS, *list_models()])
    return cast(nn.Module, get_model(name, weights=None, num_classes=classes))


def _needs(shape: Sequence[int], dimensions: int, name: str) -> None:
    if len(shape) != dimensions:
        kind = "images" if dimensions == 3 else "signals"
        raise InvalidInputError(
            f"network {name} takes {kind}, not inputs of shape {list(shape)}: take another"
        )
