"""What a batch size costs, and cost against time: of a recommendation's candidates.

Without a price cost is counted in device-hours (devices x time), which is also what the Pareto
front weighs then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlflow_tula.plots.overlays import Overlay
from mlflow_tula.plots.panels import (
    CHOICE_COLOR,
    COLORS,
    batch_axis,
    color,
    marker,
    plain_numbers,
    time_unit,
)
from mlflow_tula.recommend.recommendation import CurvePoint, Recommendation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LABELLED = 6
_NEAR = 0.06
_LONG = 6.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """How a recommendation's candidates are priced: the number of each, and the axis's words."""

    of: Callable[[CurvePoint], float | None]
    label: str


def costs(recommendation: Recommendation) -> Costs:
    """Dollars where there is a price, else device-hours."""
    to_target = recommendation.objective.endswith("to_target")
    name = "cost_to_target_usd" if to_target else "cost_usd"
    if any(getattr(point, name) is not None for point in recommendation.curve):
        return Costs(of=lambda point: getattr(point, name), label="cost, US dollars")
    return Costs(of=_device_hours, label="cost, device-hours (no price given)")


def _device_hours(point: CurvePoint) -> float | None:
    return None if point.time_s is None else point.time_s * point.world_size / 3600.0


def has_cost(recommendation: Recommendation) -> bool:
    """Whether any candidate has a price."""
    return any(point.cost_usd is not None for point in recommendation.curve)


def layout_curves(
    recommendation: Recommendation, lines: Sequence[Overlay]
) -> list[tuple[int, str, list[CurvePoint]]]:
    """The candidates on each number of devices, by batch size: (color's number, label, points).

    A layout has the color that it has in the other figures, a layout of its own the next one.
    """
    known = {(line.nodes, line.devices_per_node): number for number, line in enumerate(lines)}
    found: dict[tuple[int, int], list[CurvePoint]] = {}
    for point in recommendation.curve:
        found.setdefault((point.nodes, point.devices_per_node), []).append(point)
    curves = []
    for layout, points in sorted(found.items(), key=lambda item: item[0][0] * item[0][1]):
        number = known.setdefault(layout, len(known))
        world, nodes = layout[0] * layout[1], layout[0]
        label = f"{world} device{'s' if world > 1 else ''}"
        label += f" on {nodes} nodes" if nodes > 1 else ""
        points.sort(key=lambda point: (point.global_batch_size, point.accumulation_steps))
        curves.append((number, label, points))
    return curves


def draw_cost(axes: Axes, lines: Sequence[Overlay], recommendation: Recommendation) -> None:
    """Cost of every candidate by batch size; markers are open where it is not sure, or not fit."""
    price = costs(recommendation)
    shown: list[float] = []
    sizes: list[int] = []
    for number, _, points in layout_curves(recommendation, lines):
        known = [(point, value) for point in points if (value := price.of(point)) is not None]
        if not known:
            continue
        shown += [value for _, value in known]
        sizes += [point.global_batch_size for point, _ in known]
        style: dict[str, Any] = {"color": color(number), "marker": marker(number)}
        axes.plot(
            [point.global_batch_size for point, _ in known],
            [value for _, value in known],
            color=color(number),
            linewidth=1.4,
        )
        for point, value in known:
            sure = point.fits and not point.extrapolated
            face = color(number) if sure else "white"
            axes.plot([point.global_batch_size], [value], markerfacecolor=face, **style)
    chosen = price.of(recommendation.choice)
    axes.axvline(recommendation.global_batch_size, color=CHOICE_COLOR, linewidth=0.9, alpha=0.6)
    if chosen is not None:
        size = recommendation.global_batch_size
        axes.plot([size], [chosen], marker="*", markersize=17, color=CHOICE_COLOR, zorder=6)
    axes.set_ylabel(price.label)
    axes.set_title(f"cost by batch size ({recommendation.basis})")
    if shown:
        batch_axis(axes, "global batch size, samples", sorted(sizes))
        if max(shown) > _LONG * min(shown) > 0:
            axes.set_yscale("log")
            axes.set_ylim(min(shown) / 1.5, max(shown) * 1.5)
            plain_numbers(axes.yaxis)
        else:
            axes.set_ylim(0.0, 1.2 * max(shown) or 1.0)


def draw_pareto(axes: Axes, recommendation: Recommendation) -> None:
    """Cost against time of every candidate, the front joined by a line."""
    price = costs(recommendation)
    known = ((p, price.of(p)) for p in recommendation.curve if p.time_s is not None)
    value = {id(p): cost for p, cost in known if cost is not None}
    points = [p for p in recommendation.curve if id(p) in value]
    factor, unit = time_unit([p.time_s for p in points if p.time_s is not None])
    for point in points:
        axes.plot(
            [(point.time_s or 0.0) * factor],
            [value[id(point)]],
            linestyle="none",
            marker="o",
            markersize=6,
            color="0.35" if point.fits else "0.75",
            markerfacecolor="none" if point.extrapolated or not point.fits else None,
        )
    front = [p for p in points if p.on_pareto]
    front.sort(key=lambda p: p.time_s or 0.0)
    axes.plot(
        [(p.time_s or 0.0) * factor for p in front],
        [value[id(p)] for p in front],
        color=COLORS[0],
        linewidth=1.4,
        zorder=1,
    )
    _label(axes, [((p.time_s or 0.0) * factor, value[id(p)], p) for p in front])
    chosen = recommendation.choice
    cost = price.of(chosen)
    if chosen.time_s is not None and cost is not None:
        where = (chosen.time_s * factor, cost)
        axes.plot(*where, marker="*", markersize=17, color=CHOICE_COLOR, zorder=6)
    axes.set_xlabel(f"time ({recommendation.basis}), {unit}")
    _plain_log(axes)
    axes.set_ylabel(price.label)
    axes.set_title("cost against time (front: batch size on devices)")
    axes.grid(alpha=0.25)


def _label(axes: Axes, front: Sequence[tuple[float, float, CurvePoint]]) -> None:
    """Batch size and devices of the front's points; of points that lie close, the first one's."""
    labelled: list[tuple[float, float]] = []
    for x, y, point in front:
        near = any(abs(x / a - 1) < _NEAR and abs(y / b - 1) < _NEAR for a, b in labelled)
        if near or len(labelled) >= _LABELLED:
            continue
        labelled.append((x, y))
        text = f"{point.global_batch_size:,} on {point.world_size}"
        shift = (9, (6, -12)[len(labelled) % 2])
        axes.annotate(text, (x, y), xytext=shift, textcoords="offset points", fontsize=8)


def draw_certainty(figure: Figure) -> None:
    """The key of filled, open and grey markers, below the figure."""
    from matplotlib.lines import Line2D

    plain: dict[str, Any] = {"linestyle": "none", "marker": "o"}
    star: dict[str, Any] = {"linestyle": "none", "marker": "*", "markersize": 13}
    handles = [
        Line2D([], [], color="0.35", label="known", **plain),
        Line2D(
            [], [], color="0.35", markerfacecolor="none", label="beyond what was measured", **plain
        ),
        Line2D([], [], color="0.75", markerfacecolor="none", label="does not fit", **plain),
        Line2D([], [], color=COLORS[0], label="front"),
        Line2D([], [], color=CHOICE_COLOR, label="the choice", **star),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=9)


def _plain_log(axes: Axes) -> None:
    """Both axes logarithmic, where there is something above zero on them."""
    for name in ("x", "y"):
        low, high = axes.dataLim.intervalx if name == "x" else axes.dataLim.intervaly
        if not 0 < low <= high:
            continue
        axes.set(**{f"{name}scale": "log", f"{name}lim": (low / 1.3, high * 1.5)})
        plain_numbers(axes.xaxis if name == "x" else axes.yaxis)
