"""The public names, and what importing the package costs."""

from __future__ import annotations

import subprocess
import sys

import mlflow_tula as tula


def test_public_names_are_sorted_and_exist() -> None:
    assert list(tula.__all__) == sorted(tula.__all__)
    assert all(hasattr(tula, name) for name in tula.__all__)


def test_functions_are_not_shadowed_by_their_modules() -> None:

    assert callable(tula.fit)
    assert callable(tula.recommend)


def loaded_after(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after a statement."""
    code = f"{statement}\nimport sys\nprint('#', *{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("#")[2].split())


def test_import_loads_neither_torch_nor_mlflow_nor_pandas() -> None:
    heavy = {"torch", "mlflow", "pandas", "scipy", "statsmodels", "sklearn", "click", "matplotlib"}
    assert not heavy & loaded_after("import mlflow_tula")


def test_help_loads_click_alone() -> None:
    heavy = {"torch", "mlflow", "pandas", "scipy", "rich", "matplotlib"}
    code = "from mlflow_tula.cli import run\nassert run(['--help']) == 0"
    assert not heavy & loaded_after(code)
