"""`get_deploy_client("tula")` and `mlflow deployments ... -t tula`."""

from __future__ import annotations

import json
from pathlib import Path

import mlflow.deployments.cli
import pandas as pd
import pytest
from click.testing import CliRunner
from mlflow.deployments import get_deploy_client
from mlflow.exceptions import MlflowException

from mlflow_tula.plugin import deployments
from mlflow_tula.recommend import recommend
from mlflow_tula.registry import load
from mlflow_tula.specs import ClusterSpec

pytestmark = pytest.mark.filterwarnings("ignore::mlflow_tula.errors.TulaWarning")


@pytest.fixture
def client(registered: str):
    return get_deploy_client("tula")


def test_a_batch_size_is_answered_with_predictions(client, registered: str) -> None:
    frame = pd.DataFrame({"global_batch_size": [32, 64], "devices_per_node": [1, 2]})
    for name in ("vgg11/digits", "vgg11.digits", registered):
        found = client.predict(name, frame)
        assert list(found["step_time_s"]) == list(load(registered).predict(frame)["step_time_s"])
    assert len(client.predict(endpoint="vgg11/digits", inputs={"global_batch_size": 32})) == 1


def test_a_question_without_one_is_answered_with_a_decision(client, registered: str) -> None:
    found = client.predict("vgg11/digits", [{"objective": "min_time", "devices_per_node": 2}, {}])
    wanted = recommend(
        load(registered), cluster=ClusterSpec(devices_per_node=2), objective="min_time"
    )
    assert found["global_batch_size"][0] == wanted.global_batch_size
    assert list(found["objective"]) == ["min_time", "knee"]
    assert found["reasons"][0] == list(wanted.reasons)
    priced = {"objective": "min_cost", "usd_per_gb_hour": 0.15, "epochs": 90}
    assert client.predict("vgg11/digits", priced)["cost_usd"][0] > 0
    assert len(client.predict("vgg11/digits", {})) == 1


@pytest.mark.parametrize(
    ("name", "inputs", "message", "code"),
    [
        ("vgg11/cifar100", {}, "has no alias 'champion'", "RESOURCE_DOES_NOT_EXIST"),
        ("vgg11", {}, "model/dataset", "INVALID_PARAMETER_VALUE"),
        (None, {}, "name the deployment", "INVALID_PARAMETER_VALUE"),
        ("vgg11/digits", {"objective": "fast"}, "unknown objective", "INVALID_PARAMETER_VALUE"),
        ("vgg11/digits", {"deadlin_s": 3}, "did you mean deadline_s", "INVALID_PARAMETER_VALUE"),
        ("vgg11/digits", {"epochs": "many"}, "epochs must be", "INVALID_PARAMETER_VALUE"),
        ("vgg11/digits", {"nodes": 0}, "nodes must be", "INVALID_PARAMETER_VALUE"),
        ("vgg11/digits", {"global_batch_size": -1}, "global_batch", "INVALID_PARAMETER_VALUE"),
        ("vgg11/digits", {"global_batch_size": "x"}, "global_batch", "INVALID_PARAMETER_VALUE"),
        ("vgg11/digits", "text", "must be a DataFrame", "INVALID_PARAMETER_VALUE"),
        ("vgg11/digits", [], "at least one question", "INVALID_PARAMETER_VALUE"),
    ],
)
def test_a_bad_request_is_one_sentence(client, name, inputs, message: str, code: str) -> None:
    with pytest.raises(MlflowException, match=message) as caught:
        client.predict(name, inputs)
    assert caught.value.error_code == code
    assert "\n" not in caught.value.message


def test_the_verbs_move_the_champion(client, registered: str) -> None:
    (listed,) = client.list_deployments()
    assert (listed["name"], listed["version"]) == (registered, 3)
    assert client.get_deployment("vgg11/digits")["num_versions"] == 3
    with pytest.raises(MlflowException, match="deployed already, with version 3"):
        client.create_deployment("vgg11/digits", f"models:/{registered}/1")
    with pytest.raises(MlflowException, match="not promoted"):
        client.update_deployment("vgg11/digits", f"models:/{registered}/2")
    done = client.update_deployment(
        "vgg11/digits", f"models:/{registered}/2", config={"force": "true"}
    )
    assert done["version"] == client.get_deployment(registered)["version"] == 2
    client.delete_deployment("vgg11/digits")
    assert client.list_deployments() == []
    client.create_deployment("vgg11/digits", f"models:/{registered}/1")
    assert client.get_deployment(registered)["version"] == 1
    with pytest.raises(MlflowException, match="must be models:/"):
        client.update_deployment("vgg11/digits", "runs:/abc/model")


def test_mlflows_own_commands(registered: str, tmp_path: Path) -> None:
    cli = CliRunner()
    (tmp_path / "ask.json").write_text(json.dumps([{"global_batch_size": 64}]))
    ask = ["predict", "-t", "tula", "-I", str(tmp_path / "ask.json"), "--name"]
    done = cli.invoke(mlflow.deployments.cli.commands, [*ask, "vgg11/digits"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["step_time_s"]["0"] > 0
    done = cli.invoke(mlflow.deployments.cli.commands, [*ask, "vgg11/cifar100"])
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: ")
    assert "vgg11.cifar100" in done.stderr
    done = cli.invoke(mlflow.deployments.cli.commands, ["list", "-t", "tula"])
    assert registered in done.stdout
    done = cli.invoke(mlflow.deployments.cli.commands, ["get", "-t", "tula", "--name", registered])
    assert "champion" in done.stdout
    done = cli.invoke(mlflow.deployments.cli.commands, ["help", "-t", "tula"])
    assert done.stdout.strip() == deployments.target_help().strip()


@pytest.mark.slow
def test_run_local_says_that_the_server_did_not_start(store: Path) -> None:
    """That it does start is shown in test_security.py, where it listens on the loopback alone."""
    with pytest.raises(MlflowException, match=r"models:/tula.nope/1 ended with exit code 1"):
        deployments.run_local("any", "models:/tula.nope/1", config={"port": 5999})
