"""The tutorial's pictures of a browser, from the store that the tutorial's commands made.

    python docs/screenshot.py FOLDER

FOLDER is where docs/commands.py ran the page. Needs Chromium on the path.
"""

from __future__ import annotations

import argparse
import shutil
import socket
from pathlib import Path

from commands import Block, clean_environment, session

FIGURES = Path(__file__).resolve().parent / "figures"
WAIT_MS, PAUSE_MS = 60_000, 2500
"""For the interface to come, and for its charts to be drawn."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def newest_main(store: str) -> dict[str, str]:
    """What to open: the figures of the newest `tula main`, and its predictor's own page."""
    from mlflow import MlflowClient

    client = MlflowClient(store, store)
    (run,) = client.search_runs(
        [one.experiment_id for one in client.search_experiments()],
        filter_string="tags.`tula.command` = 'main'",
        order_by=["attributes.start_time DESC"],
        max_results=1,
    )
    info = run.info
    figures = f"#/experiments/{info.experiment_id}/runs/{info.run_id}/artifacts/figures"
    name = run.data.tags["tula.registered_model"]
    return {
        "tutorial-run.png": f"{figures}/overview.html",
        "tutorial-page.png": f"tula/predictors/{name}?epochs=90&usd_per_device_hour=0.35",
    }


def main() -> None:
    """Serve the store, open both pages, keep what is seen."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        raise SystemExit("no Chromium on the path: the pictures stay as they are")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    text = f"mlflow server --app-name tula --port {port} --workers 1"
    with session(folder, clean_environment(folder)) as shell, sync_playwright() as driver:
        code, said = shell.run(Block(page="screenshot", line=1, info="sh", text=text))
        if code:
            raise SystemExit(said)
        window = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = window.new_page(viewport={"width": 1280, "height": 900})
        for picture, address in newest_main(f"sqlite:///{folder}/mlflow.db").items():
            page.goto(f"http://127.0.0.1:{port}/{address}")
            if "artifacts" in address:
                page.frame_locator("iframe").locator(".main-svg").first.wait_for(timeout=WAIT_MS)
            page.wait_for_timeout(PAUSE_MS)
            page.screenshot(path=FIGURES / picture)
        window.close()


if __name__ == "__main__":
    main()
