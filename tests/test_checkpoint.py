import pickle
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mlflow_tula.errors import InvalidInputError, SchemaError, StoreError
from mlflow_tula.training.checkpoint import (
    CHECKPOINT_NAME,
    PREVIOUS_NAME,
    capture_rng,
    has_checkpoint,
    identity_difference,
    load_checkpoint,
    remove_checkpoints,
    remove_partial,
    restore_rng,
    save_checkpoint,
    weights_digest,
)

IDENTITY = {"job": {"model": "vgg11"}, "plan": {"global_batch_size": 64}, "epochs": 10}


def state(number: int) -> dict[str, Any]:
    return {"weights": torch.full((1000,), float(number)), "step": number, "rates": [0.1, None]}


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path, identity=IDENTITY) is None
    save_checkpoint(tmp_path, state(1), identity=IDENTITY)
    loaded = load_checkpoint(tmp_path, identity=IDENTITY)
    assert loaded is not None
    assert torch.equal(loaded["weights"], state(1)["weights"])
    assert loaded["step"] == 1
    assert loaded["rates"] == [0.1, None]


def test_the_one_before_is_kept_and_nothing_else(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        save_checkpoint(tmp_path, state(number), identity=IDENTITY)
    assert sorted(path.name for path in tmp_path.iterdir()) == [PREVIOUS_NAME, CHECKPOINT_NAME]
    (tmp_path / CHECKPOINT_NAME).unlink()
    loaded = load_checkpoint(tmp_path, identity=IDENTITY)
    assert loaded is not None
    assert loaded["step"] == 2


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_a_weight(path: Path) -> None:
    content = bytearray(path.read_bytes())
    place = content.index(np.full(4, 2.0, np.float32).tobytes())
    content[place] ^= 0xFF
    path.write_bytes(content)


def write_text(path: Path) -> None:
    path.write_text("not a checkpoint")


def save_something_else(path: Path) -> None:
    torch.save({"weights": torch.zeros(3)}, path)


@pytest.mark.parametrize("damage", [cut, empty, flip_a_weight, write_text, save_something_else])
def test_a_damaged_newest_is_passed_over(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    save_checkpoint(tmp_path, state(1), identity=IDENTITY)
    save_checkpoint(tmp_path, state(2), identity=IDENTITY)
    damage(tmp_path / CHECKPOINT_NAME)
    loaded = load_checkpoint(tmp_path, identity=IDENTITY)
    assert loaded is not None
    assert loaded["step"] == 1
    assert "is passed over" in caplog.text


def test_two_damaged_ones_are_an_error_that_says_how_to_go_on(tmp_path: Path) -> None:
    for number in (1, 2):
        save_checkpoint(tmp_path, state(number), identity=IDENTITY)
    cut(tmp_path / CHECKPOINT_NAME)
    cut(tmp_path / PREVIOUS_NAME)
    with pytest.raises(StoreError, match=r"no checkpoint of .* can be read .* start anew"):
        load_checkpoint(tmp_path, identity=IDENTITY)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("write", [pickle.dumps, None])
def test_code_in_a_checkpoint_is_not_run(tmp_path: Path, write: Any) -> None:
    target, mark = tmp_path / CHECKPOINT_NAME, tmp_path / "mark"
    if write is None:
        torch.save({"kind": "tula.checkpoint", "state": Bomb(mark)}, target)
    else:
        target.write_bytes(write({"kind": "tula.checkpoint", "state": Bomb(mark)}))
    with pytest.raises(StoreError, match="can be read"):
        load_checkpoint(tmp_path, identity=IDENTITY)
    assert not mark.exists()


def test_another_training_is_refused_by_the_field_that_differs(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state(1), identity=IDENTITY)
    other = IDENTITY | {"plan": {"global_batch_size": 128}}
    with pytest.raises(
        InvalidInputError, match=r"another training \(global_batch_size=64, not 128"
    ):
        load_checkpoint(tmp_path, identity=other)


@pytest.mark.parametrize(
    ("saved", "wanted", "answer"),
    [
        ({}, {}, None),
        ({"a": {"b": 1}}, {"a": {"b": 1}}, None),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "b=1, not 2"),
        ({"a": 1}, {}, "a=1, not None"),
        ({}, {"z": 0.5}, "z=None, not 0.5"),
    ],
)
def test_identity_difference(saved: Any, wanted: Any, answer: str | None) -> None:
    assert identity_difference(saved, wanted) == answer


def test_a_newer_schema_names_the_upgrade(tmp_path: Path) -> None:
    document = {"kind": "tula.checkpoint", "schema_version": 99, "identity": "{}", "state": {}}
    torch.save(document, tmp_path / CHECKPOINT_NAME)
    with pytest.raises(SchemaError, match=r"schema_version 99.*upgrade"):
        load_checkpoint(tmp_path, identity={})


def test_state_that_could_not_be_read_back_is_refused_when_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"state\['optimizer'\]\[1\] is a PosixPath"):
        save_checkpoint(tmp_path, {"optimizer": [1, Path("/")]}, identity=IDENTITY)
    assert not has_checkpoint(tmp_path)
    save_checkpoint(tmp_path, {"rate": np.float64(0.5)}, identity=IDENTITY)
    assert load_checkpoint(tmp_path, identity=IDENTITY) == {"rate": 0.5}


