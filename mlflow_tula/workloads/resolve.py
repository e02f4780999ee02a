"""`package.module:function` -> the object: the only place where names become code.

    resolve_callable("my_models:small_net")            a module on the path or in this folder
    resolve_callable("examples/net.py:Net")            a file
    call_with_known(function, num_classes=10, ...)     passes what the function takes by name

Resolving imports the module, that is, it runs its code: names come from the person at the
keyboard (or from a Job they wrote), never from a registered model.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from mlflow_tula.errors import InvalidInputError, UnknownNameError


def resolve_callable(text: str) -> Callable[..., Any]:
    """Return the function or class that `package.module:function` (or `file.py:function`) names.

    Raises:
        InvalidInputError: not of that form, no such module or function, or the module's own
            code fails; one line that says which.
    """
    module_name, separator, attribute = text.rpartition(":")
    if not separator or not module_name or not attribute:
        raise InvalidInputError(f"{text!r} must have the form package.module:function")
    found: Any = _load_module(module_name, text)
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [name for name in vars(found) if not name.startswith("_")]
            raise UnknownNameError(f"function of {module_name}", attribute, known)
        found = getattr(found, part)
    if not callable(found):
        raise InvalidInputError(f"{text!r} must be a function or class, not {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def call_with_known(function: Callable[..., Any], *leading: Any, **arguments: Any) -> Any:
    """Call `function` with `leading`, and with those of `arguments` that it takes by name."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[len(leading) :]
    except (TypeError, ValueError):  # some builtins have no signature
        return function(*leading)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return function(*leading, **arguments)
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return function(*leading, **{key: arguments[key] for key in arguments if key in by_name})


def _load_module(name: str, text: str) -> ModuleType:
    try:
        if name.endswith(".py"):
            return _load_file(Path(name).expanduser())
        return _import_module(name)
    except InvalidInputError:
        raise
    except Exception as error:  # the module's own code may raise anything
        reason = str(error).splitlines()[0] if str(error) else ""
        raise InvalidInputError(
            f"cannot import {name!r} for {text!r}: {type(error).__name__}: {reason}"
        ) from error


def _import_module(name: str) -> ModuleType:
    """Import, looking in the working folder too: console scripts do not have it on their path."""
    folder = str(Path.cwd())
    added = folder not in sys.path and "" not in sys.path
    if added:
        sys.path.append(folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if added:
            sys.path.remove(folder)
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise InvalidInputError(
                f"no module named {error.name!r}: run from the folder that holds it, install it, "
                f"or give its file as path/to/file.py:function"
            ) from error
        raise


def _load_file(path: Path) -> ModuleType:
    """Load a file once per path under a name of its own, so that it can shadow nothing."""
    path = path.resolve()
    if not path.is_file():
        raise InvalidInputError(f"no file {str(path)!r}: give an existing path/to/file.py:function")
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"_tula_file_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InvalidInputError(f"cannot load {str(path)!r} as Python: is it a .py file?")
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)  # the file may import its neighbours; at the end it shadows nothing
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
