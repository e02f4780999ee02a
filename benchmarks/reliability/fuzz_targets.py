"""What the fuzzer drives: table import, bundle load, the command line, `/invocations`.

Each target takes one input and returns how it ended ("taken" or "refused"). Whatever else happens
(an exception that is none of ours, an answer of several lines, a file that was not there before)
is raised, and is a crash.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz_inputs import (
    DEAD,
    SECRET,
    changed,
    command_lines,
    damaged,
    frames,
    rows_within,
    written,
)
from hypothesis import strategies as st

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"


class WrongError(AssertionError):
    """An input did what it must not do."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Inputs, and what is done with one."""

    inputs: Any
    run: Callable[[Any], str]


def one_line(error: BaseException) -> None:
    """A refusal is one sentence."""
    text = str(error)
    if not text or len(text) > 4000 or "Traceback" in text:
        raise WrongError(f"{type(error).__name__} says {text[:300]!r}") from error


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file below a folder, with its size and time."""
    found = {}
    for path in sorted(folder.rglob("*")):
        state = path.stat()
        found[str(path.relative_to(folder))] = (state.st_size, state.st_mtime_ns)
    return found


@contextlib.contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """Nothing below the folder is made, changed or removed."""
    before = tree(folder)
    yield
    after = tree(folder)
    if before != after:
        odd = sorted(set(before.items()) ^ set(after.items()))[:3]
        raise WrongError(f"the folder was changed: {odd}")


def cli(words: list[str]) -> tuple[int, str, str]:
    """Run the command line in this process: exit code, output, errors."""
    import mlflow

    from mlflow_tula.cli import run

    out, err, before = io.StringIO(), io.StringIO(), dict(os.environ)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(words)
    finally:
        mlflow.set_tracking_uri(None)
        mlflow.set_registry_uri(None)
        os.environ.clear()
        os.environ.update(before)
    return code, out.getvalue(), err.getvalue()


def check_cli(words: list[str]) -> str:
    """Run a command line that must end with 0, 1 (doctor: a finding) or one line and 2."""
    code, out, err = cli(words)
    text = out + err
    if "Traceback" in text or "this is a bug of tula" in text or SECRET in text:
        raise WrongError(f"tula {words}: exit {code}, {err[:600]}")
    if code == 2 and not err.rstrip().rsplit("\n", 1)[-1].startswith("Error: "):
        raise WrongError(f"tula {words}: exit 2 without its line, {err[:600]}")
    if code not in (0, 1, 2) or (code == 1 and words[:1] != ["doctor"]):
        raise WrongError(f"tula {words}: exit {code}, {err[:600]}")
    return "refused" if code == 2 else "taken"


class Fixtures:
    """A real table, bundle, CSV and registered model, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        """Make them, and a store to look into."""
        import pandas as pd

        import mlflow_tula as tula

        warnings.simplefilter("ignore")
        self.folder = folder
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        text = (DATA / "vgg11_digits_cpu.json").read_text()
        self.table = tula.ProfileTable.from_dict(json.loads(text))
        frame = pd.DataFrame(
            {"global_batch_size": [16, 64, 256], "epochs_to_target": [10.0, 11.0, 20.0]}
        )
        self.bundle = tula.fit(self.table, convergence=frame)
        self.bundles = [self.bundle.to_dict(), tula.fit(self.table).to_dict()]
        self.csv = self.table.to_frame().dropna(axis=1, how="all").to_csv(index=False).encode()
        self.convergence = frame.to_csv(index=False).encode()
        store = folder / "store"
        store.mkdir()
        self.store_uri = f"sqlite:///{store / 'mlflow.db'}"
        os.environ["MLFLOW_TRACKING_URI"] = self.store_uri
        os.chdir(store)
        from mlflow_tula import registry
        from mlflow_tula.registry import model_files

        done = registry.register(self.bundle, table=self.table)
        self.version_uri, self.name = done.version_uri, done.name
        self.script = Path(model_files.__file__).with_name("pyfunc_model.py")
        os.chdir(self.work)

    def model(self) -> Any:
        """The registered model, as a server loads it."""
        import mlflow

        return mlflow.pyfunc.load_model(self.version_uri)


