"""The tree of the code for README.md: each room of mlflow_tula with its docstring's first words."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOP = {
    "mlflow_tula/": "",
    "tests/": "test_<module>.py mirrors the package; data/ recorded tables",
    "benchmarks/": "accuracy, speed, reliability: scripts that print tables; results/ records",
    "examples/": "numbered scripts that run on a CPU; manifests for SLURM and Kubernetes",
    "docs/": "these pages, and the scripts that make their tables, pictures and output",
    "MLproject": "every command as an entry point of `mlflow run .`; made by `make docs`",
    "Makefile": "`make help` lists what can be made",
}
WIDTH = 82


def tree() -> str:
    """Lines of `name  what it is`, rooms indented."""
    lines = []
    for name, words in TOP.items():
        lines.append(f"{name:<24}{words}".rstrip())
        if name == "mlflow_tula/":
            lines += [f"  {room:<22}{purpose(path)}" for room, path in rooms(ROOT / name)]
    return "```text\n" + "\n".join(lines) + "\n```\n"


def rooms(package: Path) -> list[tuple[str, Path]]:
    """Modules and packages by name."""
    found = []
    for path in sorted(package.iterdir(), key=lambda one: one.name):
        if path.is_dir() and (path / "__init__.py").exists():
            found.append((f"{path.name}/", path / "__init__.py"))
        elif path.suffix == ".py" and not path.name.startswith("_"):
            found.append((path.name, path))
    return found


def purpose(path: Path) -> str:
    """The first sentence of a module's docstring, cut at a pause where it is long."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    line = " ".join(text.split("\n\n")[0].split()).split(". ")[0].removesuffix(".")
    for mark in ("; ", ": ", " (", ", "):
        while len(line) > WIDTH and line.rfind(mark) > WIDTH / 3:
            line = line[: line.rfind(mark)]
    return line
