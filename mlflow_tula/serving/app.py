"""`mlflow server --app-name tula`: MLflow's own server, with the pages of the recommender at /tula.

    /tula                                workloads and the hardware they are registered for
    /tula/predictors/{name}              curve, band, measured points, knee, limit, Pareto front
    /tula/api/predictors                 the list as JSON
    /tula/api/predictors/{name}/view     what the page draws, for a question in the query
    /tula/api/decision                   POST one question (recommender.COLUMNS) as JSON

The routes stand in front of MLflow's own, inside its middleware: hosts are checked and headers set
as for every other page of it, and it listens where `mlflow server` says (127.0.0.1 by default).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import mlflow
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from mlflow_tula.errors import InvalidInputError, NotRegisteredError, TulaError
from mlflow_tula.serving import pages
from mlflow_tula.serving.curves import controls, view
from mlflow_tula.serving.faults import http_status, one_sentence
from mlflow_tula.serving.questions import FIELDS, LISTS, WORDS, Question
from mlflow_tula.serving.recommender import Recommender, checked_name

if TYPE_CHECKING:
    from fastapi import FastAPI

_logger = logging.getLogger(__name__)

MAX_REQUEST = 64 * 1024
_MOST_DISCARDED = 64 * 2**20
"""What is too large is read to its end, and forgotten: a client that is still sending when the
connection closes never reads why."""
_STORE, _REGISTRY = "_MLFLOW_SERVER_FILE_STORE", "_MLFLOW_SERVER_REGISTRY_STORE"
_PREFIX = "_MLFLOW_STATIC_PREFIX"

Handler = Callable[[Request], Awaitable[Response]]


def create_app() -> FastAPI:
    """The entry point `mlflow.app`: MLflow's server with our routes in front."""
    from mlflow.server.fastapi_app import create_fastapi_app

    # As MLflow's own handlers do with their first request: this process serves that store.
    if os.environ.get(_STORE):
        mlflow.set_tracking_uri(os.environ[_STORE])
        mlflow.set_registry_uri(os.environ.get(_REGISTRY) or os.environ[_STORE])
    app: FastAPI = create_fastapi_app()
    app.router.routes[:0] = routes(Recommender(), os.environ.get(_PREFIX, "").rstrip("/"))
    return app


def routes(recommender: Recommender, prefix: str = "") -> list[Route]:
    """The pages and their data, below `<prefix>/tula`."""
    site = _Site(recommender, prefix)
    base = f"{prefix}/tula"
    return [
        Route(base, site.html(site.index), methods=["GET"]),
        Route(f"{base}/", site.html(site.index), methods=["GET"]),
        Route(f"{base}/predictors/{{name}}", site.html(site.predictor), methods=["GET"]),
        Route(f"{base}/static/{{name}}", site.html(site.static), methods=["GET"]),
        Route(f"{base}/api/predictors", site.json(site.listed), methods=["GET"]),
        Route(f"{base}/api/predictors/{{name}}/view", site.json(site.view), methods=["GET"]),
        Route(f"{base}/api/decision", site.json(site.decision), methods=["POST"]),
        Route(f"{base}/{{rest:path}}", site.html(site.nothing), methods=["GET"]),
    ]


