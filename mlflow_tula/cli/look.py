"""What to click: the pages of MLflow, and of tula in it, where a demo's results are seen."""

from __future__ import annotations

import dataclasses
import shlex
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from mlflow_tula.cli.main_job import Conclusion
    from mlflow_tula.registry import RegisteredPredictor

_PORTS = range(5000, 5010)
"""MLflow's own and those beside it: macOS keeps 5000 for itself."""

_TRAINING = "?workflowType=machine_learning"
"""Opens MLflow's pages as those of trainings, and not of language models."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """Addresses of a run, of its figures, of the registered version, and of tula's own page.

    `server` is the command that serves them, empty where the store is a server already; `tula`
    is then empty too, since that server may not have the page. `ask` is the next question.
    """

    server: str
    run: str
    figures: str
    version: str
    tula: str
    ask: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return dataclasses.asdict(self)

    def lines(self) -> Iterator[str]:
        """What people read: the command first, then what to open and what is seen there."""
        if self.server:
            yield "Look at it: start MLflow, and open what you like (Ctrl-C ends it)"
            yield f"  {self.server}"
        else:
            yield "Look at it:"
        yield f"  the run         {self.run}"
        yield f"  its pictures    {self.figures}"
        yield f"  the predictor   {self.version}"
        if self.tula:
            yield f"  play with it    {self.tula}"
        yield ""
        yield "Ask it again, for another aim or budget:"
        yield f"  {self.ask}"


def look_at(found: Conclusion, done: RegisteredPredictor, *, uri: str, ask: str) -> Look:
    """Where to see a conclusion.

    Args:
        found: what was decided, and the run it was logged to.
        done: the registered version.
        uri: the store as a person may type it.
        ask: the command of the next question.
    """
    served = uri.startswith(("http://", "https://"))
    port = _free_port()
    base = uri.rstrip("/") if served else f"http://127.0.0.1:{port}"
    server = "" if served else f"mlflow ui --app-name tula --backend-store-uri {shlex.quote(uri)}"
    if server and port != _PORTS[0]:
        server += f" --port {port}"
    # Of a bundle that was registered before, the run that its version came from.
    run_id = done.run_id or found.sweep.run.run_id
    run = f"{base}/#/experiments/{found.sweep.run.experiment_id}/runs/{run_id}"
    name = quote(done.name)
    return Look(
        server=server,
        run=f"{run}{_TRAINING}",
        figures=f"{run}/artifacts/figures/overview.png{_TRAINING}",
        version=f"{base}/#/models/{name}/versions/{done.version}{_TRAINING}",
        tula="" if served else f"{base}/tula/predictors/{name}?objective={found.choice.objective}",
        ask=ask,
    )


def _free_port() -> int:
    """The first port from MLflow's own on which nobody listens."""
    for port in _PORTS:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    return _PORTS[0]
