import functools
import gzip
import hashlib
import pickle
import struct
import threading
from collections import Counter
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import TensorDataset

from mlflow_tula.errors import InvalidInputError, StoreError, UnknownNameError
from mlflow_tula.workloads.datasets import (
    DEBIAN_FASHION_MNIST,
    build_datasets,
    labels_of,
    list_datasets,
)
from mlflow_tula.workloads.describe import describe
from mlflow_tula.workloads.imagedata import TensorImages, digits_arrays, read_idx
from mlflow_tula.workloads.job import Job
from mlflow_tula.workloads.loaders import build_loader, start_epoch
from mlflow_tula.workloads.splits import stratified_split, stratified_subset

OWN = """
import torch
from torch.utils.data import TensorDataset

def labelled(count=40, size=12, channels=1, classes=4):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(count, channels, size, size, generator=generator)
    return TensorDataset(images, torch.arange(count) % classes)

def one(): return labelled()
def pair(image_size=None, data_dir=None): return labelled(24, image_size or 12), labelled(8)
def same():
    data = labelled()
    return data, data
def three(): return 1, 2, 3
def five_channels(): return labelled(channels=5)
def numbers(): return TensorDataset(torch.rand(30, 7), torch.rand(30))
def empty(): return []
def raises(): raise OSError("disk gone")
def pictures(): return [("picture", 0), ("picture", 1)] * 5
"""


def job(**fields) -> Job:
    return Job(**{"model": "vgg11", **fields})


@pytest.fixture
def own(tmp_path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py"


@given(
    st.lists(st.integers(0, 5), min_size=2, max_size=200).filter(
        lambda labels: max(Counter(labels).values()) > 1
    )
)
def test_splits_are_disjoint_complete_and_stratified(labels: list[int]) -> None:
    train, test = stratified_split(labels)
    assert sorted([*train, *test]) == list(range(len(labels)))
    for label, count in Counter(labels).items():
        in_test = sum(labels[i] == label for i in test)
        assert in_test == (0 if count == 1 else min(max(round(0.2 * count), 1), count - 1))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=200), st.data())
def test_subsets_keep_the_proportions(labels: list[int], data) -> None:
    size = data.draw(st.integers(1, len(labels)))
    chosen = stratified_subset(labels, size)
    assert len(set(chosen.tolist())) == size
    taken = Counter(labels[i] for i in chosen)
    for label, count in Counter(labels).items():
        assert abs(taken[label] - size * count / len(labels)) <= 1 + 1e-9


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="each class needs two or more"):
        stratified_split([0, 1, 2])
    with pytest.raises(InvalidInputError, match="at most the dataset's 3 training samples"):
        stratified_subset([0, 1, 2], 4)


def test_digits_are_scikit_learns_split_without_overlap() -> None:
    from sklearn.datasets import load_digits

    images, labels = digits_arrays()
    known = load_digits()
    assert np.array_equal((images[:, 0].double().numpy() * 16 / 255).round(), known.images)
    assert np.array_equal(labels, known.target)
    data = build_datasets(job())
    assert (data.train_size, data.test_size, data.num_classes) == (1438, 359, 10)
    assert (data.image_size, data.channels) == (32, 3)
    image, label = data.train[0]
    assert image.shape == (3, 32, 32)
    assert image.dtype == torch.float32
    assert label in range(10)
    assert torch.equal(image[0], image[2])
    shares = Counter(labels_of(data.test))
    assert all(abs(shares[d] - Counter(known.target.tolist())[d] / 5) <= 0.5 for d in range(10))
    seen = {data.train[i][0].numpy().tobytes() for i in range(data.train_size)}
    assert not seen & {data.test[i][0].numpy().tobytes() for i in range(data.test_size)}


def test_splits_do_not_depend_on_the_training_seed() -> None:
    one, two = (build_datasets(job(seed=seed)) for seed in (0, 1))
    assert labels_of(one.test) == labels_of(two.test)