class _Site:
    """What is answered, apart from the addresses."""

    def __init__(self, recommender: Recommender, prefix: str) -> None:
        self.recommender, self.prefix = recommender, prefix

    def html(self, answer: Callable[[Request], Awaitable[Response]]) -> Handler:
        """The handler of a page; what is refused is a page as well."""

        async def handler(request: Request) -> Response:
            status, message = 500, ""
            try:
                return await answer(request)
            except TulaError as error:
                status, message = http_status(error), one_sentence(str(error))
            except Exception:
                message = _surprise(request)
            page = pages.error_page(self.prefix, status, message)
            return HTMLResponse(page, status, headers=pages.HEADERS)

        return handler

    def json(self, answer: Callable[[Request], Awaitable[Any]]) -> Handler:
        """The handler of data; what is refused is one sentence with its status."""

        async def handler(request: Request) -> Response:
            status, message = 500, ""
            try:
                return JSONResponse(await answer(request), headers={"Cache-Control": "no-store"})
            except TulaError as error:
                status, message = http_status(error), one_sentence(str(error))
                if isinstance(error, _TooLargeError):
                    status = 413
            except Exception:
                message = _surprise(request)
            return JSONResponse({"error": {"status": status, "message": message}}, status)

        return handler

    async def index(self, request: Request) -> Response:
        """Workloads and hardware."""
        listed = await run_in_threadpool(self.recommender.catalogue.listed)
        return HTMLResponse(pages.list_page(self.prefix, listed), headers=pages.HEADERS)

    async def predictor(self, request: Request) -> Response:
        """One predictor, with the question of the address."""
        page = await run_in_threadpool(
            self._predictor, request.path_params["name"], dict(request.query_params)
        )
        return HTMLResponse(page, headers=pages.HEADERS)

    def _predictor(self, name: str, query: Mapping[str, str]) -> str:
        champion = self.recommender.catalogue.champion(checked_name(name))
        table = self.recommender.catalogue.table(champion)
        allowed = controls(champion, table)
        question = _question(query, allowed)
        return pages.predictor_page(self.prefix, champion, allowed, view(champion, table, question))

    async def static(self, request: Request) -> Response:
        """A bundled script or style."""
        found = pages.static_file(request.path_params["name"])
        if found is None:
            raise NotRegisteredError("there is no such file")
        headers = {"Cache-Control": "public, max-age=86400"}
        return Response(found[0], media_type=found[1], headers=headers)

    async def nothing(self, request: Request) -> Response:
        """Any other address below ours."""
        raise NotRegisteredError(f"there is no page {request.url.path[:120]!r}: begin at /tula")

    async def listed(self, request: Request) -> Any:
        """Every predictor."""
        listed = await run_in_threadpool(self.recommender.catalogue.listed)
        names = ["name", "workload", "hardware", "model", "dataset", "device_name"]
        names += ["version", "foreseen"]
        return {"predictors": [{name: getattr(one, name) for name in names} for one in listed]}

    async def view(self, request: Request) -> Any:
        """What the page draws."""
        return await run_in_threadpool(
            self._view, request.path_params["name"], dict(request.query_params)
        )

    def _view(self, name: str, query: Mapping[str, str]) -> dict[str, Any]:
        champion = self.recommender.catalogue.champion(checked_name(name))
        table = self.recommender.catalogue.table(champion)
        return view(champion, table, _question(query, controls(champion, table)))

    async def decision(self, request: Request) -> Any:
        """One decision, with its curve."""
        return await run_in_threadpool(self._decision, await _body(request))

    def _decision(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        found = self.recommender.decide(asked)
        choice = found.recommendation.to_dict()
        return {**found.row(), "curve": choice["curve"], "headline": found.recommendation.headline}


class _TooLargeError(InvalidInputError):
    """A request with more bytes than are read."""


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object of a request, within limits."""
    text, length = bytearray(), 0
    async for chunk in request.stream():
        length += len(chunk)
        if length <= MAX_REQUEST:
            text += chunk
        elif length > _MOST_DISCARDED:
            break
    if length > MAX_REQUEST:
        raise _TooLargeError(f"a question has at most {MAX_REQUEST:,} bytes of JSON")
    try:
        asked = json.loads(text.decode("utf-8"), parse_constant=_refuse_constant)
    except InvalidInputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"a question is a JSON object in UTF-8: {error}") from error
    if not isinstance(asked, dict):
        raise InvalidInputError(f"a question is a JSON object, not a {type(asked).__name__}")
    return asked


def _refuse_constant(text: str) -> float:
    raise InvalidInputError(f"JSON has no {text}: leave the field out, or give a number")


def _question(query: Mapping[str, str], allowed: Mapping[str, Any]) -> Question:
    """The question of an address: numbers as text, lists with commas, the page's defaults."""
    asked: dict[str, Any] = {
        "nodes": [n for n in allowed["nodes"] if n <= allowed["nodes_default"]],
        "devices_per_node": allowed["devices_default"],
        "epochs": 10.0,
    }
    for key, text in query.items():
        if key not in FIELDS or key in WORDS:
            asked[key] = text
        elif text == "":
            asked.pop(key, None)
        elif key in LISTS:
            asked[key] = [_number(key, part) for part in text.split(",")]
        else:
            asked[key] = _number(key, text)
    return Question.from_record(asked)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise InvalidInputError(f"{name} must be a number, not {text[:40]!r}") from error


def _surprise(request: Request) -> str:
    """A fault of ours: the log gets the traceback, the caller one sentence."""
    _logger.exception("%s failed", request.url.path)
    return "this request could not be answered: the server's log says why"
