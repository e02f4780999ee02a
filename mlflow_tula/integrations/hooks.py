"""A module hook that a copied or stored model does not drag along."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any


class Hook:
    """Calls `notice(module, args, kwargs or output)`, and never breaks the module's call.

    A copy or a pickle of the model holds `contextlib.nullcontext().__exit__` in its place, which
    takes three arguments and does nothing: the model loads where this package is not installed.
    """

    def __init__(self, notice: Callable[[Any, Any, Any], None]) -> None:
        """Take what is to be called."""
        self._notice = notice

    def __call__(self, module: Any, args: Any, more: Any) -> None:
        """Torch's signature of a forward pre-hook with keywords, and of a forward hook."""
        with contextlib.suppress(Exception):
            self._notice(module, args, more)

    def __reduce__(self) -> tuple[Any, ...]:
        """What is stored instead."""
        return getattr, (contextlib.nullcontext(), "__exit__")
