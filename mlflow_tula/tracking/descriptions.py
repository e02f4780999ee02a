"""Markdown that people read on a run's page: the decision in the first line."""

from __future__ import annotations

from collections.abc import Sequence

from mlflow_tula.hardware import detect
from mlflow_tula.predictors.bundle import PredictorBundle
from mlflow_tula.recommend.recommendation import Recommendation
from mlflow_tula.registry.words import counts, curve_lines, decision
from mlflow_tula.table import ProfileTable


def describe_profile(
    table: ProfileTable,
    bundle: PredictorBundle | None = None,
    recommendation: Recommendation | None = None,
    *,
    registered: str = "",
    notes: Sequence[str] = (),
) -> str:
    """What was decided, on what evidence, and what to do next.

    Args:
        table: what was measured.
        bundle: what was fitted to it.
        recommendation: the decision; the first line then says that there is none when None.
        registered: the registered version, as `name version 3, champion`.
        notes: further lines, such as what the search cost.
    """
    workload, hardware = table.workload, table.hardware
    parts = [decision(table, recommendation), ""]
    where = f"{hardware.device_name} x {hardware.devices_per_node}"
    parts += [f"Workload `{workload.slug}` on {where} (`{hardware.slug}`)", ""]
    if recommendation is not None:
        parts += [*curve_lines(recommendation), ""]
        parts += [f"- {reason}" for reason in recommendation.reasons]
        parts += [f"- **warning:** {warning}" for warning in recommendation.warnings]
        parts += [""]
    parts += ["**Evidence**", "", f"- {counts(table)} (table `{table.digest}`)"]
    if bundle is not None:
        parts += [f"- {line}" for line in str(bundle.report).splitlines() if ":" in line]
    parts += [f"- {note}" for note in notes]
    if registered:
        parts += [f"- registered as {registered}"]
    parts += ["", "**Next**", "", *_next_steps(table)]
    return "\n".join(parts)


def _next_steps(table: ProfileTable) -> list[str]:
    """Commands to go on with; what was measured on another machine is asked for by its name."""
    workload = table.workload
    options = f"--model {workload.model}"
    if workload.dataset != "digits":
        options += f" --dataset {workload.dataset}"
    if table.hardware.fingerprint != detect().fingerprint:
        return [f"- ask again: `tula recommend {options} --hardware {table.hardware.slug}`"]
    return [
        f"- ask again: `tula recommend {options}`",
        f"- train with it: `tula train {options} --batch-size auto`",
    ]
