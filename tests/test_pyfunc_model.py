from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from mlflow_tula import predictors
from mlflow_tula.registry import register
from mlflow_tula.registry.model_files import copy_formulas, input_example
from mlflow_tula.registry.pyfunc_model import COLUMNS, PARAMETERS, given, load_formulas

pytestmark = pytest.mark.filterwarnings("ignore::mlflow_tula.errors.TulaWarning")


@pytest.fixture(scope="module")
def registered(_empty_store, tmp_path_factory, table, bundle):
    """One registered version, in a store that the tests of this module only read."""
    path = tmp_path_factory.mktemp("registered") / "mlflow.db"
    shutil.copy(_empty_store, path)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(path.parent)
        patched.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{path}")
        yield register(bundle, table=table)


@pytest.fixture(scope="module")
def model(registered):
    return mlflow.pyfunc.load_model(registered.uri)


def folder_of(registered) -> Path:
    client = MlflowClient()
    return Path(client.get_model_version_download_uri(registered.name, str(registered.version)))


def asked(**columns) -> pd.DataFrame:
    return pd.DataFrame(columns).astype("int64")


def test_it_answers_as_the_bundle_does(model, bundle):
    frame = asked(global_batch_size=[64, 16, 256], devices_per_node=[2, 1, 2], nodes=[1, 1, 1])
    frame.index = [7, 3, 5]
    pd.testing.assert_frame_equal(model.predict(frame), bundle.predict(frame))


def test_optional_columns_are_one(model, bundle):
    frame = asked(global_batch_size=[8, 32])
    pd.testing.assert_frame_equal(model.predict(frame), bundle.predict(frame))
    whole = asked(global_batch_size=[8, 32], nodes=[1, 1], accumulation_steps=[1, 2])
    assert list(model.predict(whole)["local_batch_size"]) == [8, 16]


def test_parameters_reach_the_formulas(model, bundle):
    frame = asked(global_batch_size=[64])
    params = {
        "epochs": 10.0,
        "usd_per_device_hour": 2.5,
        "usd_per_gb_hour": 0.15,
        "dataset_size": 5000,
        "memory_limit_bytes": 1.0e9,
        "level": 0.5,
    }
    answer = model.predict(frame, params=params)
    pd.testing.assert_frame_equal(answer, bundle.predict(frame, **params))
    assert answer["cost_usd"].notna().all()
    assert not answer["fits"].any()
    assert model.predict(frame)["cost_usd"].isna().all()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"global_batch_size": [0]}, "must be a whole number from 1"),
        ({"global_batch_size": [-8]}, "must be a whole number from 1"),
        ({"global_batch_size": [9], "devices_per_node": [2]}, "nearest valid sizes are 8 and 10"),
    ],
)
def test_a_question_that_cannot_be_asked_is_one_line(columns, message, model):
    with pytest.raises(ValueError, match=message):
        model.predict(asked(**columns))


@pytest.mark.parametrize("values", [[8.5], [np.nan], ["8"]], ids=str)
def test_the_signature_refuses_what_is_no_whole_number(values, model):
    with pytest.raises(MlflowException, match="global_batch_size"):
        model.predict(pd.DataFrame({"global_batch_size": values}))


def test_a_missing_batch_size_is_refused(model):
    with pytest.raises(MlflowException, match="global_batch_size"):
        model.predict(asked(nodes=[1]))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"epochs": float("nan")}, "epochs must be finite, not nan"),
        ({"usd_per_gb_hour": float("inf")}, "must be finite"),
        ({"epochs": "ten"}, "epochs must be a number, not 'ten'"),
        ({"epoch": 3.0}, "unknown parameter 'epoch': known are level, memory_limit_bytes"),
    ],
)
def test_bad_parameters_are_one_line(params, message):
    with pytest.raises(ValueError, match=message):
        given(params)


def test_not_given_is_left_out():
    assert given({"epochs": -1.0, "dataset_size": 500, "usd_per_device_hour": 0.0}) == {
        "dataset_size": 500,
        "usd_per_device_hour": 0.0,
    }


