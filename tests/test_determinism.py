"""Same table, same bundle, byte for byte; same seed, same training."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from mlflow_tula.fit import fit

DATA = Path(__file__).parent / "data"
HERE = Path(__file__).parent
CONVERGENCE = {"global_batch_size": [16, 64, 256], "epochs_to_target": [10.0, 11.0, 20.0]}

FIT = """
import json, sys, warnings
import pandas as pd
import mlflow_tula as tula
warnings.simplefilter("ignore")
document, convergence = json.load(sys.stdin)
table = tula.ProfileTable.from_dict(document)
bundle = tula.fit(table, convergence=pd.DataFrame(convergence))
sys.stdout.write(json.dumps(bundle.to_dict(), indent=1))
"""


def dumped(bundle) -> str:
    return json.dumps(bundle.to_dict(), indent=1)


@pytest.mark.parametrize("variables", [{"PYTHONHASHSEED": "0"}, {"PYTHONHASHSEED": "12345"}])
def test_other_processes_make_the_same_bundle(table, variables: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIT],
        input=json.dumps([table.to_dict(), CONVERGENCE]),
        env={**os.environ, **variables, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == dumped(fit(table, convergence=pd.DataFrame(CONVERGENCE)))


@pytest.mark.parametrize("threads", ["1", "2", "4"])
def test_the_number_of_threads_changes_nothing(table, threads: str) -> None:
    """Of small matrices: BLAS shares out larger ones (docs/reliability.md)."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    done = subprocess.run(
        [sys.executable, "-c", FIT],
        input=json.dumps([table.to_dict(), CONVERGENCE]),
        env={**os.environ, **dict.fromkeys(names, threads)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == dumped(fit(table, convergence=pd.DataFrame(CONVERGENCE)))


def test_the_order_of_the_rows_changes_no_prediction(table) -> None:
    """The digest is of the table as it stands; what is predicted does not depend on the order."""
    rows = list(table.measurements)
    random.Random(3).shuffle(rows)
    shuffled = replace(table, measurements=tuple(rows))
    first, second = fit(table), fit(shuffled)
    assert first.step_time == second.step_time
    assert first.probed == second.probed
    assert first.report == second.report
    assert first.table_digest != second.table_digest
    asked = pd.DataFrame({"global_batch_size": [8, 20, 64, 512], "devices_per_node": [1, 1, 2, 2]})
    pd.testing.assert_frame_equal(first.predict(asked), second.predict(asked), check_exact=True)


def test_a_table_keeps_its_digest_through_files(table, tmp_path: Path) -> None:
    from mlflow_tula.files import read_json, write_json
    from mlflow_tula.table import ProfileTable

    path = write_json(tmp_path / "table.json", table.to_dict())
    assert ProfileTable.from_dict(read_json(path, made_by="tula profile")).digest == table.digest


TRAIN = """
import hashlib, sys, torch
from mlflow_tula.train import train
from mlflow_tula.training.facts import BatchPlan
from mlflow_tula.workloads.job import Job
job = Job(model=sys.argv[1], dataset_size=300, image_size=8, augment=True, seed=7)
result = train(job, BatchPlan.of(50, dataset_size=300), epochs=2, output_dir=sys.argv[2])
state = torch.load(f"{sys.argv[2]}/checkpoint.pt", weights_only=True)["state"]
digest = hashlib.sha256()
def feed(value):
    if isinstance(value, torch.Tensor):
        digest.update(value.detach().contiguous().numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            feed(value[key])
    elif isinstance(value, (list, tuple)):
        for one in value:
            feed(one)
feed(state["model"])
print(digest.hexdigest(), repr(result.train_loss), repr(result.test_accuracy))
"""


@pytest.mark.slow
def test_the_same_seed_trains_the_same_weights(tmp_path: Path) -> None:
    """Bit for bit, in two processes, on one rank with one thread."""
    told = []
    for hash_seed in ("1", "2"):
        folder = tmp_path / hash_seed
        done = subprocess.run(
            [sys.executable, "-c", TRAIN, f"{HERE / 'train_parts.py'}:linear_net", str(folder)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        told.append(done.stdout.strip().splitlines()[-1])
    assert told[0] == told[1]
    assert told[0].split()[0] != hashlib.sha256().hexdigest()
