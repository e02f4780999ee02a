"""The page of a predictor in a real browser: dragging a slider changes the decision."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from mlflow_tula.recommend import recommend
from mlflow_tula.registry import load
from mlflow_tula.serving.app import create_app
from mlflow_tula.specs import ClusterSpec

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH"),
    pytest.mark.filterwarnings("ignore::mlflow_tula.errors.TulaWarning"),
]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@pytest.fixture
def address(registered: str, free_port: int) -> Iterator[str]:
    """The server's address, in a thread of this process."""
    server = uvicorn.Server(uvicorn.Config(create_app(), port=free_port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + 60
    while not server.started:
        assert time.monotonic() < until
        time.sleep(0.05)
    yield f"http://127.0.0.1:{free_port}"
    server.should_exit = True
    thread.join(20)


@pytest.fixture
def page(address: str):
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        shown = browser.new_page(viewport={"width": 1280, "height": 900})
        shown.trouble = []
        shown.on("pageerror", lambda error: shown.trouble.append(str(error)))
        shown.on("requestfailed", lambda request: shown.trouble.append(request.url))
        yield shown
        browser.close()


def drag(page, slider: str, share: float) -> None:
    """Take the thumb of a slider where it is, and let it go at this share of its width."""
    box = page.locator(slider).bounding_box()
    value = float(page.locator(slider).input_value())
    low, high = (float(page.locator(slider).get_attribute(name)) for name in ("min", "max"))
    radius, y = 8, box["y"] + box["height"] / 2
    width = box["width"] - 2 * radius
    page.mouse.move(box["x"] + radius + width * (value - low) / (high - low), y)
    page.mouse.down()
    page.mouse.move(box["x"] + radius + width * (share + 0.1), y, steps=4)
    page.mouse.move(box["x"] + radius + width * share, y, steps=4)
    page.mouse.up()


def settled(page) -> None:
    """Wait until the newest answer is shown."""
    page.wait_for_function("() => !document.querySelector('#decision').matches('.stale')")


def test_dragging_changes_the_decision(page, address: str, registered: str, tmp_path: Path) -> None:
    page.goto(f"{address}/tula")
    page.click("a.chip")
    page.wait_for_selector("#tula[data-ready]")
    bundle = load(registered)
    clusters = [ClusterSpec(devices_per_node=1), ClusterSpec(devices_per_node=2)]
    first = recommend(bundle, cluster=clusters, epochs=10)
    assert page.inner_text("#decision-batch") == f"{first.global_batch_size:,}"
    assert page.inner_text("#decision-cost") == "–"
    for chart in ("#chart-time", "#chart-memory", "#chart-pareto"):
        assert page.locator(f"{chart} svg .curve, {chart} svg .dot").count() > 0
        assert page.locator(f"{chart} svg .star").count() == 1
    assert page.locator("#chart-time .band").count() == 1
    assert page.locator("#chart-time .knee").count() == 1
    for chart in ("#chart-time", "#chart-memory", "#chart-pareto"):
        # Names of the y axis: without some of them nobody can read a value.
        assert page.locator(f"{chart} .grid-line").count() >= 3

    drag(page, "#price", 0.5)
    settled(page)
    assert page.inner_text("#price-text") == "$5"
    assert page.inner_text("#decision-cost").startswith("$")

    drag(page, "#deadline", 0.0)
    settled(page)
    assert "No candidate meets the deadline_s" in page.inner_text("#error")
    assert page.locator("#chart-time .curve").count() > 0
    drag(page, "#deadline", 1.0)
    settled(page)
    assert page.locator("#error").is_hidden()

    before = page.inner_text("#decision-layout")
    drag(page, "#nodes", 0.75)
    settled(page)
    assert page.inner_text("#nodes-text") == "8"
    assert "nodes=1%2C2%2C4%2C8" in page.url
    assert page.locator("#chart-time .curve").count() > 2
    query = page.url.partition("?")[2]
    shown = page.inner_text("#decision-layout"), page.inner_text("#decision-batch")
    assert before or shown[0]
    page.goto(f"{address}/tula/predictors/{registered}?{query}")
    page.wait_for_selector("#tula[data-ready]")
    assert (page.inner_text("#decision-layout"), page.inner_text("#decision-batch")) == shown
    page.screenshot(path=tmp_path / "predictor.png", full_page=True)
    assert page.trouble == []


def test_it_fits_a_phone(page, address: str, registered: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    for where in ("/tula", f"/tula/predictors/{registered}"):
        page.goto(f"{address}{where}")
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 390
