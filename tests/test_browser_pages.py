"""MLflow's own pages, as people see them: a run, a version, a logged model, several compared."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_parts import WAIT_MS, Site, browser, make_store, screenshots, serve, site_of
from mlflow import MlflowClient

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

CURVE = "step_time_s/1x1/predicted"
PLOTS = """() => Array.from(document.querySelectorAll('.js-plotly-plot')).map(one =>
  (one.data || []).map(line => [Array.from(line.x || []), Array.from(line.y || [])]))"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    pytest.importorskip("playwright", reason="needs playwright (the dev extra)")
    if browser() is None:
        pytest.skip("needs Chromium on the PATH")
    folder = tmp_path_factory.mktemp("site")
    store = make_store(folder)
    with serve(store, folder) as url:
        yield site_of(url, store)


@pytest.fixture(scope="module")
def context(site: Site) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(
            executable_path=browser(), args=["--headless", "--no-sandbox"]
        )
        opened = chromium.new_context(viewport={"width": 1700, "height": 1300})
        opened.set_default_timeout(WAIT_MS)
        yield opened
        chromium.close()


@pytest.fixture
def page(context: Any) -> Iterator[Any]:
    opened = context.new_page()
    yield opened
    opened.close()


def first_line(markdown: str) -> str:
    """The first line as it is read, without Markdown's marks."""
    return re.sub(r"[*`]", "", markdown.splitlines()[0])


def run_address(site: Site, run: Any, more: str = "") -> str:
    return f"{site.url}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}{more}"


def see(page: Any, text: str) -> None:
    """Wait until the text can be seen."""
    page.get_by_text(text).filter(visible=True).first.wait_for()


def shoot(page: Any, name: str) -> None:
    path = screenshots() / f"{name}.png"
    page.screenshot(path=path)
    assert path.stat().st_size > 10_000


def width_of_picture(page: Any) -> int:
    """Pixels of the artifact that is shown, once it is loaded."""
    condition = "() => Math.max(0, ...Array.from(document.images).map(one => one.naturalWidth))"
    page.wait_for_function(f"() => ({condition})() > 300")
    return int(page.evaluate(condition))


def test_the_run_page_begins_with_the_decision(site: Site, page: Any) -> None:
    run = site.profiles[0]
    page.goto(run_address(site, run))
    see(page, first_line(run.data.tags["mlflow.note.content"]))
    see(page, "Finished")
    see(page, f"{run.data.tags['tula.table_digest']}")
    see(page, site.name)
    table = page.get_by_placeholder("Search metrics")
    size = run.data.metrics["choice/global_batch_size"]
    table.fill("choice/global_batch_size")
    row = page.get_by_role("row").filter(has_text="choice/global_batch_size")
    row.get_by_text(f"{size:g}", exact=True).wait_for()
    shoot(page, "run")


@pytest.mark.parametrize(
    "name",
    [
        "overview",
        "time_by_batch_size",
        "cost_by_batch_size",
        "memory_by_batch_size",
        "pareto",
        "residuals",
    ],
)
def test_pictures_of_a_run_are_shown(site: Site, page: Any, name: str) -> None:
    page.goto(run_address(site, site.profiles[0], f"/artifacts/figures/{name}.png"))
    assert width_of_picture(page) > 700
    shoot(page, f"run-{name}")


def test_the_interactive_page_is_drawn_inside_the_artifact_view(site: Site, page: Any) -> None:
    page.goto(run_address(site, site.profiles[0], "/artifacts/figures/overview.html"))
    inside = page.frame_locator("iframe").first
    inside.locator("#chart-residuals .main-svg").first.wait_for()
    headings = inside.locator("h2").all_inner_texts()
    wanted = ["Epoch time", "Step time", "Memory of a device", "Cost", "Cost against time"]
    assert headings == [*wanted, "Residuals"]
    chosen = f"global batch size {site.profiles[0].data.metrics['choice/global_batch_size']:g} "
    assert chosen in inside.locator("p").first.inner_text()
    shoot(page, "run-interactive")


def test_the_page_asks_for_nothing_on_the_network(site: Site, page: Any, tmp_path: Path) -> None:
    client = MlflowClient(site.store, site.store)
    run_id = site.profiles[0].info.run_id
    path = client.download_artifacts(run_id, "figures/overview.html", str(tmp_path))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(Path(path).as_uri())
    page.locator("#chart-pareto .main-svg").first.wait_for()
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert page.evaluate(PLOTS)[0][-1][0] == [8, 32, 128]
    shoot(page, "page-offline")


def test_the_profile_table_is_a_table(site: Site, page: Any) -> None:
    page.goto(run_address(site, site.profiles[0], "/artifacts/profile_table.json"))
    see(page, "local_batch_size")
    see(page, "128")
    shoot(page, "run-table")


def test_the_training_run_shows_its_outcome_and_gradients(site: Site, page: Any) -> None:
    run = site.training
    page.goto(run_address(site, run))
    see(page, first_line(run.data.tags["mlflow.note.content"]))
    shoot(page, "training")
    page.goto(run_address(site, run, "/artifacts/figures/gradient_variability.png"))
    assert width_of_picture(page) > 700
    shoot(page, "training-gradient-variability")


def test_the_version_page_shows_decision_and_gate(site: Site, page: Any) -> None:
    client = MlflowClient(site.store, site.store)
    champion = client.get_model_version_by_alias(site.name, "champion")
    for version in (champion.version, "1" if str(champion.version) == "2" else "2"):
        shown = client.get_model_version(site.name, str(version))
        page.goto(f"{site.url}/#/models/{site.name}/versions/{version}")
        see(page, first_line(shown.description))
        gate = re.search(r"\*\*Gate\.\*\* (.*)\.", shown.description)
        assert gate is not None
        see(page, gate[1][:60])
        see(page, "tula.bundle_digest")
        shoot(page, f"version-{version}")
    page.goto(f"{site.url}/#/models/{site.name}/versions/{champion.version}")
    page.get_by_text("champion").filter(visible=True).first.wait_for()


