"""What the callbacks of training frameworks share: a watch for the time of one `fit` or `train`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlflow_tula.integrations.facts import ObserverSettings
from mlflow_tula.integrations.loop import Loop
from mlflow_tula.integrations.machine import Layout
from mlflow_tula.integrations.sessions import LoopSession, Target
from mlflow_tula.integrations.watch import Watch


class CallbackWatch:
    """Observes the thread that trains, from `begin` to `end`; `mlflow_tula.autolog` steps back."""

    def __init__(self, settings: ObserverSettings, *, integration: str) -> None:
        """Nothing is observed before `begin`."""
        self._settings = settings
        self._integration = integration
        self._watch: Watch | None = None

    def begin(
        self,
        find_target: Callable[[], Target],
        *,
        known: Callable[[], dict[str, Any]],
        nodes: int | None = None,
    ) -> None:
        """Observe from now on.

        Args:
            find_target: the run to log to.
            known: fields of LoopFacts that the framework tells.
            nodes: how many there are, where the framework knows.
        """
        self.end("FAILED")  # a training that was broken off

        def make_session(loop: Loop) -> LoopSession:
            return LoopSession(
                loop,
                self._settings,
                find_target,
                layout=Layout(nodes=nodes),
                known=known,
                integration=self._integration,
            )

        self._watch = Watch(self._settings, make_session, one_thread=True)
        self._watch.start()

    def pause(self) -> None:
        """An evaluation: the interval is not a step's alone."""
        if self._watch is not None:
            self._watch.pause()

    def end(self, status: str = "FINISHED") -> None:
        """Send what is left, and observe no more."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop(status)

    def __getstate__(self) -> dict[str, Any]:
        """Frameworks copy and store their callbacks: the settings go along, never the threads."""
        return {**self.__dict__, "_watch": None}
