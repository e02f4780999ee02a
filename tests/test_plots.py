from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_tula.plots import figures as plots
from mlflow_tula.plots import interactive
from mlflow_tula.plots.overlays import overlays
from mlflow_tula.plots.panels import byte_unit, time_unit
from mlflow_tula.recommend import recommend
from mlflow_tula.specs import ClusterSpec, Pricing

pytestmark = pytest.mark.filterwarnings("ignore::mlflow_tula.errors.TulaWarning")


@pytest.fixture(scope="module")
def clusters():
    return [ClusterSpec(), ClusterSpec(devices_per_node=2)]


@pytest.fixture(scope="module")
def choice(bundle, clusters):
    return recommend(bundle, cluster=clusters)


@pytest.fixture(scope="module")
def priced(bundle, clusters):
    return recommend(bundle, cluster=clusters, pricing=Pricing(usd_per_gb_hour=0.15))


def texts(figure):
    """Every text that is drawn: titles, labels, ticks, notes and the key."""
    import matplotlib.text

    figure.canvas.draw()
    return [one.get_text() for one in figure.findobj(matplotlib.text.Text) if one.get_text()]


def test_the_overview_has_units_limit_key_and_choice(table, bundle, choice):
    shown = texts(plots.overview(table, bundle, choice))
    for text in (
        "step time, s",
        "epoch time, s",
        "peak memory of a rank, GB",
        "throughput, samples / s",
        "global batch size, samples",
        "limit 8.6 GB",
        "1 device",
        "2 devices",
        "90 % interval",
        "did not run",
        "the choice",
    ):
        assert text in shown, text
    assert any(choice.headline in text for text in shown)


def test_with_a_price_the_trade_off_is_drawn(table, bundle, priced):
    shown = texts(plots.overview(table, bundle, priced))
    assert "cost, US dollars" in shown
    assert any(text.startswith("time (") and text.endswith(", s") for text in shown)


def test_a_stated_memory_limit_is_drawn(table, bundle):
    shown = texts(plots.memory(table, bundle, memory_limit_bytes=3e9))
    assert "limit 3.0 GB" in shown
    shown = texts(plots.memory(table, bundle, memory_limit_bytes=90e9))
    pattern = r"limit 90\.0 GB, \d+ times the highest shown"
    assert any(re.fullmatch(pattern, text) for text in shown)