def test_the_logged_model_shows_metrics_with_their_dataset(site: Site, page: Any) -> None:
    client = MlflowClient(site.store, site.store)
    run = client.get_run(site.profiles[1].info.run_id)
    model_id = run.outputs.model_outputs[0].model_id
    page.goto(f"{site.url}/#/experiments/{run.info.experiment_id}/models/{model_id}")
    row = page.get_by_role("row").filter(has_text="fit/step_time_mape")
    row.get_by_text(run.data.tags["tula.workload"]).first.wait_for()
    shown = row.inner_text()
    assert f"{run.data.metrics['fit/step_time_mape']:.6f}"[:7] in shown
    see(page, run.data.tags["tula.table_digest"])
    # The model knows which version it is.
    page.get_by_role("link", name=re.compile(re.escape(site.name))).first.wait_for()
    shoot(page, "logged-model")


def test_two_runs_are_compared_and_their_curves_overlay(site: Site, page: Any) -> None:
    first, second = site.profiles
    ids = json.dumps([run.info.run_id for run in site.profiles])
    where = f'experiments=["{first.info.experiment_id}"]'
    page.goto(f"{site.url}/#/compare-runs?runs={ids}&{where}")
    see(page, "Comparing 2 Runs")
    see(page, "(8, 16, 64, 256)")
    link = page.locator("a[href*='/metric']").filter(has_text="choice/global_batch_size").first
    link.scroll_into_view_if_needed()
    shoot(page, "compare")
    # MLflow's own link, for the curve: rows further down are made when they are scrolled to.
    address = str(link.get_attribute("href"))
    for text in ("choice/global_batch_size", "choice%2Fglobal_batch_size"):
        address = address.replace(text, CURVE.replace("/", "%2F"))
    page.goto(f"{site.url}/{address}")
    page.wait_for_function(f"() => ({PLOTS})().some(lines => lines.length >= 2)")
    lines = next(found for found in page.evaluate(PLOTS) if len(found) >= 2)
    client = MlflowClient(site.store, site.store)
    stored = [
        sorted((one.step, one.value) for one in client.get_metric_history(run.info.run_id, CURVE))
        for run in (first, second)
    ]
    drawn = [sorted(zip(x, y, strict=True)) for x, y in lines]
    for curve in stored:
        sizes = [step for step, _ in curve]
        assert any(
            [x for x, _ in one] == sizes
            and [y for _, y in one] == pytest.approx([value for _, value in curve])
            for one in drawn
        )
    shoot(page, "compare-curves")


def test_versions_are_compared(site: Site, page: Any) -> None:
    page.goto(f"{site.url}/#/models/{site.name}")
    see(page, "Version 2")
    boxes = page.get_by_role("checkbox")
    for number in range(boxes.count()):
        boxes.nth(number).check()
    page.get_by_role("button", name="Compare", exact=True).click()
    see(page, "Comparing 2 Versions")
    see(page, "fit/step_time_mape")
    shoot(page, "compare-versions")


def test_the_charts_of_an_experiment_overlay_runs(site: Site, page: Any) -> None:
    where = site.profiles[0].info.experiment_id
    only = "searchFilter=tags.tula.command%20%3D%20%27main%27"
    page.goto(f"{site.url}/#/experiments/{where}/runs?compareRunsMode=CHART&{only}")
    page.get_by_placeholder("Search metric charts").fill(CURVE)
    page.wait_for_function(
        f"() => ({PLOTS})().some(lines => lines.filter(one => one[0].length > 3).length >= 2)"
    )
    shoot(page, "experiment-charts")


def test_the_tula_page_shows_the_decision_and_follows_the_price(site: Site, page: Any) -> None:
    from mlflow_tula.recommend import recommend
    from mlflow_tula.registry.model_files import read_json
    from mlflow_tula.specs import ClusterSpec

    client = MlflowClient(site.store, site.store)
    champion = client.get_model_version_by_alias(site.name, "champion")
    page.goto(f"{site.url}/tula")
    chip = page.locator(f"a[href$='/tula/predictors/{site.name}']")
    chip.wait_for()
    shoot(page, "tula-list")
    chip.click()
    page.locator("#chart-time svg").first.wait_for()
    assert page.locator("#version").inner_text() == str(champion.version)
    from mlflow_tula.predictors.bundle import PredictorBundle

    address = client.get_model_version_download_uri(site.name, str(champion.version))
    bundle = PredictorBundle.from_dict(read_json(address, "bundle.json"))
    choice = recommend(bundle, cluster=ClusterSpec(), epochs=10)
    shown = page.locator("#decision-batch").inner_text().replace(",", "")
    assert int(shown) == choice.global_batch_size
    for name in ("chart-time", "chart-memory", "chart-pareto"):
        box = page.locator(f"#{name} svg").first.bounding_box()
        assert box is not None
        assert box["width"] > 200
    assert page.locator("#chart-time svg path").count() > 0
    shoot(page, "tula-predictor")
    before = page.locator("#decision-cost").inner_text()
    page.locator("#price").fill("40")
    page.wait_for_function(
        "before => document.getElementById('decision-cost').innerText !== before", arg=before
    )
    assert "$" in page.locator("#decision-cost").inner_text()
    shoot(page, "tula-priced")