def test_a_subset_of_the_training_data() -> None:
    data = build_datasets(job(dataset_size=100))
    assert (data.train_size, data.test_size) == (100, 359)
    assert set(Counter(labels_of(data.train)).values()) <= {9, 10, 11}
    with pytest.raises(InvalidInputError, match="at most the dataset's 1438"):
        build_datasets(job(dataset_size=1439))


def test_images_are_enlarged_for_alexnet(caplog) -> None:
    data = build_datasets(job(model="alexnet", image_size=20))
    assert data.image_size == 64
    assert data.train[0][0].shape == (3, 64, 64)
    assert "enlarged to 64" in caplog.text


@pytest.mark.parametrize("size", [8, 28, 45])
def test_prepared_and_fresh_images_are_the_same(size: int, monkeypatch) -> None:
    images = torch.randint(0, 256, (9, 1, 16, 16), dtype=torch.uint8)
    shape = {"image_size": size, "mean": [0.3], "std": [0.2]}
    ready = TensorImages(images, torch.arange(9), **shape)
    monkeypatch.setattr("mlflow_tula.workloads.imagedata._PREPARE_BYTES", 0)
    fresh = TensorImages(images, torch.arange(9), **shape)
    for one, two in zip(ready.fetch([3, 1, 8]), fresh.fetch([3, 1, 8]), strict=True):
        assert torch.allclose(one, two)


def test_synthetic_data_has_the_shape_that_was_asked_for() -> None:
    wanted = {"image_size": 48, "channels": 1, "num_classes": 7, "dataset_size": 100_000}
    data = build_datasets(job(dataset="synthetic", **wanted))
    assert (data.train_size, data.test_size, data.num_classes) == (100_000, 25_000, 7)
    assert data.train[99_999][0].shape == (3, 48, 48)
    assert set(labels_of(data.train)[:1000]) == set(range(7))
    own_model = build_datasets(job(model="a.b:c", dataset="synthetic", channels=5))
    assert own_model.train[0][0].shape == (5, 32, 32)
    with pytest.raises(InvalidInputError, match="take 3 channels"):
        build_datasets(job(dataset="synthetic", channels=5))
    with pytest.raises(IndexError, match="out of range"):
        data.train[100_000]


@pytest.mark.skipif(
    not DEBIAN_FASHION_MNIST.is_dir(), reason="Debian's dataset-fashion-mnist is not installed"
)
def test_fashion_mnist_from_debians_package() -> None:
    data = build_datasets(job(dataset="fashion_mnist"))
    assert (data.train_size, data.test_size) == (60_000, 10_000)
    images, labels = data.train.fetch(range(2000))
    assert abs(float(images.mean())) < 0.05
    assert float(images.std()) == pytest.approx(1, abs=0.05)
    assert set(labels.tolist()) == set(range(10))


def write_fashion_mnist(folder: Path, *, zipped: bool) -> None:
    folder.mkdir(parents=True)
    for part, count in (("train", 20), ("t10k", 10)):
        images = np.random.default_rng(0).integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
            head = struct.pack(f">I{values.ndim}I", 0x800 + values.ndim, *values.shape)
            content = head + values.tobytes()
            name = f"{part}-{kind}-ubyte" + (".gz" if zipped else "")
            (folder / name).write_bytes(gzip.compress(content) if zipped else content)


@pytest.mark.parametrize(("place", "zipped"), [("FashionMNIST/raw", False), (".", True)])
def test_fashion_mnist_from_a_folder(tmp_path, place: str, zipped: bool) -> None:
    root = tmp_path / "data"
    write_fashion_mnist(root / place, zipped=zipped)
    data = build_datasets(job(dataset="fashion_mnist", data_dir=str(root)))
    assert (data.train_size, data.test_size) == (20, 10)
    assert labels_of(data.train)[11] == 1


def test_torchvision_reads_the_same_fashion_mnist(tmp_path) -> None:
    from torchvision.datasets import FashionMNIST

    write_fashion_mnist(tmp_path / "FashionMNIST" / "raw", zipped=False)
    theirs = FashionMNIST(str(tmp_path), train=True)
    ours = read_idx(tmp_path / "FashionMNIST" / "raw" / "train-images-idx3-ubyte")
    assert np.array_equal(ours, theirs.data)