LIMITS = {
    "local_batch_size": (1, 10**12),
    "step_time_s": (1e-9, 1e9),
    "nodes": (1, 10**6),
    "devices_per_node": (1, 10**4),
    "accumulation_steps": (1, 10**6),
    "sync_time_s": (0.0, 1e9),
    "data_time_s": (0.0, 1e9),
    "optimizer_time_s": (0.0, 1e9),
    "step_time_std_s": (0.0, 1e9),
    "peak_memory_bytes": (0, 2**60),
    "num_steps": (0, 10**6),
}
"""What a table takes: all of it must fit, and answer."""


def table_target(fixtures: Fixtures) -> Target:
    """Dictionaries, frames, CSV and JSON files become tables, and those become predictors."""
    from mlflow_tula.cli.flow import read_convergence, read_table
    from mlflow_tula.errors import TulaError
    from mlflow_tula.fit import fit
    from mlflow_tula.table import COLUMNS, ProfileTable

    table = fixtures.table
    names = {"workload": table.workload, "hardware": table.hardware}
    rows = {name: table.to_frame()[name].dropna().tolist() for name in COLUMNS}
    path = fixtures.folder / "input"
    document = table.to_dict()
    inputs = st.one_of(
        st.tuples(st.just("dict"), changed(document), st.integers(0, 3)),
        st.tuples(st.just("frame"), frames(COLUMNS, rows), st.integers(0, 3)),
        st.tuples(st.just("rows"), rows_within(LIMITS), st.just(0)),
        st.tuples(st.just("csv"), damaged(fixtures.csv), st.integers(0, 3)),
        st.tuples(st.just("json"), damaged(written(document)), st.integers(0, 3)),
        st.tuples(st.just("convergence"), damaged(fixtures.convergence), st.integers(0, 3)),
        st.tuples(st.just("import"), damaged(fixtures.csv), st.just(1)),
    )

    def run(case: tuple[str, Any, int]) -> str:
        kind, value, more = case
        if isinstance(value, bytes):
            path.write_bytes(value)
        with unchanged(fixtures.work):
            if kind == "import":
                return check_cli(["import", str(path), "--tracking-uri", DEAD])
            try:
                if kind == "convergence":
                    fit(table, convergence=read_convergence(str(path)))
                    return "taken"
                if kind == "dict":
                    made = ProfileTable.from_dict(value)
                elif kind in ("frame", "rows"):
                    made = ProfileTable.from_frame(value, **names)
                elif kind == "csv":
                    made = ProfileTable.from_csv(path, **names)
                else:
                    made = read_table(path)
                if json.dumps(made.to_dict(), allow_nan=False) and more == 0:
                    ask(fit(made).to_dict())
            except TulaError as error:
                one_line(error)
                return "refused"
        return "taken"

    return Target(inputs=inputs, run=run)


def ask(document: Any) -> None:
    """Read a bundle's document as a stranger would, and ask it."""
    import numpy as np
    import pandas as pd

    from mlflow_tula.predictors.bundle import PredictorBundle

    bundle = PredictorBundle.from_dict(document)
    asked = pd.DataFrame(
        {"local_batch_size": [1, 8, 100, 10**6], "nodes": [1, 1, 3, 64], "devices_per_node": 2}
    )
    answer = bundle.predict(asked)
    if not (np.isfinite(answer["step_time_s"]) & (answer["step_time_s"] > 0)).all():
        raise WrongError(f"step times {answer['step_time_s'].tolist()}")
    str(bundle.report)


