"""Write what follows from the code: docs/cli.md, MLproject, conda.yaml, the tree in README.md.

python docs/generate.py            write them
python docs/generate.py --check    exit 1 and name the file that is out of date
"""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click

from mlflow_tula.cli import COMMANDS, tula

ROOT = Path(__file__).resolve().parent.parent
ENTRY_POINTS = ("main", "demo", "profile", "fit", "register", "recommend", "train", "compare")

SCRIPTS = {"paper": "examples/paper/run.py"}
"""Entry points that belong to the checkout and are no command of the package (decisions.md, 32)."""

MLPROJECT_HEAD = """\
# Made by `make docs` from the command line's options: change those, not this file.
name: mlflow_tula

# Runs every entry point in the environment that `mlflow run` was started in. The key sets MLflow's
# environment type to none, and nothing else (docs/decisions.md, 1).
databricks_spark_job: {}

entry_points:
"""

CONDA_HEAD = """\
# Made by `make docs` from pyproject.toml. For those who want a conda environment:
#   conda env create -f conda.yaml && conda activate mlflow-tula
# `mlflow run .` uses whatever environment it is started in.
name: mlflow-tula
channels:
  - conda-forge
dependencies:
  - python>=3.11
  - pip
  - pip:
"""


def command_of(name: str) -> tuple[click.Command, click.Context]:
    """A command and a context that knows its full name."""
    # With its settings: `-h` is known to every command below it.
    context = click.Context(tula, info_name="tula", **tula.context_settings)
    command = tula.get_command(context, name)
    assert command is not None
    return command, click.Context(command, info_name=name, parent=context)


def options_of(command: click.Command) -> Iterator[click.Option]:
    """The options a project can set; `--json` and `--help` are for people at a shell."""
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.name != "as_json":
            yield parameter


def script_command(path: str) -> click.Command:
    """The command of a script that stands outside the package."""
    spec = importlib.util.spec_from_file_location("script_of_an_entry_point", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    command = module.command
    assert isinstance(command, click.Command)
    return command


def mlproject() -> str:
    """MLproject with one entry point a command, every option a parameter of the same default."""
    lines = [MLPROJECT_HEAD]
    known = [(name, f"-m mlflow_tula {name}", command_of(name)[0]) for name in ENTRY_POINTS]
    known += [(name, path, script_command(path)) for name, path in SCRIPTS.items()]
    for name, how, command in known:
        lines.append(f"  {name}:\n    parameters:\n")
        call = [f"python {how}"]
        for parameter in options_of(command):
            lines.append(
                f'      {parameter.name}: {{type: string, default: "{parameter.default}"}}\n'
            )
            call.append(f"{parameter.opts[0]} {{{parameter.name}}}")
        lines.append("    command: >-\n" + "".join(f"      {part}\n" for part in call) + "\n")
    return "".join(lines).rstrip() + "\n"


def conda() -> str:
    """conda.yaml with the ranges of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return (
        CONDA_HEAD
        + "".join(f'    - "{line}"\n' for line in project["dependencies"])
        + "    - -e .\n"
    )


def cli_reference() -> str:
    """docs/cli.md: every command with its options, as its own `--help` prints them."""
    lines = [
        "# Commands\n\nMade by `make docs`. `tula COMMAND --help` prints the same. Exit codes: 0 "
        "done, 1 the work failed (what was measured is kept), 2 the request was wrong (nothing "
        "was started), 130 Ctrl-C.\n"
    ]
    for name in COMMANDS:
        command, context = command_of(name)
        lines.append(f"\n## tula {name}\n\n```text\n{help_of(command, context)}\n```\n")
        for verb, part in getattr(command, "commands", {}).items():
            inner = click.Context(part, info_name=verb, parent=context)
            text = help_of(part, inner)
            lines.append(f"\n### tula {name} {verb}\n\n```text\n{text}\n```\n")
    return "".join(lines)


def help_of(command: click.Command, context: click.Context) -> str:
    """The help text at a fixed width."""
    context.terminal_width = context.max_content_width = 100
    return command.get_help(context)


def readme() -> str:
    """README.md with the tree of the code as it is."""
    # Scripts of this folder: on the path when this one is run, not when a test loads it.
    sys.path.insert(0, str(ROOT / "docs"))
    from sections import put
    from tree import tree

    sys.path.pop(0)
    return put((ROOT / "README.md").read_text(), "tree", tree())


FILES = {
    "MLproject": mlproject,
    "conda.yaml": conda,
    "docs/cli.md": cli_reference,
    "README.md": readme,
}


def main() -> int:
    """Write the files, or compare them."""
    stale = []
    for name, make in FILES.items():
        path, text = ROOT / name, make()
        if path.exists() and path.read_text() == text:
            continue
        stale.append(name)
        if "--check" not in sys.argv:
            path.write_text(text)
    if "--check" in sys.argv and stale:
        sys.stderr.write(f"out of date: {', '.join(stale)}; run `make docs`\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
