"""`mlflow_tula.autolog()`: any torch training loop of this process is observed from now on.

In the form of MLflow's own autologging: `disable`, `exclusive` and `silent` mean what they mean
there, `mlflow.autologging` tags the runs that are made, and a fault here only warns. What is
observed and how is said in watch.py, what is logged in sessions.py.
"""

from __future__ import annotations

import logging
from typing import Any

import mlflow
import mlflow.tracking.fluent as fluent
from mlflow.utils import autologging_utils
from mlflow.utils.autologging_utils import (
    autologging_integration,
    autologging_is_disabled,
    get_autologging_config,
)
from mlflow.utils.autologging_utils.safety import safe_patch

from mlflow_tula.integrations.facts import ObserverSettings
from mlflow_tula.integrations.loop import Loop
from mlflow_tula.integrations.machine import Layout
from mlflow_tula.integrations.sessions import LoopSession, Target, active_target
from mlflow_tula.integrations.watch import Watch

NAME = "tula"

_OUR_LOGGERS = ("mlflow_tula.integrations", "mlflow_tula.tracking")
_watch: Watch | None = None
_levels: dict[str, int] = {}


def autolog(*, disable: bool = False, silent: bool = False, **settings: Any) -> None:
    """Switch observation on, with new settings, or off (see `mlflow_tula.autolog`)."""
    checked = ObserverSettings(
        **{key: value for key, value in settings.items() if key != "exclusive"}
    )
    # Off first: MLflow itself returns early when it is to be switched off.
    _stop()
    _integration(disable=disable, silent=silent, exclusive=settings.get("exclusive", False))
    if not disable:
        _start(checked, silent=silent)


@autologging_integration(NAME)  # type: ignore[untyped-decorator, unused-ignore]
def _integration(disable: bool = False, silent: bool = False, exclusive: bool = False) -> None:
    """What MLflow keeps of us: the settings by which it answers, and patches that it can revert."""
    # A run that ends gets what belongs to it while it is still open.
    for where in (mlflow, fluent):
        safe_patch(NAME, where, "end_run", _end_run)


def _start(settings: ObserverSettings, *, silent: bool) -> None:
    global _watch
    if silent:
        for name in _OUR_LOGGERS:
            _levels[name] = logging.getLogger(name).level
            logging.getLogger(name).setLevel(logging.ERROR)
    _watch = Watch(settings, lambda loop: _make_session(loop, settings), enabled=_enabled)
    _watch.start()


def _stop() -> None:
    global _watch
    watch, _watch = _watch, None
    if watch is not None:
        watch.stop()
    for name, level in _levels.items():
        logging.getLogger(name).setLevel(level)
    _levels.clear()


def _make_session(loop: Loop, settings: ObserverSettings) -> LoopSession | None:
    """Only rank 0 logs."""
    layout = Layout()
    return LoopSession(loop, settings, _find_target, layout=layout) if layout.rank == 0 else None


def _find_target() -> Target:
    return active_target(exclusive=bool(get_autologging_config(NAME, "exclusive", False)))


def _enabled() -> bool:
    """Also off inside MLflow's own `disable_autologging()`."""
    return not (autologging_utils._AUTOLOGGING_GLOBALLY_DISABLED or autologging_is_disabled(NAME))


def _end_run(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Patch of `mlflow.end_run`."""
    run, watch = mlflow.active_run(), _watch
    if run is not None and watch is not None:
        watch.leave_run(run.info.run_id)
    return original(*args, **kwargs)