@pytest.mark.parametrize("name", ["step_time", "epoch_time", "memory", "residuals"])
def test_every_panel_is_a_figure_of_its_own(name, table, bundle, tmp_path):
    figure = getattr(plots, name)(table, bundle)
    plots.save_png(figure, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    axes = figure.axes[0]
    assert axes.get_xscale() == "log"
    assert axes.get_xlabel()
    assert axes.get_ylabel()
    ticks = [int(label.get_text().replace(",", "")) for label in axes.get_xticklabels()]
    assert all(tick & (tick - 1) == 0 for tick in ticks)
    assert 3 <= len(ticks) <= 12


def test_measured_points_are_drawn_where_they_were_measured(table, bundle):
    axes = plots.residuals(table, bundle).axes[0]
    points = {
        (float(x), round(float(y), 6))
        for line in axes.lines
        if line.get_marker() not in {"None", None, ""}
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    }
    names = ["local_batch_size", "nodes", "devices_per_node", "accumulation_steps"]
    rows = [row for row in table.measurements if row.status == "ok"]
    frame = table.to_frame().query("status == 'ok'")[names]
    predicted = bundle.predict(frame)["step_time_s"]
    expected = {
        (float(row.global_batch_size), round(100 * (p / row.step_time_s - 1), 6))
        for row, p in zip(rows, predicted, strict=True)
    }
    assert points == expected


def test_the_pareto_front_is_joined_and_starred(priced):
    axes = plots.pareto(priced).axes[0]
    stars = [line for line in axes.lines if line.get_marker() == "*"]
    assert len(stars) == 1
    assert stars[0].get_ydata()[0] == pytest.approx(priced.choice.cost_usd)


def test_a_table_without_memory_or_with_one_row_is_drawn(table, tmp_path):
    from mlflow_tula.fit import fit

    row = replace(table.ok[0], peak_memory_bytes=None, step_time_std_s=None)
    one = replace(table, measurements=(row,), links=())
    plots.save_png(plots.overview(one, fit(one)), tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 10_000
    interactive.save_html(tmp_path / "one.html", one, fit(one))


def test_overlays_stop_at_four_times_the_largest_probe_and_at_the_dataset(table, bundle):
    small, large = overlays(table, bundle)
    assert (small.name, large.name) == ("1x1", "1x2")
    assert (small.label, large.label) == ("1 device", "2 devices")
    assert small.predicted["local_batch_size"].max() == 1024
    tiny = replace(table, workload=replace(table.workload, dataset_size=300))
    assert overlays(tiny, bundle)[0].predicted["local_batch_size"].max() <= 300
    assert [row.local_batch_size for row in large.failed] == [512]
    assert np.isfinite(large.measured["error"].astype(float)).all()


def test_a_choice_on_devices_that_were_not_measured_has_a_line(table, bundle, tmp_path):
    alone = replace(table, measurements=tuple(r for r in table.measurements if r.world_size == 1))
    from mlflow_tula.fit import fit

    fitted = fit(alone)
    wide = recommend(fitted, cluster=ClusterSpec(devices_per_node=2), current_global_batch_size=64)
    pairs = overlays(alone, fitted, wide)
    assert [pair.name for pair in pairs] == ["1x1", "1x2"]
    assert len(pairs[1].measured) == 0
    assert "2 devices" in texts(plots.overview(alone, fitted, wide))
    interactive.save_html(tmp_path / "wide.html", alone, fitted, wide)


def test_accumulation_is_a_layout_of_its_own(table, bundle):
    rows = (*table.measurements, replace(table.ok[0], accumulation_steps=4, step_time_s=1.5))
    names = [pair.name for pair in overlays(replace(table, measurements=rows), bundle)]
    assert names == ["1x1", "1x1a4", "1x2"]


def test_the_page_opens_offline(table, bundle, choice, tmp_path):
    interactive.save_html(tmp_path / "page.html", table, bundle, choice)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"<(script|link)[^>]+(src|href)=[\"']?(https?:)?//", page)
    assert "2 devices, measured" in page
    assert "epoch time" in page
    assert str(choice.global_batch_size) in page


def test_the_page_shows_every_relation_and_escapes_names(table, bundle, choice, tmp_path):
    odd = replace(table, hardware=replace(table.hardware, device_name="</script><b>T4</b>"))
    interactive.save_html(tmp_path / "page.html", odd, bundle, choice)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "&lt;/script&gt;&lt;b&gt;T4" in page
    assert "<b>T4" not in page
    for heading in ("Epoch time", "Step time", "Memory of a device", "Cost", "Residuals"):
        assert f"<h2>{heading}</h2>" in page
    assert "device-hours (no price given)" in page
    assert "limit 8.6 GB" in page
    interactive.save_html(tmp_path / "bare.html", table, bundle)
    assert "<h2>Cost</h2>" not in (tmp_path / "bare.html").read_text(encoding="utf-8")


def test_cost_is_in_dollars_or_device_hours(table, bundle, choice, priced):
    for decided, label in ((priced, "cost, US dollars"), (choice, "device-hours")):
        axes = plots.cost(table, bundle, decided).axes[0]
        assert label in axes.get_ylabel()
        stars = [line for line in axes.lines if line.get_marker() == "*"]
        assert stars[0].get_xdata()[0] == decided.global_batch_size
    hours = choice.choice.time_s * choice.world_size / 3600
    assert stars[0].get_ydata()[0] == pytest.approx(hours)
    front = plots.pareto(choice).axes[0]
    assert "device-hours" in front.get_ylabel()


def test_a_training_is_drawn_with_its_gradient_variability(tmp_path):
    from mlflow_tula.plots.training import TrainingCurves, save_training_page, training, variability

    steps = range(1, 41)
    curves = TrainingCurves(
        title="m.d at global batch size 64",
        train_loss=[(step, 2.0 / step) for step in steps],
        test_accuracy=[(20, 0.5), (40, 0.75)],
        gradient_variability=[(step, 1.0 / step) for step in steps],
        step_time_s=[(step, 0.02) for step in steps],
    )
    shown = texts(training(curves))
    assert {"Loss", "Test accuracy", "Gradient variability", "Step time", "ms"} <= set(shown)
    assert "Noise scale" not in shown
    (line,) = variability(curves).axes[0].lines
    assert list(line.get_ydata()) == [1.0 / step for step in steps]
    save_training_page(tmp_path / "page.html", curves)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert '<section id="gradient-variability">' in page
    assert '"accuracy, %"' in page
    plots.save_png(training(TrainingCurves(title="nothing")), tmp_path / "empty.png")


@given(st.floats(1e-7, 1e7))
def test_times_have_a_unit_that_people_can_read(seconds):
    factor, unit = time_unit([seconds])
    assert unit in {"µs", "ms", "s", "min", "h"}
    assert seconds * factor >= 0.05 or unit == "µs"
    assert seconds * factor <= 1000 or unit == "h"


def test_units_of_nothing():
    assert time_unit([]) == (1.0, "s")
    assert byte_unit([float("nan"), 5e8]) == (1e-6, "MB")


def test_figures_leave_nothing_global_and_need_no_display():
    code = "import sys, mlflow_tula.plots.figures as p; p.new_figure(1, 1, width=3.0, height=2.0);"
    code += "sys.exit(bool({'matplotlib.pyplot', 'torch', 'mlflow'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
