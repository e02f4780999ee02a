"""One sentence for what MLflow's scoring server cannot read.

The server reads a request before the model sees it, and answers some of what it cannot read with a
traceback, with the whole request, or with 500 and no word (an empty CSV, text that is not JSON, no
content type, brackets ten megabytes deep). `guard` is called when `mlflow models serve` loads the
recommender, in that process alone, and stands between the server and its reader.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from mlflow.exceptions import MlflowException

from mlflow_tula.serving.faults import RequestError, as_request_errors
from mlflow_tula.serving.questions import MAX_BODY

_logger = logging.getLogger(__name__)
_SHAPE = '{"dataframe_records": [{"model": "vgg11", "dataset": "cifar100", "hardware": "..."}]}'


Answer = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
"""`Recommender.answer`: questions in, one row each out."""


def guard(answer: Answer | None = None) -> bool:
    """Put the reader of this process's scoring server behind the guard; False where it cannot.

    Args:
        answer: what plain questions are put to; None: the server's own way.
    """
    from mlflow.pyfunc import scoring_server

    inner = getattr(scoring_server, "invocations", None)
    if inner is None or getattr(inner, "_tula_guard", False):
        return inner is not None
    response = getattr(scoring_server, "InvocationsResponse", None)

    def invocations(data: Any, content_type: str | None, model: Any, input_schema: Any) -> Any:
        if answer is not None and response is not None:
            questions = plain_questions(data, content_type)
            if questions is not None:
                with as_request_errors():
                    text = json.dumps({"predictions": answer(questions)})
                return response(response=text, status=200, mimetype="application/json")
        return _answered(inner, data, content_type, model, input_schema)

    invocations._tula_guard = True  # type: ignore[attr-defined]
    scoring_server.invocations = invocations
    return True


def plain_questions(data: Any, content_type: str | None) -> list[dict[str, Any]] | None:
    """The questions of `{"dataframe_records": [{...}, ...]}`; None for anything else."""
    kind = (content_type or "").replace(" ", "").lower()
    if kind not in ("application/json", "application/json;charset=utf-8") or len(data) > MAX_BODY:
        return None
    try:
        asked = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(asked, dict) or set(asked) != {"dataframe_records"}:
        return None
    questions = asked["dataframe_records"]
    if not isinstance(questions, list) or not questions:
        return None
    return questions if all(isinstance(one, dict) for one in questions) else None


def _answered(
    inner: Any, data: Any, content_type: str | None, model: Any, input_schema: Any
) -> Any:
    """What the server answers, with its own refusals in one sentence."""
    if len(data) > MAX_BODY:
        raise RequestError(
            f"a request may have {MAX_BODY:,} bytes, not {len(data):,}: ask several times",
            "INVALID_PARAMETER_VALUE",
        )
    try:
        return inner(data, content_type or "application/json", model, input_schema)
    except RequestError:
        raise
    except MlflowException as error:
        _logger.info("refused: %s", error)
        reason = error.message.split("\nInput:")[0].split("IMPORTANT:")[0]
        raise RequestError(f"{reason.strip()} (send {_SHAPE})", error.error_code) from error
    except (ValueError, TypeError, RecursionError) as error:
        _logger.info("refused: %r", error)
        text = f"the request cannot be read ({type(error).__name__}): send {_SHAPE}"
        raise RequestError(text, "INVALID_PARAMETER_VALUE") from error