@pytest.mark.parametrize("content", [b"", b"\x00\x00\x08\x01\x00\x00\x00\x05ab", b"text, not idx"])
def test_damaged_files_are_named(tmp_path, content: bytes) -> None:
    file = tmp_path / "train-labels-idx1-ubyte"
    file.write_bytes(content)
    with pytest.raises(StoreError, match=r"train-labels.*fetch it again"):
        read_idx(file)
    packed = tmp_path / "x.gz"
    packed.write_bytes(gzip.compress(b"abcdefgh")[:-5])
    with pytest.raises(StoreError, match=r"cannot read .*x\.gz"):
        read_idx(packed)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "caltech101", "caltech256"])
def test_an_absent_folder_names_the_way_out(tmp_path, name: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"{name} is not in .*--data-dir or .*--download"):
        build_datasets(job(dataset=name, data_dir=str(tmp_path / "none")))
    assert not (tmp_path / "none").exists()


def test_absent_fashion_mnist_names_the_package(tmp_path) -> None:
    with pytest.raises(InvalidInputError, match="dataset-fashion-mnist"):
        build_datasets(job(dataset="fashion_mnist", data_dir=str(tmp_path)))


def test_the_data_folder_may_come_from_the_environment(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TULA_DATA_DIR", str(tmp_path / "there"))
    with pytest.raises(InvalidInputError, match="there/cifar-10-batches-py"):
        build_datasets(job(dataset="cifar10"))


def test_unknown_dataset_suggests_the_nearest() -> None:
    assert "digits" in list_datasets()
    with pytest.raises(UnknownNameError, match="unknown dataset 'cifar': did you mean cifar"):
        build_datasets(job(dataset="cifar"))


def write_images(root: Path, **classes: int) -> None:
    generator = np.random.default_rng(0)
    for name, count in classes.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            mode, shape = ("L", (20, 30)) if i % 2 else ("RGB", (20, 30, 3))
            pixels = generator.integers(0, 256, shape, dtype=np.uint8)
            Image.fromarray(pixels, mode=mode).save(root / name / f"image_{i + 1:04d}.jpg")


def test_image_folder_with_train_and_val(tmp_path) -> None:
    write_images(tmp_path / "train", ant=3, bee=4, cat=2)
    write_images(tmp_path / "val", bee=2)
    (tmp_path / "test").mkdir()  # as ImageNet's: without class folders
    data = build_datasets(job(dataset="imagefolder", data_dir=str(tmp_path), image_size=32))
    assert (data.train_size, data.test_size, data.num_classes) == (9, 2, 3)
    assert labels_of(data.test) == [1, 1]
    assert data.train[1][0].shape == (3, 32, 32)
    assert data.test[0][1] == 1


def test_image_folder_of_one_tree_is_split(tmp_path) -> None:
    write_images(tmp_path, ant=10, bee=5)
    folder = job(dataset="imagefolder", data_dir=str(tmp_path), image_size=40, augment=True)
    data = build_datasets(folder)
    assert (data.train_size, data.test_size) == (12, 3)
    assert sorted(labels_of(data.test)) == [0, 0, 1]
    assert data.train[0][0].shape == data.test[0][0].shape == (3, 40, 40)
    images, labels = next(iter(build_loader(folder, data.train, 4)))
    assert images.shape == (4, 3, 40, 40)
    assert labels.shape == (4,)


def test_image_folders_that_do_not_fit_are_refused(tmp_path) -> None:
    def build(name: str) -> None:
        build_datasets(job(dataset="imagefolder", data_dir=str(tmp_path / name)))

    write_images(tmp_path / "a" / "train", ant=2)
    write_images(tmp_path / "a" / "val", ant=1, fly=1)
    with pytest.raises(InvalidInputError, match=r"class 'fly' of .* is not in the training folder"):
        build("a")
    (tmp_path / "b").mkdir()
    with pytest.raises(InvalidInputError, match="is not a folder of classes"):
        build("b")
    (tmp_path / "c" / "empty").mkdir(parents=True)
    with pytest.raises(InvalidInputError, match="is not a folder of classes"):
        build("c")
    with pytest.raises(InvalidInputError, match="no folder"):
        build("d")
    with pytest.raises(InvalidInputError, match="needs --data-dir"):
        build_datasets(job(dataset="imagefolder"))


@pytest.mark.parametrize(
    ("name", "folder", "file"),
    [
        ("caltech101", "caltech101/101_ObjectCategories", "image_{:04d}.jpg"),
        ("caltech256", "caltech256/256_ObjectCategories", "{label:03d}_{:04d}.jpg"),
    ],
)
def test_caltech_is_split_stratified(tmp_path, name: str, folder: str, file: str) -> None:
    root = tmp_path / folder
    write_images(root, **{"001.ant": 10, "002.bee": 5})
    if name == "caltech101":
        write_images(root, BACKGROUND_Google=1)
    else:
        for label, group in enumerate(sorted(root.iterdir()), start=1):
            for i, image in enumerate(sorted(group.iterdir()), start=1):
                image.rename(group / file.format(i, label=label))
    data = build_datasets(job(dataset=name, data_dir=str(tmp_path), image_size=32))
    assert (data.train_size, data.test_size, data.num_classes) == (12, 3, 2)
    assert data.train[0][0].shape == (3, 32, 32)
    assert describe(job(dataset=name, data_dir=str(tmp_path))).image_size == 224


def test_cifar_from_a_folder_that_is_not_whole(tmp_path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(StoreError, match=r"cannot read cifar10 in .*\(try --download\)"):
        build_datasets(job(dataset="cifar10", data_dir=str(tmp_path)))


def test_a_download_happens_once_and_is_then_read(tmp_path, monkeypatch) -> None:
    from torchvision.datasets import FashionMNIST

    write_fashion_mnist(tmp_path / "mirror", zipped=True)
    sums = [
        (name, hashlib.md5((tmp_path / "mirror" / name).read_bytes()).hexdigest())
        for name, _ in FashionMNIST.resources
    ]
    monkeypatch.setattr(FashionMNIST, "resources", sums)
    wanted = job(dataset="fashion_mnist", data_dir=str(tmp_path / "new"), download=True)
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "mirror"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        mirror = f"http://127.0.0.1:{server.server_address[1]}/"
        monkeypatch.setattr(FashionMNIST, "mirrors", [mirror])
        assert build_datasets(wanted).train_size == 20
        server.shutdown()
    assert build_datasets(wanted.replace(download=False)).test_size == 10


def test_a_failed_download_is_one_line(tmp_path, monkeypatch) -> None:
    nowhere = (tmp_path / "absent.tar.gz").as_uri()
    monkeypatch.setattr("torchvision.datasets.CIFAR10.url", nowhere)
    with pytest.raises(StoreError, match=r"^cannot download cifar10 into [^\n]*$"):
        build_datasets(job(dataset="cifar10", data_dir=str(tmp_path / "new"), download=True))


def test_cifar100_files_become_images(tmp_path, monkeypatch) -> None:
    # The real files are checked by their hashes; small ones of the same format are not.
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (12, 3072), dtype=np.uint8)
    for part, count in (("train", 12), ("test", 4)):
        entry = {"data": pixels[:count], "fine_labels": list(range(count))}
        (folder / part).write_bytes(pickle.dumps(entry))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": list("abc")}))
    for root in (tmp_path, folder):  # people point at either
        data = build_datasets(job(dataset="cifar100", data_dir=str(root)))
        assert (data.train_size, data.test_size, data.num_classes) == (12, 4, 100)
    image, label = data.train[5]
    blue = (pixels[5, 2048:].reshape(32, 32) / 255 - 0.4409) / 0.2762
    assert np.allclose(image[2], blue, atol=1e-5)
    assert label == 5


def test_own_single_dataset_is_split_and_fitted(own: str) -> None:
    data = build_datasets(job(dataset=f"{own}:one"))
    assert (data.train_size, data.test_size, data.num_classes) == (32, 8, 4)
    assert Counter(labels_of(data.test.__dict__["_base"])) == {0: 2, 1: 2, 2: 2, 3: 2}
    assert data.train[0][0].shape == (3, 32, 32)  # 12 pixels, VGG11 takes 32
    plain = build_datasets(job(model="my:net", dataset=f"{own}:one"))
    assert plain.train[0][0].shape == (1, 12, 12)
    assert (plain.image_size, plain.channels) == (12, 1)


def test_own_pair_and_what_it_is_told(own: str) -> None:
    data = build_datasets(job(model="my:net", dataset=f"{own}:pair", image_size=9))
    assert (data.train_size, data.test_size) == (24, 8)
    assert data.train[0][0].shape == (1, 9, 9)
    assert data.test[0][0].shape == (1, 9, 9)
    workload = describe(job(dataset=f"{own}:pair"))
    assert workload.slug == job(dataset=f"{own}:pair").workload_slug == "vgg11.own-pair"


def test_own_data_of_numbers(own: str) -> None:
    with pytest.raises(InvalidInputError, match="--num-classes"):
        build_datasets(job(model="my:net", dataset=f"{own}:numbers"))
    data = build_datasets(job(model="my:net", dataset=f"{own}:numbers", num_classes=1))
    assert (data.train_size, data.test_size, data.image_size) == (24, 6, None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("same", "the same object for training and test"),
        ("three", r"must return \(train, test\) or one dataset, not 3"),
        ("five_channels", "take 3 channels .* not the 5"),
        ("empty", "non-zero length"),
        ("raises", "failed: OSError: disk gone"),
        ("pictures", "must start with a tensor, not str"),
        ("numbers", r"take float images \[C, H, W\], not torch.float32 of shape \[7\]"),
    ],
)
def test_own_data_that_cannot_be_used(own: str, name: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        build_datasets(job(dataset=f"{own}:{name}", num_classes=4))


def test_ranks_share_an_epoch_without_overlap() -> None:
    data = TensorDataset(torch.arange(103), torch.zeros(103))
    parts = []
    for rank in range(4):
        loader = build_loader(job(), data, 5, rank=rank, world_size=4)
        assert len(loader) == 5
        parts += [int(x) for batch, _ in loader for x in batch]
    assert len(parts) == len(set(parts)) == 100


def test_evaluation_sees_each_sample_once() -> None:
    data = TensorDataset(torch.arange(103), torch.zeros(103))
    seen = []
    for rank in range(4):
        options = {"rank": rank, "world_size": 4, "shuffle": False, "drop_last": False}
        seen += [int(x) for batch, _ in build_loader(job(), data, 8, **options) for x in batch]
    assert sorted(seen) == list(range(103))


def test_batches_depend_on_seed_and_epoch_only() -> None:
    def epoch_of(number: int, *, workers: int, seed: int = 0, first: int | None = None):
        augmented = job(dataset_size=120, augment=True, seed=seed, num_workers=workers)
        loader = build_loader(augmented, build_datasets(augmented).train, 50)
        if first is not None:
            start_epoch(loader, first)
            list(loader)
        start_epoch(loader, number)
        return torch.cat([images for images, _ in loader])

    expected = epoch_of(3, workers=0)
    assert expected.shape == (100, 3, 32, 32)
    assert torch.equal(expected, epoch_of(3, workers=2, first=2))
    assert not torch.equal(expected, epoch_of(4, workers=0))
    assert not torch.equal(expected, epoch_of(3, workers=0, seed=1))


def test_a_batch_above_a_ranks_share_is_refused() -> None:
    data = build_datasets(job())
    with pytest.raises(InvalidInputError, match=r"at most the 719 samples .* not 720"):
        build_loader(job(), data.train, 720, world_size=2)
    with pytest.raises(InvalidInputError, match="local_batch_size must be a whole number"):
        build_loader(job(), data.train, 0)
    kept = build_loader(job(drop_last=False), data.train, 5000)
    assert len(next(iter(kept))[1]) == 1438
