"""The fuzzer's targets that are asked over HTTP, in this process: models served, and the pages."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from fuzz_inputs import SECRET, addresses, questions, requests
from fuzz_targets import Fixtures, Target, WrongError
from hypothesis import strategies as st


def invocations_target(fixtures: Fixtures) -> Target:
    """Requests to the scoring server of a registered predictor, in this process."""
    from fastapi.testclient import TestClient
    from mlflow.pyfunc import scoring_server

    from mlflow_tula.registry.pyfunc_model import COLUMNS, PARAMETERS

    client = TestClient(scoring_server.init(fixtures.model()), raise_server_exceptions=True)

    def run(case: tuple[str, bytes]) -> str:
        content, body = case
        try:
            answer = client.post("/invocations", content=body, headers={"content-type": content})
        except RecursionError as error:
            if _is_ours(error):
                raise
            # MLflow parses the request before the model sees it, and answers 500
            return "upstream: JSON nested too deep for MLflow's parser"
        except (TypeError, ValueError) as error:
            if _is_ours(error):
                raise
            return f"upstream: MLflow's parser raises {type(error).__name__}, and answers 500"
        if answer.status_code >= 500 or "Traceback" in answer.text:
            ours = "mlflow_tula" in answer.text or "pyfunc_model.py" in answer.text
            if answer.status_code < 500 and not ours:
                return "upstream: MLflow's own refusal carries its stack trace"
            raise WrongError(f"{answer.status_code}: {answer.text[:1500]}")
        return "taken" if answer.status_code == 200 else "refused"

    return Target(inputs=requests(tuple(COLUMNS), tuple(PARAMETERS)), run=run)


def decisions_target(fixtures: Fixtures) -> Target:
    """Questions to `tula.recommender`: its scoring server with the guard, and the pages."""
    import mlflow
    from fastapi.testclient import TestClient
    from mlflow.pyfunc import scoring_server
    from starlette.applications import Starlette

    from mlflow_tula.serving.app import routes
    from mlflow_tula.serving.recommender import Recommender
    from mlflow_tula.serving.recommender_files import RECOMMENDER, ensure_recommender
    from mlflow_tula.serving.scoring_guard import guard

    os.chdir(fixtures.folder / "store")
    version, _ = ensure_recommender(fixtures.name)
    served = mlflow.pyfunc.load_model(f"models:/{RECOMMENDER}/{version}")
    os.chdir(fixtures.work)
    scoring = TestClient(scoring_server.init(served))
    pages = TestClient(Starlette(routes=routes(Recommender())))
    inputs = st.one_of(
        st.tuples(st.just("invocations"), questions(fixtures.name, many=True)),
        st.tuples(st.just("decision"), questions(fixtures.name, many=False)),
        st.tuples(st.just("view"), addresses(fixtures.name)),
    )
    before = scoring_server.invocations

    def run(case: tuple[str, Any]) -> str:
        kind, value = case
        guard()  # as in the process that `mlflow models serve` starts, and in no other
        try:
            if kind == "invocations":
                answer = scoring.post("/invocations", content=value[1], headers={TYPE: value[0]})
            elif kind == "decision":
                answer = pages.post(
                    "/tula/api/decision", content=value[1], headers={TYPE: value[0]}
                )
            else:
                answer = pages.get(value)
        finally:
            scoring_server.invocations = before
        words = ("Traceback", "stack_trace", SECRET)
        if answer.status_code >= 500 or any(word in answer.text for word in words):
            raise WrongError(f"{answer.status_code}: {answer.text[:1500]}")
        return "taken" if answer.status_code == 200 else "refused"

    return Target(inputs=inputs, run=run)


TYPE = "content-type"


def _is_ours(error: BaseException) -> bool:
    """Whether one of our files stands in the traceback."""
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if "mlflow_tula" in name or "pyfunc_model" in name or "predictors" in name:
            return True
        trace = trace.tb_next
    return False


SERVED: dict[str, Callable[[Fixtures], Target]] = {
    "invocations": invocations_target,
    "decisions": decisions_target,
}
