"""The documentation's site: built strictly, without the network, and opened without it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from browser_parts import browser, screenshots
from docs_parts import ROOT, load_script

pytest.importorskip("mkdocs", reason="mkdocs is of the dev extra")

FETCHED = re.compile(
    r"<(?:script|img|iframe|source)[^>]+src=[\"']?(https?:)?//"
    r"|<link[^>]+rel=[\"']?(?:stylesheet|preload|icon|preconnect)[^>]+href=[\"']?(https?:)?//"
    r"|@import\s+url\(|url\(https?:"
)


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = set(re.findall(r"([\w-]+\.md)\s*$", text.split("nav:")[1].split("hooks:")[0], re.M))
    hooks = load_script("docs/site_hooks.py")
    here = {path.name for path in (ROOT / "docs").glob("*.md")} | set(hooks.PAGES.values())
    assert pages == here


def test_nothing_of_the_configuration_fetches() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert settings["theme"]["font"] is False
    assert "extra_javascript" not in settings
    assert not [path for path in settings["extra_css"] if "//" in path]


def test_links_of_the_root_become_links_of_pages() -> None:
    hooks = load_script("docs/site_hooks.py")
    text = (
        "[a](docs/method.md#knee) ![b](docs/overview.png) [c](ARCHITECTURE.md) [e](#here)\n"
        "[d](https://example.org/docs/x) [`run.py`](examples/run.py)"
    )
    assert hooks.as_page(text) == (
        "[a](method.md#knee) ![b](overview.png) [c](architecture.md) [e](#here)\n"
        "[d](https://example.org/docs/x) `run.py`"
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning would be an error. No proxy and no host is reached by it."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={
            **os.environ,
            "NO_MKDOCS_2_WARNING": "1",
            **dict.fromkeys(("http_proxy", "https_proxy", "HTTPS_PROXY"), "http://127.0.0.1:9"),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.glob("*.html"))
    assert len(pages) > 15
    for page in pages:
        found = FETCHED.search(page.read_text(encoding="utf-8"))
        assert found is None, f"{page.name}: {found and found[0]}"


@pytest.mark.slow
def test_the_reference_is_made_of_docstrings(site: Path) -> None:
    text = (site / "api.html").read_text(encoding="utf-8")
    for name in ("recommend", "PredictorBundle", "AdaptiveGradientScaling", "autolog"):
        assert name in text
    assert text.count("doc-heading") > 30


@pytest.mark.slow
def test_a_browser_without_a_network_shows_it_and_finds_words(site: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is of the dev extra")
    if not (chromium := browser()):
        pytest.skip("needs chromium")
    asked: list[str] = []
    faults: list[str] = []
    with playwright.sync_playwright() as driver:
        window = driver.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--allow-file-access-from-files"]
        )
        page = window.new_page(viewport={"width": 1280, "height": 900})
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: faults.append(str(error)))
        for name in ("index", "tutorial", "faq", "method", "api"):
            page.goto((site / f"{name}.html").as_uri())
            broken = page.evaluate(
                "[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
            )
            assert broken == [], name
            page.screenshot(path=screenshots() / f"site-{name}.png")
        page.fill("input.md-search__input", "knee")
        page.wait_for_selector(".md-search-result__item", timeout=20_000)
        window.close()
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert faults == []
