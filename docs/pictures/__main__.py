"""The pictures of docs/method.md, from the project's own functions and what was really measured.

    python docs/pictures [NAME ...]        all of them, or those named; written to docs/figures

Each picture is a function of the modules beside this one. Measurements come from
benchmarks/results, published figures from the tests that hold them with their source; the gradient
statistics are those of a small training that is run on the spot (seconds).
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import convergence_pictures
import cost_pictures
import gradient_pictures
import memory_pictures
import step_time_pictures
from style import save

from mlflow_tula.errors import TulaWarning

FIGURES = Path(__file__).resolve().parents[1] / "figures"
PICTURES = {
    "probe": gradient_pictures.probe,
    "compute": step_time_pictures.compute,
    "overlap": step_time_pictures.overlap,
    "link": step_time_pictures.link,
    "nodes": step_time_pictures.nodes,
    "sharing": step_time_pictures.sharing,
    "memory": memory_pictures.memory,
    "fsdp": memory_pictures.fsdp,
    "epochs": convergence_pictures.epochs,
    "noise-scale": gradient_pictures.noise,
    "gate": gradient_pictures.gate,
    "knee": cost_pictures.knee,
    "cost": cost_pictures.cost,
    "intervals": cost_pictures.intervals,
    "cold-start": cost_pictures.cold_start,
}


def main(names: list[str], folder: Path = FIGURES) -> None:
    """Draw the pictures named, or all."""
    unknown = sorted(set(names) - set(PICTURES))
    if unknown:
        raise SystemExit(f"no picture {', '.join(unknown)}; there are: {', '.join(PICTURES)}")
    warnings.simplefilter("ignore", TulaWarning)
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or PICTURES:
        save(PICTURES[name](), folder / f"method-{name}.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
