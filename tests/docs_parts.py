"""What the tests of the documents need: the pages, small models under real names, a prepared store.

The pages' commands are run as they are written. Only what they run on is small: `sitecustomize`
gives torchvision's names to tiny networks, in every process of a session, and `tula` and `mlflow
run` get less time and fewer steps where a command leaves them open.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

SMALL_MODELS = """
import importlib.abc
import importlib.util
import sys


def small_of(known):
    def build(num_classes=1000, **_):
        from torch import nn

        return nn.Sequential(
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 16), nn.ReLU(),
            nn.Linear(16, num_classes),
        )

    build.__module__ = known.__module__
    return build


class Finder(importlib.abc.MetaPathFinder):
    # changes torchvision's table of models once torchvision has filled it
    def find_spec(self, name, path, target=None):
        if name != "torchvision.models":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            table = sys.modules["torchvision.models._api"].BUILTIN_MODELS
            for name in ("vgg11", "resnet18", "resnet34", "resnet50"):
                table[name] = small_of(table[name])

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
"""

LIMITS = """#!{python}
import sys

args = sys.argv[1:]
wanted = {{
    "main": ("--time-budget", "60s", "--max-steps", "4"),
    "profile": ("--time-budget", "60s", "--max-steps", "4"),
}}.get(args[0] if args else "", ())
args += wanted  # of an option that is given twice the last one counts
from mlflow_tula.cli import main

main(args)
"""


PREPARE = """
import dataclasses
import json
import sys
import warnings

import mlflow

import mlflow_tula as tula
from mlflow_tula.hardware import detect
from mlflow_tula.registry import register
from mlflow_tula.serving.recommender_files import ensure_recommender
from mlflow_tula.stores import check_store

warnings.simplefilter("ignore")
mlflow.set_tracking_uri("sqlite:///mlflow.db")
check_store()
recorded = tula.ProfileTable.from_dict(json.load(open(sys.argv[1])))
for model in ("vgg11", "resnet18"):
    workload = dataclasses.replace(recorded.workload, model=model)
    table = dataclasses.replace(recorded, workload=workload, hardware=detect())
    name = register(tula.fit(table), table=table).name
ensure_recommender(name)
"""


def load_script(path: str) -> ModuleType:
    """A script of docs/ as a module."""
    name = f"docs_{Path(path).stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


commands = load_script("docs/commands.py")


def pages() -> list[str]:
    """Every page that people read; docs/cli.md is the help itself, and tested as such."""
    names = ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md"]
    names += sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
    return [name for name in names if name != "docs/cli.md"]


def blocks_of(page: str) -> list[Any]:
    """The fenced blocks of a page."""
    return list(commands.blocks((ROOT / page).read_text(encoding="utf-8"), page))


def small_environment(folder: Path) -> dict[str, str]:
    """An environment in which the pages' commands take seconds."""
    here = folder / ".small"
    here.mkdir(parents=True)
    (here / "sitecustomize.py").write_text(SMALL_MODELS)
    (here / "tula").write_text(LIMITS.format(python=sys.executable))
    (here / "tula").chmod((here / "tula").stat().st_mode | stat.S_IXUSR)
    known = commands.clean_environment(folder)
    return {
        **known,
        "PATH": f"{here}{os.pathsep}{known['PATH']}",
        "PYTHONPATH": str(here),
        "OMP_NUM_THREADS": "1",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    }


def prepare(folder: Path) -> None:
    """A store in which this machine knows vgg11 and resnet18, as two `tula main` would leave it."""
    done = subprocess.run(
        [sys.executable, "-c", PREPARE, str(ROOT / "tests" / "data" / "vgg11_digits_cpu.json")],
        cwd=folder,
        env=small_environment(folder),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def free_ports(text: str) -> dict[str, str]:
    """For each port that a page names (and MLflow's own 5000) one that is free here."""
    written = {found[0] for found in commands.PORT.finditer(text)} | {commands.DEFAULT_PORT}
    found = {}
    for port in sorted(written):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            found[port] = str(probe.getsockname()[1])
    return found


@contextmanager
def session_of(page: str, folder: Path, store: Path | None) -> Iterator[Any]:
    """A shell for a page's commands, in a folder that holds a copy of the prepared store."""
    if store is not None:
        shutil.copytree(store, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*"))
    text = (ROOT / page).read_text(encoding="utf-8")
    environment = small_environment(folder)
    with commands.session(folder, environment, ports=free_ports(text), limit_s=300.0) as shell:
        yield shell