def test_a_full_disk_keeps_what_was_there(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state(1), identity=IDENTITY)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(StoreError, match=r"cannot write the checkpoint .* free some space"):
            save_checkpoint(tmp_path, {"w": torch.zeros(10**6)}, identity=IDENTITY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert [path.name for path in tmp_path.iterdir()] == [CHECKPOINT_NAME]
    loaded = load_checkpoint(tmp_path, identity=IDENTITY)
    assert loaded is not None
    assert loaded["step"] == 1


def test_removal(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state(1), identity=IDENTITY)
    (tmp_path / ".checkpoint.123.tmp").write_text("half")
    (tmp_path / "mine.txt").write_text("stays")
    remove_partial(tmp_path)
    assert has_checkpoint(tmp_path)
    remove_checkpoints(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_random_generators_go_on_where_they_were(tmp_path: Path) -> None:
    cpu = torch.device("cpu")

    def draw() -> tuple[Any, ...]:
        return torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist()  # noqa: NPY002

    np.random.randn()  # noqa: NPY002  (leaves half a pair of normal numbers behind)
    save_checkpoint(tmp_path, {"rng": capture_rng(cpu)}, identity={})
    first = (*draw(), np.random.randn())  # noqa: NPY002
    loaded = load_checkpoint(tmp_path, identity={})
    assert loaded is not None
    restore_rng(loaded["rng"], cpu)
    assert (*draw(), np.random.randn()) == first  # noqa: NPY002


def test_weights_digest_sees_values_names_and_types() -> None:
    one = {"a": torch.arange(6.0), "n": torch.tensor(3)}
    assert weights_digest(one) == weights_digest({name: one[name] for name in reversed(one)})
    others = [
        {**one, "a": torch.arange(6.0).reshape(2, 3)},
        {**one, "a": torch.arange(6.0).to(torch.bfloat16)},
        {**one, "n": torch.tensor(4)},
        {"b": one["a"], "n": one["n"]},
    ]
    assert len({weights_digest(each) for each in [one, *others]}) == 5


WRITER = """
import sys, torch
from pathlib import Path
from mlflow_tula.training.checkpoint import save_checkpoint
folder, number = Path(sys.argv[1]), 0
while True:
    number += 1
    state = {"weights": torch.full((200_000,), float(number)), "step": number}
    save_checkpoint(folder, state, identity={})
    print(number, flush=True)
"""


@pytest.mark.slow
def test_a_kill_at_any_instant_loses_at_most_the_one_being_written(tmp_path: Path) -> None:
    for attempt in range(5):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(0.003 * attempt)
        writer.kill()
        told = [1, *map(int, writer.stdout.read().split())]
        writer.wait()
        loaded = load_checkpoint(tmp_path, identity={})
        assert loaded is not None
        assert loaded["step"] in (told[-1], told[-1] + 1)
        assert torch.equal(loaded["weights"], torch.full((200_000,), float(loaded["step"])))
        remove_checkpoints(tmp_path)
        assert not list(tmp_path.iterdir())
