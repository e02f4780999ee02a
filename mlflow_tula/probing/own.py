"""Your own functions as text that a child process can import, and data as files.

    reference(make_net, "model_fn")            "my_project.nets:make_net"
    reference(make_net, "model_fn")            "/home/me/script.py:make_net", defined in a script

A child process imports the function anew, so it must stand at the top level of a module. A script
is loaded under another name than `__main__`: what stands behind its guard is not run again.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.workloads.job import Job, is_import_path

if TYPE_CHECKING:
    from mlflow_tula.workloads.datasets import Datasets


def reference(function: object, name: str) -> str:
    """`module:qualname` of a function or class, or InvalidInputError that says what to pass.

    Args:
        function: what the caller gave; a string is returned as it is.
        name: the parameter's name, for the message.
    """
    if isinstance(function, str):
        return function
    rule = f"{name} must be a function or class at the top level of a module"
    if inspect.ismethod(function) or not (
        inspect.isfunction(function) or inspect.isbuiltin(function) or inspect.isclass(function)
    ):
        raise InvalidInputError(
            f"{rule} (a child process imports it), not {type(function).__name__}: pass a function "
            f"that returns it"
        )
    qualname, module = function.__qualname__, function.__module__
    if "<" in qualname:
        kind = "a lambda" if "<lambda>" in qualname else "a local function"
        raise InvalidInputError(f"{rule} (a child process imports it), not {kind}: {qualname}")
    if module == "__main__":
        return f"{_script_path(name)}:{qualname}"
    return f"{module}:{qualname}"


def save_tensors(dataset: object, folder: Path) -> str | None:
    """Save a TensorDataset's tensors and return the file; None for any other object."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(dataset, torch.utils.data.TensorDataset):
        return None
    path = folder / "tensors.pt"
    torch.save(list(dataset.tensors), path)
    return str(path)


def load_datasets(job: Job, *, whole: bool) -> Datasets:
    """The job's data; `whole`: one dataset of your own is all training data, and is not split."""
    from mlflow_tula.workloads.datasets import build_datasets

    if not whole or not is_import_path(job.dataset):
        return build_datasets(job)
    return build_datasets(
        job.replace(dataset="mlflow_tula.probing.own:whole_training_set", data_dir=job.dataset)
    )


def whole_training_set(data_dir: str) -> Any:
    """What `data_dir` names (a function, or a file of tensors), all of it for training."""
    import torch
    from torch.utils.data import Subset, TensorDataset

    from mlflow_tula.workloads.resolve import resolve_callable

    if data_dir.rpartition(":")[0].endswith(".pt"):
        path = data_dir.rpartition(":")[0]
        made: Any = TensorDataset(*torch.load(path, weights_only=True, mmap=True))
    else:
        made = resolve_callable(data_dir)()
    if isinstance(made, (tuple, list)) or hasattr(made, "train"):
        return made
    if not hasattr(made, "__len__") or not len(made):
        raise InvalidInputError(
            f"dataset {data_dir!r} must return a dataset of known, non-zero length, not "
            f"{type(made).__name__}"
        )
    label = made[0][1]
    if isinstance(label, float) or (isinstance(label, torch.Tensor) and label.is_floating_point()):
        # Not classification: there is no number of classes to find.
        with contextlib.suppress(AttributeError):
            made.num_classes = getattr(made, "num_classes", 1)
    return made, Subset(made, [0])


def _script_path(name: str) -> Path:
    """The running script's file; a notebook or an interactive session has none."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None or not Path(path).is_file():
        raise InvalidInputError(
            f"{name} is defined in an interactive session, which child processes cannot import: "
            f"put it in a .py file"
        )
    return Path(path).resolve()
