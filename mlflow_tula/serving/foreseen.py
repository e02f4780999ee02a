"""An answer for a workload that was never profiled on a hardware, from the other models there.

What a model's step holds was counted when it was profiled, on whatever hardware, and lies in its
registered table: no model is built here and no torch is loaded. A workload that was profiled
nowhere has no counts yet; `tula recommend` makes them, on a machine that has torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlflow_tula.cold_start import Elsewhere, cold_bundle
from mlflow_tula.errors import InvalidInputError, NotRegisteredError, TulaError
from mlflow_tula.registry import (
    cross_model_name,
    known_elsewhere,
    load_cross_model,
    load_links,
    load_table,
)
from mlflow_tula.serving.champions import Champion, Listed, split_name
from mlflow_tula.table import ProfileTable


def foresee(name: str, registered: Iterable[Listed]) -> Champion:
    """What the hardware's cross-model predictor says of a workload.

    Args:
        name: the registered name that it would have.
        registered: what there is.

    Raises:
        NotRegisteredError: no other models speak for it, or its kernels were never counted.
        StoreError: the registry does not answer.
    """
    _, workload, hardware = split_name(name)
    answers = cross_model_name(hardware)
    try:
        known, version = load_cross_model(hardware)
    except NotRegisteredError as error:
        raise NotRegisteredError("") from error
    model, _, dataset = workload.partition(".")
    table = _counted(workload, registered)
    if table is None or table.features is None:
        raise NotRegisteredError(
            f"{answers} knows this hardware, but {workload} was profiled nowhere: "
            f"`tula recommend --model {model} --dataset {dataset}` counts its kernels and answers"
        )
    try:
        links = load_links(known.hardware)
    except TulaError:
        links = ()
    found = known_elsewhere(workload, hardware)
    elsewhere = None
    if found is not None:
        elsewhere = Elsewhere(table=found[0], known=found[1], how=found[2])
    try:
        bundle = cold_bundle(
            known, table.features, table.workload, links=links, elsewhere=elsewhere
        )
    except InvalidInputError as error:
        raise NotRegisteredError(f"{answers} cannot foresee it: {error}") from error
    return Champion(
        name=name,
        version=version,
        source=f"{version} {table.digest}",
        bundle=bundle,
        answers=answers,
        warning=(
            f"foreseen by {answers} version {version}: {workload} was never profiled on this "
            "hardware"
        ),
    )


def _counted(workload: str, registered: Iterable[Listed]) -> ProfileTable | None:
    """A table of the workload, of any hardware, with its kernels counted."""
    for one in registered:
        if one.workload != workload or one.foreseen or one.version is None:
            continue
        table = load_table(one.name, version=one.version)
        if table.features is not None and table.features.operations:
            return table
    return None