def bundle_target(fixtures: Fixtures) -> Target:
    """Documents become bundles that answer, in the package and in a registered model."""
    import mlflow
    import pandas as pd
    from mlflow.exceptions import MlflowException

    from mlflow_tula.errors import TulaError
    from mlflow_tula.predictors.bundle import PredictorBundle
    from mlflow_tula.recommend import recommend
    from mlflow_tula.specs import ClusterSpec

    script = _script(fixtures.script)
    folder = fixtures.folder / "model"
    if not folder.exists():
        fetched = mlflow.artifacts.download_artifacts(fixtures.version_uri)
        shutil.copytree(fetched, folder)
    path = folder / "artifacts" / "bundle.json"
    good = path.read_bytes()
    context = Context({"bundle": str(path), "predictors": str(folder / "artifacts" / "predictors")})
    documents = st.one_of(*(changed(one) for one in fixtures.bundles))
    inputs = st.one_of(
        st.tuples(st.just("dict"), documents, st.integers(0, 3)),
        st.tuples(st.just("model"), documents.map(written), st.integers(0, 60)),
        st.tuples(st.just("model"), damaged(good), st.integers(0, 60)),
        st.tuples(st.just("file"), damaged(good), st.just(1)),
    )
    asked = pd.DataFrame({"global_batch_size": [1, 64, 4096], "devices_per_node": [1, 2, 4]})

    def run(case: tuple[str, Any, int]) -> str:
        kind, value, more = case
        try:
            if kind == "dict":
                ask(value)
                if more == 0:
                    bundle = PredictorBundle.from_dict(value)
                    str(recommend(bundle, cluster=ClusterSpec(nodes=1, devices_per_node=2)))
                return "taken"
            path.write_bytes(value)
            if kind == "file":
                words = ["recommend", "--bundle", str(path), "--tracking-uri", DEAD]
                with unchanged(fixtures.work):
                    return check_cli(words)
            if more == 0:
                mlflow.pyfunc.load_model(str(folder)).predict(asked)
            else:
                model = script.Predictor()
                model.load_context(context)
                model.predict(context, asked, {"epochs": 3.0})
        except (TulaError, MlflowException) as error:
            one_line(error)
            return "refused"
        except ValueError as error:
            if kind != "model":
                raise
            one_line(error)  # what a model from code may raise without knowing our classes
            return "refused"
        return "taken"

    return Target(inputs=inputs, run=run)


@dataclass(frozen=True)
class Context:
    """What MLflow hands to `load_context`."""

    artifacts: dict[str, str]


def _script(path: Path) -> Any:
    """The registered script, run once, apart from the package."""
    spec = importlib.util.spec_from_file_location("fuzzed_pyfunc_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cli_target(fixtures: Fixtures) -> Target:
    """Command lines that start no work: wrong ones, and right ones that find a dead store."""
    files = [
        fixtures.folder / name for name in ("good.json", "good.csv", "bad.json", "bundle.json")
    ]
    files[0].write_text(json.dumps(fixtures.table.to_dict()))
    files[1].write_bytes(fixtures.csv)
    files[2].write_text("{")
    files[3].write_text(json.dumps(fixtures.bundle.to_dict()))
    inputs = command_lines(options_of_commands(), [str(path) for path in files])
    store = fixtures.folder / "store"

    def run(words: list[str]) -> str:
        code = "taken"
        try:
            with unchanged(store):
                before = tree(fixtures.work)
                code = check_cli(words)
                if code == "refused" and tree(fixtures.work) != before:
                    raise WrongError(
                        f"tula {words}: exit 2, and {sorted(tree(fixtures.work))} changed"
                    )
        finally:
            for path in fixtures.work.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            # `tula fit --table F` writes beside F, as it says
            files[3].write_text(json.dumps(fixtures.bundle.to_dict()))
        return code

    return Target(inputs=inputs, run=run)


def options_of_commands() -> dict[str, list[str]]:
    """Every command and sub-command, with the names of its options."""
    import click

    from mlflow_tula.cli import COMMANDS, tula

    found: dict[str, list[str]] = {}
    for verb in COMMANDS:
        command = tula.get_command(click.Context(tula), verb)
        assert command is not None
        parts = {verb: command}
        if isinstance(command, click.Group):
            parts = {f"{verb} {name}": one for name, one in command.commands.items()}
        for name, one in parts.items():
            options = [param for param in one.params if isinstance(param, click.Option)]
            found[name] = [param.opts[0] for param in options]
    return found


TARGETS: dict[str, Callable[[Fixtures], Target]] = {
    "table": table_target,
    "bundle": bundle_target,
    "cli": cli_target,
}
