"""One sentence for what MLflow's scoring server cannot read.

The server reads a request before the model sees it, and answers some of what it cannot read with a
traceback, with the whole request, or with 500 and no word (an empty CSV, text that is not JSON, no
content type, brackets ten megabytes deep). `guard` is called when `mlflow models serve` loads the
recommender, in that process alone, and stands between the server and its reader.
"""

from __future__ import annotations

import logging
from typing import Any

from mlflow.exceptions import MlflowException

from mlflow_tula.serving.faults import RequestError
from mlflow_tula.serving.questions import MAX_BODY

_logger = logging.getLogger(__name__)
_SHAPE = '{"dataframe_records": [{"model": "vgg11", "dataset": "cifar100", "hardware": "..."}]}'


def guard() -> bool:
    """Put the reader of this process's scoring server behind the guard; False where it cannot."""
    from mlflow.pyfunc import scoring_server

    inner = getattr(scoring_server, "invocations", None)
    if inner is None or getattr(inner, "_tula_guard", False):
        return inner is not None

    def invocations(data: Any, content_type: str | None, model: Any, input_schema: Any) -> Any:
        return _answered(inner, data, content_type, model, input_schema)

    invocations._tula_guard = True  # type: ignore[attr-defined]
    scoring_server.invocations = invocations
    return True


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
