"""Which batches a thread draws from torch's data loaders, and when it starts a new pass over one.

`DataLoader.__iter__` and the `__next__` of its iterators are replaced while somebody watches, and
put back afterwards. An evaluation shows as a new pass, or as batches drawn without gradients; both
tell that the interval between two training steps was no step's alone. `torch.jit.script` is
replaced as well: it compiles the hooks of a module along, and so has to find none of ours.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter


class LoaderListener(Protocol):
    """Who wants to know; called in the thread that draws, and must not raise."""

    def on_pass(self, loader: Any) -> None:
        """A new pass over a loader begins."""

    def on_batch(self, batch: Any) -> None:
        """A batch was drawn."""

    def on_script(self) -> None:
        """A module is about to be scripted."""


@dataclass(frozen=True, slots=True)
class _Patch:
    """One replaced function of torch."""

    owner: Any
    name: str
    original: Callable[..., Any]
    replacement: Callable[..., Any]

    def put(self) -> None:
        """Put the replacement in."""
        setattr(self.owner, self.name, self.replacement)

    def restore(self) -> None:
        """Put torch's function back, unless somebody has replaced ours since: ours then idles."""
        if self.owner.__dict__.get(self.name) is self.replacement:
            setattr(self.owner, self.name, self.original)


_lock = threading.Lock()
_listeners: tuple[LoaderListener, ...] = ()
_patches: tuple[_Patch, ...] = ()


def listen(listener: LoaderListener) -> None:
    """Tell a listener of every pass and batch from now on."""
    global _listeners, _patches
    with _lock:
        _listeners = (*_listeners, listener)
        if not _patches:
            _patches = (
                _patch(DataLoader, "__iter__", _iterating),
                _patch(_BaseDataLoaderIter, "__next__", _drawing),
                _patch(torch.jit, "script", _scripting),
            )
            for patch in _patches:
                patch.put()


def leave(listener: LoaderListener) -> None:
    """Tell it no more; the last one to leave puts torch's own functions back."""
    global _listeners, _patches
    with _lock:
        _listeners = tuple(one for one in _listeners if one is not listener)
        if not _listeners:
            for patch in _patches:
                patch.restore()
            _patches = ()


def _patch(owner: Any, name: str, wrap: Callable[[Any], Any]) -> _Patch:
    original = owner.__dict__[name]
    return _Patch(owner, name, original, functools.wraps(original)(wrap(original)))


def _iterating(original: Callable[..., Any]) -> Callable[..., Any]:
    def iterate(self: DataLoader[Any]) -> Any:
        for listener in _listeners:
            listener.on_pass(self)
        return original(self)

    return iterate


def _drawing(original: Callable[..., Any]) -> Callable[..., Any]:
    def draw(self: Any) -> Any:
        batch = original(self)
        if torch.is_grad_enabled():
            for listener in _listeners:
                listener.on_batch(batch)
        return batch

    return draw


def _scripting(original: Callable[..., Any]) -> Callable[..., Any]:
    def script(
        obj: Any, optimize: Any = None, _frames_up: int = 0, *args: Any, **kwargs: Any
    ) -> Any:
        for listener in _listeners:
            listener.on_script()
        # It looks names up in its caller's frame, which is one further away now.
        return original(obj, optimize, _frames_up + 1, *args, **kwargs)

    return script
