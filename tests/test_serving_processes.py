"""`mlflow models serve` and `mlflow server --app-name tula`, as people start them."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path

import mlflow
import pytest
import requests
from serving_parts import running

from mlflow_tula.recommend import recommend
from mlflow_tula.registry import load, register
from mlflow_tula.registry.versions import promote
from mlflow_tula.serving.recommender_files import RECOMMENDER, ensure_recommender
from mlflow_tula.specs import ClusterSpec

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::mlflow_tula.errors.TulaWarning"),
]


def test_models_serve_answers_refuses_and_takes_up_a_new_champion(
    registered: str, store: Path, free_port: int
) -> None:
    ensure_recommender(registered)
    words = ("models", "serve", "-m", f"models:/{RECOMMENDER}@champion", "--env-manager", "local")
    with running(*words, port=free_port, health="/ping", folder=store.parent) as address:

        def ask(data: bytes | str, kind: str = "application/json") -> requests.Response:
            return requests.post(
                f"{address}/invocations", data=data, headers={"Content-Type": kind}, timeout=30
            )

        def decide(**question) -> requests.Response:
            return ask(json.dumps({"dataframe_records": [{"name": registered, **question}]}))

        (row,) = decide(devices_per_node=2).json()["predictions"]
        wanted = recommend(load(registered), cluster=ClusterSpec(devices_per_node=2))
        assert row["global_batch_size"] == wanted.global_batch_size
        assert row["version"] == 3
        assert row["cost_usd"] is None
        one = {"name": registered}
        bad = [
            (decide(objective="fast"), "unknown objective"),
            (decide(epochs="many"), "epochs must be a number"),
            (decide(epochs=float("nan")), "epochs must be a finite number"),
            (decide(deadlin_s=1), "did you mean deadline_s"),
            (ask('{"dataframe_records": [{"dataset": "digits"}]}'), "must name model"),
            (ask('{"dataframe_records": [{"model": "nope", "dataset": "x"}]}'), "unknown workload"),
            (ask(json.dumps({"dataframe_records": [one] * 300_000})), "a request may have"),
            (ask("x" * 10_000_000), "a request may have"),
            (ask("[" * 500_000), "cannot be read"),
            (ask("nonsense"), "valid JSON"),
            (ask("", "text/csv"), "CSV"),
        ]
        for answer, message in bad:
            assert answer.status_code in (400, 404), answer.text
            assert message in answer.json()["message"]
            assert "Traceback" not in answer.text
            assert len(answer.text) < 1200
            assert "\n" not in answer.json()["message"]
        promote(registered, 1, force=True)
        start = time.monotonic()
        while decide().json()["predictions"][0]["version"] != 1:
            assert time.monotonic() - start < 5.0
            time.sleep(0.1)


def test_a_served_recommender_outlives_its_tracking_server(
    store: Path, table, bundle, free_port: int, tmp_path_factory, monkeypatch
) -> None:
    import socket

    words = ("server", "--app-name", "tula", "--workers", "1", "--host", "127.0.0.1")
    words += ("--backend-store-uri", f"sqlite:///{store}")
    other = tmp_path_factory.mktemp("serve")
    with ExitStack() as stack:
        tracking = stack.enter_context(
            running(*words, port=free_port, health="/health", folder=store.parent)
        )
        monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking)
        mlflow.set_tracking_uri(None)
        registered = register(bundle, table=table).name
        ensure_recommender(registered)
        page = requests.get(f"{tracking}/tula/predictors/{registered}", timeout=30)
        assert page.status_code == 200, page.text
        assert "decision-batch" in page.text
        assert requests.get(f"{tracking}/", timeout=30).status_code == 200
        answer = requests.get(f"{tracking}/tula", headers={"Host": "evil.example"}, timeout=30)
        assert answer.status_code == 403
        posted = requests.post(
            f"{tracking}/tula/api/decision", json={"name": registered}, timeout=9
        )
        assert posted.json()["version"] == 1
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        serve = ("models", "serve", "-m", f"models:/{RECOMMENDER}@champion", "--env-manager")
        with running(*serve, "local", port=port, health="/ping", folder=other) as address:

            def decide(name: str) -> tuple[requests.Response, float]:
                start = time.monotonic()
                body = {"dataframe_records": [{"name": name}]}
                answer = requests.post(f"{address}/invocations", json=body, timeout=30)
                return answer, time.monotonic() - start

            assert decide(registered)[0].json()["predictions"][0]["version"] == 1
            stack.close()  # the tracking server ends
            time.sleep(4.5)
            seen, seconds = decide(registered)
            assert seen.status_code == 200
            assert "as last seen" in seen.json()["predictions"][0]["warnings"][0]
            assert seconds < 10.0
            time.sleep(2.5)
            unseen, seconds = decide("tula.never.seen.x")
            assert unseen.status_code == 503
            assert seconds < 10.0
            assert "\n" not in unseen.json()["message"]


def test_the_benchmark_runs_on_small_input(clean_mlflow: Path) -> None:
    import subprocess
    import sys

    script = Path(__file__).parent.parent / "benchmarks" / "serving.py"
    words = ["--predictors", "2", "--seconds", "2", "--requests", "10", "--check"]
    words += ["--store", str(clean_mlflow / "s"), "--markdown", str(clean_mlflow / "s.md")]
    done = subprocess.run(
        [sys.executable, str(script), *words], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "| a new champion, under that load |" in (clean_mlflow / "s.md").read_text()
