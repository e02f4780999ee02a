"""Image datasets that fit in memory: digits, Fashion-MNIST, CIFAR and synthetic data.

A `TensorImages` holds all images as bytes and makes whole batches at once, so that reading 64
digits costs a fraction of a millisecond, not 64 Python calls: loading must not be what a profile
of a small model measures.
"""

from __future__ import annotations

import gzip
import importlib.util
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

from mlflow_tula.errors import InvalidInputError, StoreError

_PREPARE_BYTES = 64 * 2**20
_CHUNK = 4096


class TensorImages(Dataset[tuple[Tensor, int]]):
    """Images [N, C, H, W] as bytes, resized, normalised and repeated to three channels on request.

    `data[i]` is one (float image [C, S, S], label); `data.fetch(indices)` a whole batch. Sets
    that are small once prepared (64 MiB) are prepared once. `length` above the number of images
    repeats them (synthetic data of any size in little memory).
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        channels: int = 3,
        length: int | None = None,
        augment: bool = False,
        mirror: bool = False,
    ) -> None:
        """Keep the bytes; `mean` and `std` are per channel, of values scaled to 0..1.

        `augment` shifts images by up to an eighth, and mirrors them where `mirror` allows it (a
        mirrored digit is another sign).
        """
        if images.ndim != 4 or images.dtype != torch.uint8 or len(images) != len(labels):
            raise InvalidInputError(
                f"images must be bytes of shape [N, C, H, W] with N labels, not {images.dtype} of "
                f"shape {list(images.shape)} with {len(labels)} labels"
            )
        self.images = images
        self.targets = labels.to(torch.int64)
        self.image_size = image_size
        self.channels = channels
        deviation = torch.tensor(std, dtype=torch.float32).view(1, -1, 1, 1)
        self._scale = 1 / (255 * deviation)
        self._offset = torch.tensor(mean, dtype=torch.float32).view(1, -1, 1, 1) / deviation
        self._length = length or len(images)
        self._augment = augment
        self._mirror = mirror
        self._ready: Tensor | None = None
        if len(images) * images.shape[1] * image_size**2 * 4 <= _PREPARE_BYTES:
            chunks = [self._prepare(images[i : i + _CHUNK]) for i in range(0, len(images), _CHUNK)]
            self._ready = torch.cat(chunks)

    def __len__(self) -> int:
        """Samples in an epoch."""
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """One image [C, S, S] and its label."""
        if not -self._length <= index < self._length:
            raise IndexError(f"index {index} is out of range of {self._length} samples")
        images, labels = self.fetch([index % self._length])
        return images[0], int(labels[0])

    def fetch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The batch of these samples: images [B, C, S, S] and labels [B]."""
        at = torch.as_tensor(indices, dtype=torch.int64) % len(self.images)
        images = self._prepare(self.images[at]) if self._ready is None else self._ready[at]
        if self._augment:
            images = _shift(images, max(1, self.image_size // 8))
            if self._mirror:
                mirrored = torch.rand(len(images), 1, 1, 1) < 0.5
                images = torch.where(mirrored, images.flip(-1), images)
        if images.shape[1] != self.channels:
            images = images.expand(-1, self.channels, -1, -1).contiguous()
        return images, self.targets[at]

    def _prepare(self, images: Tensor) -> Tensor:
        values = images.to(torch.float32)
        if values.shape[-2:] != (self.image_size, self.image_size):
            size = (self.image_size, self.image_size)
            values = interpolate(values, size, mode="bilinear", antialias=True)
        return values.mul_(self._scale).sub_(self._offset)


def _shift(images: Tensor, largest: int) -> Tensor:
    """Each image moved by its own random offset; the edge is repeated."""
    count, _, height, width = images.shape
    offsets = torch.randint(-largest, largest + 1, (2, count, 1))
    rows = (torch.arange(height) + offsets[0]).clamp_(0, height - 1)
    columns = (torch.arange(width) + offsets[1]).clamp_(0, width - 1)
    images = images.gather(2, rows.view(count, 1, height, 1).expand_as(images))
    return images.gather(3, columns.view(count, 1, 1, width).expand_as(images))


def digits_arrays() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1,797 handwritten digits: bytes [N, 1, 8, 8] and labels."""
    table = _digits_table()
    images = np.round(table[:, :64] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    return torch.from_numpy(images), torch.from_numpy(table[:, 64].astype(np.int64))


def _digits_table() -> npt.NDArray[np.float64]:
    """64 pixels (0..16) and the label a row.

    Straight from scikit-learn's file: importing scikit-learn takes a second or two, and every
    probe of a profile is a process that would pay it.
    """
    spec = importlib.util.find_spec("sklearn")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    data = load_digits()
    return np.column_stack([data.data, data.target])


def synthetic_arrays(
    count: int, *, channels: int, size: int, num_classes: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Noise around one pattern a class: bytes [count, channels, size, size] and labels.

    The patterns do not depend on `seed`, the noise does: training and test data can be learnt
    from each other without sharing a sample.
    """
    shape = (num_classes, channels, 8, 8)
    patterns = _random_bytes(shape, seed=0) // 4
    labels = torch.arange(count) % num_classes
    at = torch.arange(size) * 8 // size  # each of the pattern's 8x8 fields enlarged
    images = _random_bytes((count, channels, size, size), seed=seed).div_(4, rounding_mode="floor")
    images.mul_(3).add_(patterns[labels][:, :, at][:, :, :, at])
    return images, labels


def _random_bytes(shape: Sequence[int], *, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, tuple(shape), dtype=torch.uint8, generator=generator)


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """The array in an IDX file of bytes (MNIST's format), gzipped or not."""
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise StoreError(f"cannot read {str(path)!r}: {error}") from error
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise StoreError(f"{str(path)!r} is not an IDX file of bytes: fetch it again")
    ndim = content[3]
    shape = np.frombuffer(content, dtype=">u4", count=ndim, offset=4).astype(int)
    values = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * ndim)
    if values.size != int(np.prod(shape)):
        raise StoreError(f"{str(path)!r} is cut short: fetch it again")
    return values.reshape(shape).copy()
