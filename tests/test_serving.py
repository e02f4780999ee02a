"""Decisions on request: the recommender, its model as MLflow loads it, and the pages of /tula."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import mlflow
import pandas as pd
import pytest
from mlflow.exceptions import MlflowException
from starlette.testclient import TestClient

from mlflow_tula.errors import (
    DanglingAliasError,
    InvalidInputError,
    NotRegisteredError,
    StoreError,
    UnknownNameError,
)
from mlflow_tula.recommend import recommend
from mlflow_tula.registry import load
from mlflow_tula.registry.versions import promote
from mlflow_tula.serving import (
    app,
    catalogue,
    champions,
    pages,
    recommender_files,
    scoring_guard,
)
from mlflow_tula.serving.catalogue import Catalogue
from mlflow_tula.serving.curves import controls, view
from mlflow_tula.serving.faults import RequestError
from mlflow_tula.serving.questions import MAX_BODY, Question, records
from mlflow_tula.serving.recommender import Recommender
from mlflow_tula.serving.recommender_files import RECOMMENDER, ensure_recommender
from mlflow_tula.specs import ClusterSpec

pytestmark = pytest.mark.filterwarnings("ignore::mlflow_tula.errors.TulaWarning")


@pytest.fixture
def recommender(registered: str) -> Recommender:
    return Recommender(Catalogue(fresh_s=0.05))


def ask(name: str, **more) -> dict:
    return {"name": name, **more}


def point_champion_to(store: Path, version: int) -> None:
    """As a registry is after someone deleted the version in a database or a proxy."""
    with closing(sqlite3.connect(store)) as database:
        database.execute("UPDATE registered_model_aliases SET version = ?", (version,))
        database.commit()


# ---- questions ----


def test_a_question_is_what_recommend_takes(bundle) -> None:
    record = {
        "objective": "min_cost",
        "epochs": 90,
        "deadline_s": 1e6,
        "usd_per_gb_hour": 0.15,
        "nodes": 1,
        "devices_per_node": [1, 2],
        "candidates": [64, 128],
        "current_global_batch_size": 64,
        "memory_limit_bytes": None,
    }
    question = Question.from_record(record)
    assert question.clusters == (ClusterSpec(), ClusterSpec(devices_per_node=2))
    found = question.decide(bundle)
    assert found.objective == "min_cost"
    assert {point.global_batch_size for point in found.curve} == {64, 128}
    assert hash(question) == hash(Question.from_record(record))
    assert Question.from_record({}).decide(bundle) == recommend(bundle, cluster=ClusterSpec())


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"objective": "fast"}, "unknown objective 'fast'"),
        ({"objective": 3}, "objective must be a word"),
        ({"deadlin_s": 3}, "did you mean deadline_s"),
        ({"epochs": "90"}, "epochs must be a number, not '90'"),
        ({"epochs": True}, "epochs must be a number, not True"),
        ({"epochs": math.nan}, "epochs must be a finite number"),
        ({"epochs": math.inf}, "epochs must be a finite number"),
        ({"epochs": 0}, "epochs must be a finite number above 0"),
        ({"usd_per_device_hour": -1}, "usd_per_device_hour must be"),
        ({"nodes": 1.5}, "nodes must be a whole number"),
        ({"nodes": []}, "nodes must hold 1 to"),
        ({"nodes": {"a": 1}}, "nodes must be a number, not a dict of 1"),
        ({"candidates": [8, "16"]}, "candidates must be a number, not '16'"),
        ({"candidates": list(range(1, 1000))}, "candidates must hold 1 to 256 values, not 999"),
        ({"nodes": list(range(1, 30)), "devices_per_node": [1, 2, 4]}, "make 87 clusters"),
        ({"dataset_size": 10**400}, "dataset_size must be"),
    ],
)
def test_a_bad_value_is_named(record: dict, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Question.from_record(record)


def test_rows_of_a_frame_lack_fields_but_do_not_hold_nan() -> None:
    frame = pd.DataFrame([{"epochs": 3.0, "nodes": [1, 2]}, {"objective": "knee"}])
    assert records(frame) == [{"epochs": 3.0, "nodes": [1, 2]}, {"objective": "knee"}]
    assert records(pd.DataFrame([{"epochs": None}])) == [{}]
    with pytest.raises(InvalidInputError, match="epochs must be a finite number, not nan"):
        records(pd.DataFrame([{"epochs": math.nan}]))
    with pytest.raises(InvalidInputError, match="at most 100 questions a request, not 101"):
        records(pd.DataFrame({"epochs": [1.0] * 101}))
    with pytest.raises(InvalidInputError, match="'epochs' stands twice"):
        records(pd.DataFrame([[1, 2]], columns=["epochs", "epochs"]))
    with pytest.raises(InvalidInputError, match="columns are too many"):
        records(pd.DataFrame([range(1000)]))


# ---- the recommender and its catalogue ----


def test_the_champion_answers(recommender: Recommender, registered: str) -> None:
    (row,) = recommender.answer([ask(registered, devices_per_node=2, objective="min_time")])
    wanted = recommend(
        load(registered), cluster=ClusterSpec(devices_per_node=2), objective="min_time"
    )
    assert row["global_batch_size"] == wanted.global_batch_size
    assert (row["name"], row["version"]) == (registered, 3)
    assert row["time_s_lower"] <= row["time_s"] <= row["time_s_upper"]
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    by_parts = recommender.answer([{"model": "vgg11", "dataset": "digits"}])
    hardware = registered.rpartition(".")[2]
    parts = {"model": "VGG11", "dataset": "digits", "hardware": hardware}
    assert recommender.answer([parts]) == by_parts
    (listed,) = recommender.catalogue.listed()
    assert (listed.name, listed.version) == (registered, 3)
    by_print = recommender.answer([{**parts, "hardware": listed.fingerprint}])
    assert by_print == by_parts


def test_answers_are_kept_and_not_shared(recommender: Recommender, registered: str) -> None:
    (first,) = recommender.answer([ask(registered)])
    first["global_batch_size"] = 0
    (again,) = recommender.answer([ask(registered)])
    assert again["global_batch_size"] > 0


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        ({"model": "vgg12", "dataset": "digits"}, NotRegisteredError, "did you mean vgg11.digits"),
        ({"model": "vgg11", "dataset": "x", "hardware": "y"}, NotRegisteredError, "unknown worklo"),
        ({"model": "vgg11", "dataset": "digits", "hardware": "4x-t4"}, NotRegisteredError, "it is"),
        ({"model": "../../etc", "dataset": "passwd"}, NotRegisteredError, "unknown workload 'etc."),
        ({"name": "../../etc/passwd"}, InvalidInputError, "is named tula"),
        ({"name": "tula.a.b.c; DROP TABLE x"}, InvalidInputError, "is named tula"),
        ({"name": ["tula.a.b.c"]}, InvalidInputError, "is named tula"),
        ({"dataset": "digits"}, InvalidInputError, "must name model:"),
        ({}, InvalidInputError, "must name model and dataset"),
        ({"model": 3, "dataset": "digits"}, InvalidInputError, "model must be a non-empty string"),
        ({"model": "m" * 10**7, "dataset": "d"}, InvalidInputError, "at most 120 printable"),
        ({"modl": "vgg11"}, UnknownNameError, "unknown column .modl.: did you mean"),
    ],
)
def test_who_is_not_there(recommender, request_: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        recommender.answer([request_])
    assert len(str(caught.value)) < 600


def test_which_of_several_questions_is_refused(recommender, registered: str) -> None:
    with pytest.raises(InvalidInputError, match="question 2: unknown objective"):
        recommender.answer([ask(registered), ask(registered, objective="x")])
    with pytest.raises(InvalidInputError, match="ask 1 to 100 questions, not 0"):
        recommender.answer([])


def test_a_new_champion_is_taken_up(recommender: Recommender, registered: str) -> None:
    assert recommender.answer([ask(registered)])[0]["version"] == 3
    promote(registered, 1, force=True)
    until = time.monotonic() + 5.0
    while recommender.answer([ask(registered)])[0]["version"] != 1:
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_deleted_champion_is_named_with_the_way_out(
    recommender, registered: str, store: Path
) -> None:
    point_champion_to(store, 17)
    with pytest.raises(DanglingAliasError, match=r"version 17, which was deleted: .*promote"):
        recommender.answer([ask(registered)])


def test_a_dead_server_is_an_answer_soon(clean_mlflow, monkeypatch, free_port: int) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "7")
    recommender = Recommender(Catalogue(answer_s=1.0))
    start = time.monotonic()
    with pytest.raises(StoreError, match=f"127.0.0.1:{free_port}"):
        recommender.answer([ask("tula.a.b.c")])
    assert time.monotonic() - start < 9.0
    with pytest.raises(StoreError, match="has not answered"):  # at once, for the next two seconds
        recommender.answer([ask("tula.a.b.c")])


def test_what_was_seen_is_served_while_the_registry_is_gone(
    recommender: Recommender, registered: str, store: Path
) -> None:
    before = recommender.answer([ask(registered)])[0]
    store.write_bytes(b"no database " * 100)
    time.sleep(0.15)
    after = recommender.answer([ask(registered)])[0]
    assert after["global_batch_size"] == before["global_batch_size"]
    assert "the champion as last seen" in after["warnings"][0]


def test_several_threads_look_once(registered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    real = catalogue.find_version

    def slow(*arguments):
        looks.append(arguments)
        time.sleep(0.2)
        return real(*arguments)

    monkeypatch.setattr(catalogue, "find_version", slow)
    shared, found = Catalogue(), []
    threads = [
        threading.Thread(target=lambda: found.append(shared.champion(registered))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(looks) == 1


def test_few_champions_stay_in_memory(registered: str, remeasured) -> None:
    small = Catalogue(kept=1)
    small.champion(registered)
    small._entries["tula.other.one.x"] = next(iter(small._entries.values()))
    small._forget(registered)
    small.champion(registered)
    assert list(small._entries) == [registered]


def test_champions_are_read_ahead(registered: str) -> None:
    shared = Catalogue()
    shared.warm()
    until = time.monotonic() + 30
    while registered not in shared._entries:
        assert time.monotonic() < until
        time.sleep(0.02)


def test_the_servers_own_artifacts_are_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_DESTINATION", "/srv/art")
    assert champions.within_server("mlflow-artifacts:/1/models/m") == "/srv/art/1/models/m"
    assert champions.within_server("s3://b/1") == "s3://b/1"
    with pytest.raises(StoreError, match="leaves the artifact folder"):
        champions.within_server("mlflow-artifacts:/../../etc")


# ---- the model ----


def test_the_model_is_registered_once_and_answers(registered: str) -> None:
    assert ensure_recommender(registered) == (1, True)
    assert ensure_recommender(registered) == (1, False)
    assert ensure_recommender(registered, force=True) == (2, True)
    model = mlflow.pyfunc.load_model(f"models:/{RECOMMENDER}@champion")
    hardware = registered.rpartition(".")[2]
    rows = [
        {"model": "vgg11", "dataset": "digits", "hardware": hardware},
        {"name": registered, "objective": "min_cost", "usd_per_device_hour": 1.0, "epochs": 2.0},
    ]
    found = model.predict(pd.DataFrame(rows, index=[5, 7]))
    assert list(found.index) == [5, 7]
    assert list(found["version"]) == [3, 3]
    assert found["cost_usd"][5] is None
    assert found["cost_usd"][7] > 0
    assert set(found.columns) == {one.name for one in model.metadata.signature.outputs}
    assert model.input_example is not None
    assert not any("tula" in line for line in recommender_files.requirements())
    assert [one.name for one in Catalogue().listed()] == [registered]
    with pytest.raises(MlflowException, match="unknown objective") as caught:
        model.predict(pd.DataFrame([{"name": registered, "objective": "x"}]))
    assert caught.value.get_http_status_code() == 400
    # What MLflow's scoring server does to messages leaves ours alone.
    caught.value.message = "Failed to predict data\n..."
    assert caught.value.message.startswith("unknown objective")
    with pytest.raises(MlflowException, match="takes columns, no params"):
        model.unwrap_python_model().predict(None, pd.DataFrame([{}]), {"level": 1})


STRANGER = """
import json, sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "torchvision"}:
            raise ImportError(f"{name} is not installed here")
