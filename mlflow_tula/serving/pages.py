"""HTML of the pages: Jinja templates with everything escaped, and the bundled scripts beside them.

Nothing is loaded from elsewhere, no script stands in the page itself (the policy forbids both), and
a file is served by its name in a fixed list.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from mlflow_tula.serving.champions import Champion, Listed

_HERE = Path(__file__).parent
STATIC = {
    "tula.css": "text/css; charset=utf-8",
    "chart.js": "text/javascript; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "list.js": "text/javascript; charset=utf-8",
}
"""The only files that are served, and their types."""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'self'"
    ),
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@functools.cache
def _templates() -> Environment:
    return Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@functools.cache
def static_file(name: str) -> tuple[bytes, str] | None:
    """Content and type of a bundled file; None for any other name."""
    if name not in STATIC:
        return None
    return (_HERE / "static" / name).read_bytes(), STATIC[name]


@functools.cache
def _stamp() -> str:
    """Changes with the bundled files, so that browsers may keep them."""
    digest = hashlib.sha256()
    for name in STATIC:
        digest.update((_HERE / "static" / name).read_bytes())
    return digest.hexdigest()[:10]


def render(template: str, prefix: str, **values: Any) -> str:
    """One page."""
    return _templates().get_template(template).render(prefix=prefix, stamp=_stamp(), **values)


def list_page(prefix: str, listed: Iterable[Listed]) -> str:
    """Workloads, each with the hardware that it is registered for."""
    groups: dict[str, list[Listed]] = {}
    for one in sorted(listed, key=lambda one: one.foreseen):
        groups.setdefault(one.workload, []).append(one)
    hardware = {one.hardware for group in groups.values() for one in group}
    return render(
        "list.html",
        prefix,
        groups=[
            {
                "workload": workload,
                "model": group[0].model,
                "dataset": group[0].dataset,
                "predictors": sorted(group, key=lambda one: (one.device_name, one.hardware)),
            }
            for workload, group in sorted(groups.items())
        ],
        num_predictors=sum(not one.foreseen for group in groups.values() for one in group),
        num_hardware=len(hardware),
    )


def predictor_page(
    prefix: str, champion: Champion, controls: Mapping[str, Any], shown: Mapping[str, Any]
) -> str:
    """The page of one predictor, with its first answer in it."""
    report = champion.bundle.report
    return render(
        "predictor.html",
        prefix,
        champion=champion,
        workload=champion.bundle.workload,
        hardware=champion.bundle.hardware,
        report=report,
        facts=str(report).splitlines(),
        controls=controls,
        shown=shown,
        state=embedded({"controls": controls, "view": shown}),
    )


def error_page(prefix: str, status: int, message: str) -> str:
    """One sentence, and the way back."""
    return render("error.html", prefix, status=status, message=message)


def embedded(data: Mapping[str, Any]) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(data, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
