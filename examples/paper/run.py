"""The paper's figures, each measured here, drawn, judged and logged.

    python examples/paper/run.py --figure 9            # or `mlflow run . -e paper -P figure=9`
    python examples/paper/run.py --figure all          # an hour on two cores, less when resumed
    python examples/paper/figure_9.py                  # one script a figure

Every figure is a run with its picture, its table, and one sentence that says whether the paper's
claim held here, by a rule that stands in the figure's script. Measurements and trainings are kept
in the output folder and shared between figures; what a kill left undone is done by the same command
again, and a figure that is done is not made twice.

On a machine with GPUs `--scale paper` takes the paper's models and data.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
for folder in (ROOT, HERE):
    # The project's own checkout, and the scripts beside this one, from wherever it is started.
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from mlflow_tula.cli import options, run, types  # noqa: E402
from mlflow_tula.cli.options import option  # noqa: E402
from mlflow_tula.cli.types import OpenText, count, real, switch  # noqa: E402

SCRIPTS = {
    "1": "figure_1",
    "2": "figure_2",
    "4": "figure_4",
    "5": "figure_5",
    "6": "figure_6",
    "7": "figure_7",
    "8": "figure_8",
    "9": "figure_9",
    "10": "figure_10",
    "11": "figure_11",
    "table1": "table_1",
}
"""Figures by their number in the paper, and the script that makes each."""
RECORDS = ROOT / "benchmarks" / "results"


class Figures(click.ParamType[Any]):
    """Numbers of figures, comma-separated; `all` stands for every one."""

    name = "figures"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, ...]:
        """Text to names in the paper's order."""
        if isinstance(value, tuple):
            return value
        asked = [part.strip().lower() for part in str(value).strip("'\" ").split(",")]
        for part in asked:
            if part != "all" and part not in SCRIPTS:
                self.fail(f"{part!r} is not one of all, {', '.join(SCRIPTS)}", param, ctx)
        return tuple(name for name in SCRIPTS if "all" in asked or name in asked)


@click.command("paper")
@option("--figure", Figures(), "all", f"all, or of these, comma-separated: {', '.join(SCRIPTS)}.")
@option(
    "--scale",
    click.Choice(["small", "paper"]),
    "small",
    "What options left at auto take: two CPU cores within an hour, or the paper's models and data.",
)
@option("--models", OpenText("auto"), "auto", "Models to time, comma-separated: NAME or NAME@DATA.")
@option("--dataset", OpenText("auto"), "auto", "Dataset of models without their own.")
@option("--data-dir", OpenText("none"), "none", "Folder that holds the datasets.")
@switch("--download", default=False, text="Download a dataset where it is absent.")
@option(
    "--image-size",
    count("32", open_word="auto"),
    "auto",
    "Pixels a side of what is timed; auto: the dataset's own.",
)
@option(
    "--batch-sizes",
    types.Listed(example="8,32,128"),
    "auto",
    "Batch sizes a rank that full search measures, comma-separated.",
)
@option(
    "--world-sizes",
    types.Listed(example="1,2"),
    "auto",
    "Cluster sizes in ranks, comma-separated; auto: 1 and the number of devices.",
)
@option("--max-steps", count("16", open_word="auto"), "auto", "Most timed steps a probe.")
@option("--learning-dataset", OpenText("auto"), "auto", "Dataset of what is trained.")
@option("--network", OpenText("auto"), "auto", "Network of what is trained, as in `tula compare`.")
@option(
    "--large-batches",
    types.Listed(example="128,512"),
    "auto",
    "Large global batch sizes to train with, comma-separated.",
)
@option(
    "--reference-batch",
    count("32", open_word="auto"),
    "auto",
    "The global batch size whose learning rate is known.",
)
@option(
    "--learning-rate",
    real("0.05", open_word="auto"),
    "auto",
    "Learning rate at the reference batch; auto: chosen on the validation split.",
)
@option("--epochs", real("30", open_word="auto"), "auto", "Epochs of each training.")
@option("--seeds", count("5"), "5", "Trainings of each method, with seeds 0, 1, ...")
@option(
    "--workers",
    count("2", open_word="auto"),
    "auto",
    "Trainings side by side, one thread each; auto: the cores.",
)
@switch(
    "--from-records",
    default=False,
    text="Take what benchmarks/results holds of it, and make the rest.",
)
@switch("--resume", default=True, text="Leave out figures that are done in --output-dir.")
@options.output_option
@options.store_options
@options.json_option
def command(as_json: bool, **values: Any) -> None:
    """Reproduce figures of the Tula paper here, each with a verdict on its claim.

    \b
    python examples/paper/run.py --figure 4,9
    mlflow run . -e paper -P figure=all
    """  # noqa: D301
    from reproduction.making import make_figures
    from reproduction.settings import make_settings

    from mlflow_tula.cli.places import check_output
    from mlflow_tula.cli.render import print_json

    settings = make_settings(values, RECORDS)
    check_output(settings.folder)
    options.use_store(values, write=True)
    done = make_figures(settings, [SCRIPTS[name] for name in values["figure"]], values)
    if as_json:
        print_json({"figures": done})


def main(*figures: str) -> None:
    """Run the command line, for these figures where they are named, and exit with its code."""
    given = ["--figure", ",".join(figures), *sys.argv[1:]] if figures else None
    sys.exit(run(given, command))


if __name__ == "__main__":
    main()
