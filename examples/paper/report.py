"""The table of docs/paper.md, from what the figures of one output folder say of themselves.

    python examples/paper/report.py --output-dir build/paper --markdown build/paper.md

Nothing is typed: verdicts, numbers and seconds are read from each figure's `done.json`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent))

from run import SCRIPTS

from mlflow_tula.files import read_json


def read(folder: Path) -> list[dict[str, Any]]:
    """What is done, in the paper's order."""
    found = {}
    for path in folder.glob("paper/*/done.json"):
        done = read_json(path, made_by="examples/paper/run.py")
        found[str(done["figure"])] = done
    return [found[name] for name in SCRIPTS if name in found]


def markdown(done: Sequence[Mapping[str, Any]]) -> str:
    """Verdicts first, then what was found, figure by figure."""
    held = {word: sum(one["held"] == word for one in done) for word in
            ("held", "held in part", "did not hold")}  # fmt: skip
    lines = [
        ", ".join(f"{count} {word}" for word, count in held.items()) + ".",
        "",
        "| figure | subject | here | command, after `python examples/paper/run.py` | seconds |",
        "|---|---|---|---|--:|",
    ]
    for one in done:
        lines.append(
            f"| [{one['label']}](#{anchor(one['label'])}) | {one['subject']} | {one['held']} | "
            f"`--figure {one['figure']}` | {alone(one):.0f} |"
        )
    lines += [
        "",
        "Seconds are those of a figure alone in an empty folder: its measurements, of which "
        "several figures share some, and its drawing.",
    ]
    loads = [float(one["load_average"]) for one in done if "load_average" in one]
    if loads:
        lines[-1] += (
            f" The machine's load average when they were made was up to {max(loads):.0f}: what is "
            "above the number of cores is other work, which makes times longer and noisier."
        )
    known = {one["figure"] for one in done}
    if lacking := [name for name in SCRIPTS if name not in known]:
        lines += ["", f"Not made here: {', '.join(lacking)}."]
    for one in done:
        lines += ["", f"### {one['label']}", "", f"{first_upper(one['subject'])}: the claim "
                  f"{one['held']}. {first_upper(one['because'])}.", "", *one["notes"]]  # fmt: skip
    return "\n".join(lines) + "\n"


def alone(done: Mapping[str, Any]) -> float:
    """Seconds of a figure by itself; what was there already when it was made is added."""
    return max(float(done["seconds"]), float(done["data_seconds"]))


def anchor(label: str) -> str:
    """Of a heading."""
    return label.lower().replace(" ", "-")


def first_upper(text: str) -> str:
    """The sentence with a capital, its numbers and names as they are."""
    return text[:1].upper() + text[1:]


@click.command()
@click.option("--output-dir", type=click.Path(path_type=Path), default="tula_output")
@click.option("--markdown", "page", type=click.Path(path_type=Path), help="Write it here.")
def main(output_dir: Path, page: Path | None) -> None:
    """Print the table."""
    done = read(output_dir)
    if not done:
        raise click.ClickException(f"{output_dir} has no figures: run examples/paper/run.py first")
    text = markdown(done)
    click.echo(text)
    if page is not None:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text)


if __name__ == "__main__":
    main()