def test_bad_numbers_are_refused_through_mlflow_too(model):
    frame = asked(global_batch_size=[8])
    with pytest.raises(ValueError, match="epochs must be finite"):
        model.predict(frame, params={"epochs": float("nan")})
    with pytest.raises(ValueError, match="usd_per_device_hour"):
        model.predict(frame, params={"usd_per_device_hour": -3.0})
    with pytest.raises(ValueError, match="level"):
        model.predict(frame, params={"level": 1.5})


def test_the_signature_is_the_contract(model, bundle):
    schema = model.metadata.signature
    assert {c.name: (c.type.name, c.required) for c in schema.inputs} == {
        name: ("long", needed) for name, needed in COLUMNS.items()
    }
    assert {p.name: p.default for p in schema.params} == {
        name: default for name, (_, default) in PARAMETERS.items()
    }
    answer = bundle.predict(input_example(bundle))
    assert [column.name for column in schema.outputs] == list(answer.columns)


def test_nothing_is_pickled_and_the_requirements_are_explicit(registered):
    folder = folder_of(registered)
    names = {path.name for path in folder.rglob("*") if path.is_file()}
    assert not [name for name in names if name.endswith((".pkl", ".pickle", ".pyc"))]
    assert {"bundle.json", "table.json", "pyfunc_model.py", *predictors.PORTABLE_FILES} <= names
    requirements = (folder / "requirements.txt").read_text().split()
    assert [re.split("[<>=]", line)[0] for line in requirements] == ["mlflow", "numpy", "pandas"]


def test_loading_leaves_no_bytecode_in_the_artifact_store(model, registered):
    assert not list(folder_of(registered).rglob("__pycache__"))


def test_equal_formulas_are_imported_once(tmp_path):
    copy_formulas(tmp_path / "a")
    copy_formulas(tmp_path / "b")
    assert load_formulas(tmp_path / "a") is load_formulas(tmp_path / "b")


def test_shipped_files_import_numpy_pandas_and_each_other_alone():
    allowed = {"__future__", "collections", "difflib", "math", "numpy", "pandas", "typing"}
    for name in predictors.PORTABLE_FILES:
        text = (Path(predictors.__file__).parent / name).read_text(encoding="utf-8")
        lines = [line.split() for line in text.splitlines()]
        found = {
            words[1].split(".")[0]
            for words in lines
            if len(words) > 1 and words[0] in {"import", "from"} and words[1][0] != "."
        }
        assert found <= allowed | {"itertools", "functools", "dataclasses"}, name


STRANGER = """
import json, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "torchvision", "mlflow_tula", "scipy", "statsmodels"}:
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocker())
import mlflow, pandas as pd
model = mlflow.pyfunc.load_model(sys.argv[1])
frame = pd.DataFrame({"global_batch_size": [16, 512], "devices_per_node": [2, 2]})
answer = model.predict(frame, params={"epochs": 10.0, "usd_per_gb_hour": 0.15})
assert not {"torch", "mlflow_tula"} & set(sys.modules)
print(answer.to_json(orient="split", double_precision=15))
"""


@pytest.mark.slow
def test_it_loads_without_torch_without_this_package_and_without_pickles(
    registered, bundle, tmp_path
):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {
        "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
        "MLFLOW_TRACKING_URI": mlflow.get_tracking_uri(),
    }
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, registered.uri],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    frame = asked(global_batch_size=[16, 512], devices_per_node=[2, 2])
    expected = bundle.predict(frame, epochs=10.0, usd_per_gb_hour=0.15)
    assert answer["columns"] == list(expected.columns)
    got = pd.DataFrame(answer["data"], columns=answer["columns"])
    numeric = ["step_time_s", "peak_memory_bytes", "epoch_time_s_upper", "cost_usd"]
    np.testing.assert_allclose(
        got[numeric].to_numpy(float), expected[numeric].to_numpy(float), rtol=1e-9
    )
