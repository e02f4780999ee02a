"""`tula recommend`: ask the registry which batch size to take on this hardware."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from mlflow_tula.cli import options
from mlflow_tula.cli.options import option
from mlflow_tula.cli.render import note, print_json, print_recommendation
from mlflow_tula.cli.types import OpenText, count, duration
from mlflow_tula.errors import InvalidInputError, NotRegisteredError

if TYPE_CHECKING:
    from mlflow_tula.probing.counting import Counting
    from mlflow_tula.recommend import Recommendation


@click.command("recommend")
@options.name_options
@options.decision_options
@option(
    "--accumulation-steps",
    count("4", open_word="auto"),
    "auto",
    "Passes per optimizer step; auto: 1, more only where a batch does not fit otherwise.",
)
@option(
    "--gradient-compression",
    click.Choice(["none", "bf16"]),
    "none",
    "How gradients are sent among ranks: as they are, or half as many bytes in bf16.",
)
@options.memory_option
@option(
    "--hardware",
    OpenText("auto"),
    "auto",
    "Device name, or slug or fingerprint of `tula registry list`; auto: this machine.",
)
@option("--alias", str, "champion", "Alias of the registered version to ask.")
@option(
    "--bundle",
    OpenText("none"),
    "none",
    "A bundle.json to ask instead of the registry.",
)
@option(
    "--refine",
    duration("20s", open_word="none"),
    "none",
    "Seconds for one or two probes, where the workload was never profiled on this hardware.",
)
@options.device_option
@options.store_options
@options.json_option
def command(as_json: bool, **values: Any) -> None:
    """Say which batch size to take, how long it runs and what it costs.

    \b
    tula recommend --model vgg11
    tula recommend --model vgg11 --objective min_cost --price-per-gb-hour 0.15 --epochs 90
    tula recommend --model vgg11 --deadline 6h --epochs 90 --nodes 1,2,4
    tula recommend --model vgg11 --nodes 1,2,4,8,16 --inter-node-bandwidth 10Gbit
    """
    from mlflow_tula.cli.flow import find_bundle, make_recommendation

    counting = _begin_counting(values)
    try:
        bundle, source = find_bundle(values)
    except NotRegisteredError as error:
        _answer_cold(values, as_json, error, counting)
        return
    finally:
        if counting is not None:
            counting.close()
    choice = make_recommendation(bundle, values)
    _print(as_json, source, choice)
    if values["refine"] is not None:
        note("--refine is for workloads without a profile; this one has one")


def _begin_counting(values: Mapping[str, Any]) -> Counting | None:
    """Start to count the job's kernels while the registry is asked, in case it knows nothing."""
    from mlflow_tula.probing.counting import Counting

    own = values["bundle"] is None and values["alias"] == "champion" and values["hardware"] is None
    return Counting(options.make_job(values)) if own else None


def _answer_cold(
    values: Mapping[str, Any],
    as_json: bool,
    error: NotRegisteredError,
    counting: Counting | None,
) -> None:
    """What other models on the hardware say, or the error that nothing is registered."""
    from mlflow_tula.cli.cold import cold_answer, print_how_to_sharpen, refine
    from mlflow_tula.cli.flow import make_recommendation

    if values["bundle"] is not None or values["alias"] != "champion":
        raise error
    job = options.make_job(values)
    hardware = values["hardware"] or options.detect_hardware(values["device"])
    answer = cold_answer(job, hardware, counting)
    if answer is None:
        raise error
    choice = make_recommendation(answer.bundle, values)
    limits = {"memory_limit_bytes": values["memory_limit"]}
    if values["refine"] is not None:
        if values["hardware"] is not None:
            raise InvalidInputError("--refine probes this machine: leave --hardware out")
        answer, choice = refine(
            answer,
            choice,
            job,
            values["refine"],
            lambda bundle: make_recommendation(bundle, values),
            **limits,
        )
    _print(as_json, answer.source, choice)
    if not as_json:
        print_how_to_sharpen(answer, choice, **limits)


def _print(as_json: bool, source: str, choice: Recommendation) -> None:
    if as_json:
        print_json({"source": source, **choice.to_dict()})
        return
    note(f"asked {source}")
    print_recommendation(choice)
