"""Our errors as MLflow's, and as HTTP statuses: one sentence each, never a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mlflow.exceptions import ERROR_CODE_TO_HTTP_STATUS, MlflowException
from mlflow.protos import databricks_pb2

from mlflow_tula.errors import InvalidInputError, NotRegisteredError, StoreError, TulaError

_MESSAGE = 600


class RequestError(MlflowException):  # type: ignore[misc, unused-ignore]
    """A refused request; its message stays one sentence.

    MLflow's scoring server puts the whole request in front of the message of an MlflowException;
    a message that was set once stays here.
    """

    def __init__(self, message: str, error_code: str) -> None:
        """Take the message and MLflow's name of the error code."""
        self._sentence = one_sentence(message)
        super().__init__(self._sentence, error_code=databricks_pb2.ErrorCode.Value(error_code))

    @property
    def message(self) -> str:
        """The sentence."""
        return self._sentence

    @message.setter
    def message(self, text: str) -> None:
        """Keep the sentence."""


def one_sentence(text: str) -> str:
    """One line, not longer than people read."""
    line = " ".join(text.split())
    return line if len(line) <= _MESSAGE else line[: _MESSAGE - 3] + "..."


def error_code(error: TulaError) -> str:
    """MLflow's code of one of our errors."""
    if isinstance(error, NotRegisteredError):
        return "RESOURCE_DOES_NOT_EXIST"
    if isinstance(error, StoreError):
        return "TEMPORARILY_UNAVAILABLE"
    if isinstance(error, InvalidInputError):
        return "INVALID_PARAMETER_VALUE"
    return "INTERNAL_ERROR"


def http_status(error: TulaError) -> int:
    """The status of an answer that is refused: 400, 404, 503."""
    return int(ERROR_CODE_TO_HTTP_STATUS.get(error_code(error), 500))


@contextmanager
def as_request_errors() -> Iterator[None]:
    """Raise a RequestError in the place of a TulaError."""
    try:
        yield
    except TulaError as error:
        raise RequestError(str(error), error_code(error)) from error