sys.meta_path.insert(0, Hidden())
sys.path = [one for one in sys.path if "mlflow_tula" not in one]
sys.meta_path = [one for one in sys.meta_path if "editable" not in repr(one).lower()]
sys.path = [one for one in sys.path if not one.endswith("work/main")]
import mlflow
model = mlflow.pyfunc.load_model("models:/tula.recommender@champion")
import mlflow_tula
answer = model.predict([json.loads(sys.argv[1])])
print(json.dumps({"file": mlflow_tula.__file__, "version": answer["version"][0]}))
"""


def test_a_scoring_server_refuses_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.pyfunc import scoring_server

    monkeypatch.setattr(scoring_server, "invocations", scoring_server.invocations)
    assert scoring_guard.guard()
    assert scoring_guard.guard()
    for data, kind in (
        (b"nonsense", "application/json"),
        (b"[[" * 200_000, "application/json"),
        (b"", "text/csv"),
        (b"x", None),
        (b'{"dataframe_records": "x"}', "application/json"),
        (b'{"model": "vgg11"}', "application/json"),
        (b"x" * (MAX_BODY + 1), "application/json"),
    ):
        with pytest.raises(RequestError) as caught:
            scoring_server.invocations(data, kind, _Model(), None)
        text = caught.value.serialize_as_json()
        assert caught.value.get_http_status_code() == 400
        assert "Traceback" not in text
        assert "\\n" not in text
        assert len(text) < 1000


class _Model:
    class metadata:  # noqa: N801
        @staticmethod
        def get_params_schema():
            return None

    def predict(self, data, params=None):
        raise AssertionError("nothing of this reaches the model")


# ---- the pages ----


@pytest.fixture
def client(registered: str) -> TestClient:
    return TestClient(app.create_app(), base_url="http://localhost")


def test_pages_lie_beside_mlflows_own(client: TestClient, registered: str) -> None:
    page = client.get("/tula")
    assert page.status_code == 200
    assert registered in page.text
    assert "1 workload, 1 kind of hardware, 1 predictor" in page.text
    assert page.headers["x-frame-options"] == "SAMEORIGIN"
    assert "script-src 'self'" in page.headers["content-security-policy"]
    page = client.get(f"/tula/predictors/{registered}")
    assert page.status_code == 200
    choice = recommend(
        load(registered),
        cluster=[ClusterSpec(devices_per_node=1), ClusterSpec(devices_per_node=2)],
        epochs=10,
    )
    assert f'<span id="decision-batch">{choice.global_batch_size}</span>' in page.text
    for outside in ("http://", "https://", "//cdn"):
        assert outside not in page.text.replace("http://www.w3.org/2000/svg", "")
    for name in pages.STATIC:
        assert client.get(f"/tula/static/{name}").status_code == 200
    assert client.get("/health").text == "OK"
    assert client.get("/api/2.0/mlflow/registered-models/search").status_code == 200
    assert client.get("/tula", headers={"host": "evil.example"}).status_code == 403


@pytest.mark.parametrize(
    ("address", "status", "message"),
    [
        ("/tula/nothing", 404, "there is no page"),
        ("/tula/static/../app.py", 404, ""),
        ("/tula/static/%2e%2e%2fapp.py", 404, "there is no"),
        ("/tula/static/app.py", 404, "there is no such file"),
        ("/tula/predictors/tula.a.b.c", 404, "unknown workload"),
        ("/tula/predictors/%3Cscript%3E", 400, "&lt;script&gt;"),
        ("/tula/predictors/{name}?epochs=many", 400, "epochs must be a number"),
        ("/tula/predictors/{name}?objective=fast", 400, "unknown objective"),
        ("/tula/predictors/{name}?x=1", 400, "unknown column"),
        ("/tula/predictors/{name}?nodes=nan", 400, "nodes must be a finite number"),
        ("/tula/api/predictors/{name}/view?deadline_s=-1", 400, "deadline_s must be"),
        ("/tula/api/predictors/..%2f..%2fx/view", 404, ""),
    ],
)
def test_a_bad_address_is_one_sentence(
    client: TestClient, registered: str, address: str, status: int, message: str
) -> None:
    answer = client.get(address.replace("{name}", registered))
    assert answer.status_code == status
    assert message in answer.text
    assert "Traceback" not in answer.text
    assert "<script>" not in answer.text


def test_a_view_keeps_the_curves_where_no_choice_meets_the_limits(
    client: TestClient, registered: str
) -> None:
    address = f"/tula/api/predictors/{registered}/view"
    free = client.get(address).json()
    assert free["decision"]["version"] == 3
    chosen = next(line for line in free["lines"] if line["chosen"])
    assert all(
        low <= mid <= high
        for low, mid, high in zip(
            chosen["time_lower"], chosen["time"], chosen["time_upper"], strict=True
        )
    )
    assert sum(point["choice"] for point in free["points"]) == 1
    assert any(point["on_pareto"] for point in free["points"])
    assert any(row["time_s"] for row in free["measured"])
    assert free["knee"] in chosen["batch"]
    assert free["limit_bytes"] > 0
    tight = client.get(f"{address}?deadline_s=0.001&epochs=10").json()
    assert tight["decision"] is None
    assert "no candidate meets the deadline_s" in tight["error"]
    assert len(tight["lines"]) == len(free["lines"])


def test_a_target_counts_epochs(bundle, table) -> None:
    import mlflow_tula as tula

    sizes = [16, 32, 64, 128, 256]
    frame = pd.DataFrame(
        {"global_batch_size": sizes, "epochs_to_target": [8.0, 8.5, 9.0, 11.0, 15.0]}
    )
    fitted = tula.fit(table, convergence=frame)
    champion = champions.Champion(name="n", version=1, source="s", bundle=fitted)
    question = Question(objective="min_time_to_target")
    shown = view(champion, table, question)
    point = next(one for one in shown["points"] if one["choice"])
    line = next(one for one in shown["lines"] if one["chosen"])
    at = line["batch"].index(point["global_batch_size"])
    assert line["time"][at] == pytest.approx(point["time_s"])
    assert "min_time_to_target" in controls(champion, table)["objectives"]
    assert (
        "min_time_to_target" not in controls(replace(champion, bundle=bundle), table)["objectives"]
    )


def test_a_line_goes_through_its_candidates(bundle, table) -> None:
    champion = champions.Champion(name="n", version=1, source="s", bundle=bundle)
    question = Question(devices_per_node=(1, 2), nodes=(1, 2), epochs=3.0)
    shown = view(champion, table, question)
    for point in shown["points"]:
        cluster = (point["nodes"], point["devices_per_node"])
        line = next(x for x in shown["lines"] if (x["nodes"], x["devices_per_node"]) == cluster)
        at = line["batch"].index(point["global_batch_size"])
        assert line["time"][at] == pytest.approx(point["time_s"])
        assert line["time_upper"][at] == pytest.approx(point["time_s_upper"])
        assert line["memory"][at] == pytest.approx(point["peak_memory_bytes"])
    json.dumps(shown, allow_nan=False)


def test_a_decision_is_posted(client: TestClient, registered: str) -> None:
    answer = client.post("/tula/api/decision", json=ask(registered, devices_per_node=2))
    assert answer.status_code == 200
    found = answer.json()
    wanted = recommend(load(registered), cluster=ClusterSpec(devices_per_node=2))
    assert found["global_batch_size"] == wanted.global_batch_size
    assert found["headline"] == wanted.headline
    assert len(found["curve"]) == len(wanted.curve)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"nonsense", 400, "JSON object"),
        (b"[1]", 400, "not a list"),
        (b'{"name": "NAME", "epochs": NaN}', 400, "JSON has no NaN"),
        (b'{"name": "NAME", "epochs": 1e999}', 400, "finite"),
        (b'{"name": "NAME", "epochs": "3"}', 400, "epochs must be a number"),
        (b'{"name": "NAME", "objective": "x"}', 400, "unknown objective"),
        (b'{"name": "NAME", "epochs": 5, "deadline_s": 0.001}', 400, "no candidate meets"),
        (b'{"model": "nope", "dataset": "x"}', 404, "unknown workload"),
        (b'{"dataset": "x"}', 400, "must name model"),
        (b"\xff\xfe", 400, "UTF-8"),
        (b"[" * 60_000, 400, "JSON object"),
        (b'{"x": "' + b"y" * 10_000_000 + b'"}', 413, "at most 65,536 bytes"),
    ],
)
def test_a_bad_decision_request_is_one_sentence(
    client: TestClient, registered: str, body: bytes, status: int, message: str
) -> None:
    answer = client.post("/tula/api/decision", content=body.replace(b"NAME", registered.encode()))
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    assert "\n" not in answer.json()["error"]["message"]


def test_a_dangling_alias_is_named_on_the_page(
    client: TestClient, registered: str, store: Path
) -> None:
    point_champion_to(store, 17)
    answer = client.get(f"/tula/predictors/{registered}")
    assert answer.status_code == 503
    assert "tula registry promote" in answer.text


def test_a_fault_of_ours_shows_no_traceback(registered: str, monkeypatch) -> None:
    monkeypatch.setattr(app, "view", lambda *_: 1 / 0)
    client = TestClient(app.create_app(), base_url="http://localhost")
    answer = client.get(f"/tula/api/predictors/{registered}/view")
    assert answer.status_code == 500
    assert "the server's log says why" in answer.json()["error"]["message"]
    assert "ZeroDivision" not in answer.text


def test_an_empty_store_says_how_to_begin(store: Path) -> None:
    client = TestClient(app.create_app(), base_url="http://localhost")
    assert "tula main --model vgg11" in client.get("/tula").text


def test_embedded_json_cannot_end_its_element() -> None:
    text = pages.embedded({"name": "</script><script>alert(1)</script>"})
    assert "<" not in text
    assert json.loads(text)["name"].startswith("</script>")


def test_it_serves_without_torch_and_from_the_models_own_code(
    registered: str, tmp_path: Path
) -> None:
    """The package is hidden, as in an image that MLflow builds from the model alone."""
    ensure_recommender(registered)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["MLFLOW_TRACKING_URI"] = mlflow.get_tracking_uri()
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, json.dumps({"name": registered})],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["version"] == 3
    assert "/code/mlflow_tula/" in found["file"]


def test_a_question_that_is_too_large_is_read_to_its_end() -> None:
    """Or the client, still sending, sees a reset connection in place of the answer."""
    import asyncio

    from starlette.requests import Request

    left = 160
    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}

    async def receive() -> dict[str, object]:
        nonlocal left
        left -= 1
        return {"type": "http.request", "body": b"x" * 65536, "more_body": left > 0}

    with pytest.raises(InvalidInputError, match="at most 65,536 bytes"):
        asyncio.run(app._body(Request(scope, receive)))
    assert left == 0
