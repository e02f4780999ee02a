"""Finds the training loops of a process, by torch's own optimizer hooks, and keeps their time.

A `Watch` is on from `start` to `stop`. Each thread has at most one loop at a time; what a loop
showed goes to its session (sessions.py), at once to memory and from a thread of the watch to
MLflow. A fault in here ends the observation of that loop with one warning, and never the training.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mlflow_tula.integrations import loader_watch
from mlflow_tula.integrations.facts import ObserverSettings
from mlflow_tula.integrations.loop import Loop, describe_loader
from mlflow_tula.integrations.model_calls import count_samples

_logger = logging.getLogger(__name__)

FLUSH_EVERY_S = 10.0
_MOST_DRAWN = 4096
_JOIN_S = 30.0
_claimed: set[int] = set()


class Session(Protocol):
    """Where a loop's numbers go."""

    loop: Loop

    def tick(self) -> None:
        """A step has begun; called in the training thread, must return at once."""

    def flush(self) -> None:
        """Send what there is; called in the watch's thread."""

    def finish(self, status: str) -> None:
        """Send the rest; the loop is over."""

    def leave_run(self, run_id: str) -> None:
        """A run ends: send what belongs to it, if this is the run that is logged to."""


class _Thread:
    """What one thread does."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.broken: weakref.ref[Optimizer] | None = None
        self.data: dict[str, Any] = {}
        self.drawn: list[int] = []
        self.paused = False


class Watch:
    """Observes the training loops of this process, or of one thread."""

    def __init__(
        self,
        settings: ObserverSettings,
        make_session: Callable[[Loop], Session | None],
        *,
        enabled: Callable[[], bool] = lambda: True,
        one_thread: bool = False,
    ) -> None:
        """Prepare; nothing is registered before `start`.

        Args:
            settings: how often to look.
            make_session: where a new loop's numbers go; None: the loop is left alone.
            enabled: asked at every step.
            one_thread: only loops of the thread that makes the watch.
        """
        self.settings = settings
        self._make_session = make_session
        self._enabled = enabled
        self._only = threading.get_ident() if one_thread else None
        self._local = threading.local()
        self._sessions: list[Session] = []
        self._lock = threading.RLock()
        self._leave = threading.Event()
        self._worker: threading.Thread | None = None
        self._handles: list[Any] = []
        self._pid = os.getpid()

    def start(self) -> None:
        """Register with torch."""
        # A step that is compiled calls them from outside: torch itself breaks its graph there.
        outside: Any = torch.compiler.disable
        before, after = outside(self._before), outside(self._after)
        self._handles = [
            register_optimizer_step_pre_hook(before),
            register_optimizer_step_post_hook(after),
        ]
        loader_watch.listen(self)
        if self._only is not None:
            _claimed.add(self._only)
        # Runs before MLflow's own, which was registered earlier.
        atexit.register(self._at_exit)

    def stop(self, status: str = "FINISHED") -> None:
        """Take every hook off again, and send what is left."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        loader_watch.leave(self)
        if self._only is not None:
            _claimed.discard(self._only)
        atexit.unregister(self._at_exit)
        self._leave.set()
        for session in self._open_sessions():
            self._close(session, status)
        worker = self._worker
        if worker is not None and worker is not threading.current_thread():
            # A thread that is still there when the interpreter goes may take it down with it.
            worker.join(timeout=_JOIN_S)

    def pause(self) -> None:
        """Something else than training happens in this thread now: an evaluation."""
        self._state().paused = True

    def leave_run(self, run_id: str) -> None:
        """A run is about to end: send what belongs to it."""
        for session in self._open_sessions():
            session.leave_run(run_id)

    def _open_sessions(self) -> list[Session]:
        with self._lock:
            return list(self._sessions)

    def _close(self, session: Session, status: str = "FINISHED") -> None:
        """End a session, once, whoever comes first."""
        with self._lock:
            if session not in self._sessions:
                return
            self._sessions.remove(session)
        session.loop.release()
        try:
            session.finish(status)
        except Exception as error:
            _logger.warning("the end of a training loop was not logged: %s", error)

    # Called by torch's data loaders.

    def on_pass(self, loader: Any) -> None:
        """A new pass over a loader: what the thread trains with, or an evaluation."""
        if not self._handles:
            return
        state = self._state()
        state.paused = True
        try:
            state.data = describe_loader(loader)
        except Exception as error:
            _logger.debug("a loader of unknown kind: %s", error)

    def on_batch(self, batch: Any) -> None:
        """A batch for the coming step."""
        state = self._state()
        try:
            found = count_samples(batch)
        except Exception as error:
            _logger.debug("a batch of unknown kind: %s", error)
            return
        if found is not None and len(state.drawn) < _MOST_DRAWN:
            state.drawn.append(found[0])

    def on_script(self) -> None:
        """A module is about to be scripted, which a hook of ours would stop."""
        for session in self._open_sessions():
            session.loop.release()

    # Called by torch's optimizers.

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Global pre-hook of every `Optimizer.step`."""
        if not self._enabled() or not self._concerned():
            return
        if self._pid != os.getpid():
            self._after_fork()
        state = self._state()
        try:
            session = self._session_of(state, optimizer)
            if session is None:
                return
            drawn, paused = tuple(state.drawn), state.paused
            state.drawn.clear()
            state.paused = False
            session.loop.begin_step(drawn, paused=paused, closure=_has_closure(args, kwargs))
            session.tick()
        except Exception as error:
            self._fault(state, optimizer, error)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Global post-hook."""
        state = self._state()
        session = state.session
        if session is None or session.loop.optimizer() is not optimizer:
            return
        try:
            session.loop.end_step(closure=_has_closure(args, kwargs))
        except Exception as error:
            self._fault(state, optimizer, error)

    def _concerned(self) -> bool:
        """Whether this thread is to be observed; a callback's watch has its thread to itself."""
        thread = threading.get_ident()
        return thread == self._only if self._only is not None else thread not in _claimed

    def _at_exit(self) -> None:
        self.stop(exit_status())

    def _state(self) -> _Thread:
        try:
            state: _Thread = self._local.state
        except AttributeError:
            state = self._local.state = _Thread()
        return state

    def _session_of(self, state: _Thread, optimizer: Optimizer) -> Session | None:
        """The session whose step this is; None for a step within another optimizer's loop."""
        session = state.session
        if session is not None:
            if session.loop.optimizer() is optimizer:
                return session
            if session.loop.claims(optimizer):
                return None
            state.session = None
            self._close(session)
        if state.broken is not None and state.broken() is optimizer:
            return None
        # A loop that draws nothing trains on other data than what was passed over last.
        data = state.data if state.drawn else {}
        session = self._make_session(Loop(optimizer, self.settings, data))
        if session is None:
            # Asked again when another optimizer steps; not at every step of this one.
            state.broken = weakref.ref(optimizer)
            return None
        with self._lock:
            self._sessions.append(session)
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="tula-watch", daemon=True)
                self._worker.start()
        state.session = session
        return session

    def _fault(self, state: _Thread, optimizer: Optimizer, error: Exception) -> None:
        """Warn once, and leave this loop alone from now on."""
        _logger.warning(
            "tula stops observing this training loop (the training goes on): %s: %s",
            type(error).__name__,
            error,
        )
        _logger.debug("where", exc_info=error)
        session, state.session = state.session, None
        state.broken = weakref.ref(optimizer)
        if session is not None:
            self._close(session)

    def _work(self) -> None:
        """Send at intervals; end the sessions whose optimizer is gone."""
        while not self._leave.wait(FLUSH_EVERY_S):
            for session in self._open_sessions():
                if session.loop.over:
                    self._close(session)
                    continue
                try:
                    session.flush()
                except Exception as error:
                    _logger.warning("a training loop was not logged just now: %s", error)

    def _after_fork(self) -> None:
        """In a forked child: the parent's sessions and threads are not here."""
        from multiprocessing import util

        self._pid = os.getpid()
        self._sessions, self._worker = [], None
        self._lock, self._leave = threading.RLock(), threading.Event()
        self._local = threading.local()
        # A forked child leaves without the interpreter's own exit functions.
        util.Finalize(None, self.stop, exitpriority=10)


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Whether `step(closure)` was called; args begins with the optimizer."""
    return (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None


def exit_status() -> str:
    """How the program ends, as far as the interpreter tells: what was raised and not caught."""
    if hasattr(sys, "ps1"):  # interactive: the last error may be an hour old
        return "FINISHED"
    error = getattr(sys, "last_value", None)
    if error is None:
        return "FINISHED"
    return "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
