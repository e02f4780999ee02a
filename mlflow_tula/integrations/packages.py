"""Packages that an integration needs and this one does not."""

from __future__ import annotations

import importlib
from typing import Any

from mlflow_tula.errors import InvalidInputError


class MissingPackageError(InvalidInputError, ImportError):
    """A package that is an extra of this one is not installed."""


def require(names: tuple[str, ...], *, extra: str) -> list[Any]:
    """Those modules of `names` that can be imported.

    Raises:
        MissingPackageError: none of them; one line with the command that installs one.
    """
    found = []
    for name in names:
        try:
            found.append(importlib.import_module(name))
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):
                raise
    if not found:
        package = names[0].split(".")[0]
        raise MissingPackageError(
            f"TulaCallback needs {package}, which is not installed: "
            f"pip install 'mlflow-tula[{extra}]'"
        )
    return found
