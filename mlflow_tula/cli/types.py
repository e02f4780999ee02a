"""Click parameter types: numbers with units, lists, and words that mean "let the machine tell".

MLproject parameters cannot be empty (MLflow shows an empty default as `''`), so options that may
stay open take the word `auto` (the machine finds it) or `none` (not used); both become None.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import click

_BYTE_UNITS = {"": 1, "b": 1}
_BYTE_UNITS |= {f"{p}b": 1000**n for n, p in enumerate("kmgt", start=1)}
_BYTE_UNITS |= {f"{p}ib": 1024**n for n, p in enumerate("kmgt", start=1)}
_TIME_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


class Quantity(click.ParamType[Any]):
    """A finite number above `minimum`, with an optional unit; `open_word` stands for None."""

    def __init__(
        self,
        name: str,
        *,
        units: dict[str, float] | None = None,
        example: str,
        minimum: float = 0.0,
        strict: bool = True,
        whole: bool = False,
        open_word: str | None = None,
    ) -> None:
        """Describe the type; `example` is what an error message shows as right."""
        self.name = name
        self.units = units or {"": 1.0}
        self.example = example
        self.minimum = minimum
        self.strict = strict
        self.whole = whole
        self.open_word = open_word

    def convert(self, value: Any, param: Any, ctx: Any) -> float | int | None:
        """Text to number in SI units, or None for the open word."""
        if value is None or isinstance(value, (int, float)):
            return value
        text = str(value).strip().strip("'\"").lower()
        if self.open_word is not None and text == self.open_word:
            return None
        match = re.fullmatch(r"([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)\s*([a-z]*)", text)
        if match is None or match[2] not in self.units:
            self.fail(f"{value!r} is not {self._rule()}", param, ctx)
        try:
            number = float(match[1]) * self.units[match[2]]
        except ValueError:
            self.fail(f"{value!r} is not {self._rule()}", param, ctx)
        if number < self.minimum or (self.strict and number == self.minimum) or number > 1e18:
            self.fail(f"{value!r} is not {self._rule()}", param, ctx)
        if self.whole:
            if number != int(number):
                self.fail(f"{value!r} is not {self._rule()}", param, ctx)
            return int(number)
        return number

    def _rule(self) -> str:
        bound = "above" if self.strict else "of at least"
        kind = "a whole number" if self.whole and len(self.units) == 1 else "a number"
        unit = f" with a unit of {', '.join(u for u in self.units if u)}" * (len(self.units) > 1)
        word = f", or {self.open_word}" if self.open_word else ""
        return f"{kind} {bound} {self.minimum:g}{unit} (for example {self.example}{word})"


class Listed(click.ParamType[Any]):
    """A comma-separated list of positive whole numbers, sorted and without repeats."""

    def __init__(self, *, example: str, open_word: str | None = "auto") -> None:
        """Take the example that an error message shows, and the word that means None."""
        self.name = "list"
        self.example = example
        self.open_word = open_word

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...] | None:
        """Text to a tuple of ints, or None for the open word."""
        if value is None or isinstance(value, tuple):
            return value
        text = str(value).strip().strip("'\"").lower()
        if self.open_word is not None and text == self.open_word:
            return None
        numbers = []
        for part in text.split(","):
            if not re.fullmatch(r"\s*[0-9]{1,12}\s*", part) or int(part) < 1:
                word = f", or {self.open_word}" if self.open_word else ""
                self.fail(
                    f"{part.strip()!r} in {value!r} is not a whole number of at least 1 "
                    f"(for example {self.example}{word})",
                    param,
                    ctx,
                )
            numbers.append(int(part))
        return tuple(sorted(set(numbers)))


class Words(click.ParamType[Any]):
    """A comma-separated list of words out of a few, in their order; `none` becomes None."""

    name = "words"

    def __init__(self, *known: str) -> None:
        """Take the words that exist."""
        self.known = known

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str | None, ...]:
        """Text to a tuple of words."""
        if isinstance(value, tuple):
            return value
        asked = [part.strip().lower() for part in str(value).strip("'\" ").split(",")]
        for part in asked:
            if part not in self.known:
                self.fail(f"{part!r} is not one of {', '.join(self.known)}", param, ctx)
        return tuple(None if word == "none" else word for word in self.known if word in asked)


class Assignments(click.ParamType[Any]):
    """Settings as `name=value,name=value`; `none` becomes an empty dict."""

    name = "settings"

    def convert(self, value: Any, param: Any, ctx: Any) -> dict[str, Any]:
        """Text to a dict of numbers, true, false, none (the default) or words."""
        if isinstance(value, dict):
            return value
        text = str(value).strip().strip("'\"")
        if text in ("none", ""):
            return {}
        found: dict[str, Any] = {}
        for part in text.split(","):
            name, equals, given = (piece.strip() for piece in part.partition("="))
            if not (name and equals and given) or name in found:
                self.fail(
                    f"{part.strip()!r} must be one name=value a setting, each once (for example "
                    "max_norm=0.5,warmup_epochs=2)",
                    param,
                    ctx,
                )
            found[name] = _value(given)
        return found


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


class Split(click.ParamType[Any]):
    """Local batch sizes rank by rank, in their order; `off` becomes (), `auto` the word itself."""

    name = "split"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...] | str:
        """Text to a tuple of whole numbers, or to one of the words."""
        if isinstance(value, tuple):
            return value
        text = str(value).strip().strip("'\"").lower()
        if text in ("off", "none", "false"):
            return ()
        if text == "auto":
            return "auto"
        parts = [part.strip() for part in text.split(",")]
        if len(parts) < 2 or not all(re.fullmatch(r"[0-9]{1,12}", part) for part in parts):
            self.fail(
                f"{value!r} is not off, auto, or one local batch size a rank (for example 8,24)",
                param,
                ctx,
            )
        return tuple(int(part) for part in parts)


class Text(click.ParamType[Any]):
    """Text that is not empty: `-P model=` is a slip, and so is a variable that the shell lacks."""

    name = "text"

    def convert(self, value: Any, param: Any, ctx: Any) -> str | None:
        """The text, without blanks around it."""
        text = str(value).strip()
        if text.strip("'\"") == "":
            self.fail(f"{value!r} is empty: give a value, or leave the option out", param, ctx)
        return text


class Switch(click.types.BoolParamType):
    """True or false; click takes an empty text for false."""

    def convert(self, value: Any, param: Any, ctx: Any) -> bool:
        """The word as a bool."""
        if isinstance(value, str) and not value.strip("'\" "):
            self.fail(f"{value!r} is empty: give true or false", param, ctx)
        return super().convert(value, param, ctx)


class OpenText(Text):
    """Text, where one word (`auto` or `none`) stands for None."""

    def __init__(self, open_word: str) -> None:
        """Take the word that means None."""
        self.open_word = open_word

    def convert(self, value: Any, param: Any, ctx: Any) -> str | None:
        """The text itself, or None for the open word."""
        text = super().convert(value, param, ctx)
        return None if text == self.open_word else text


def count(example: str, *, open_word: str | None = None, minimum: int = 1) -> Quantity:
    """A whole number of at least `minimum`."""
    return Quantity(
        "int", example=example, minimum=minimum, strict=False, whole=True, open_word=open_word
    )


def real(
    example: str, *, open_word: str | None = None, minimum: float = 0.0, strict: bool = True
) -> Quantity:
    """A plain number."""
    return Quantity("float", example=example, minimum=minimum, strict=strict, open_word=open_word)


def duration(example: str, *, open_word: str | None = None) -> Quantity:
    """Seconds, or a number with s, m, h or d."""
    return Quantity("duration", units=_TIME_UNITS, example=example, open_word=open_word)


def num_bytes(example: str, *, open_word: str | None = None) -> Quantity:
    """Bytes, or a number with KB ... TB or KiB ... TiB."""
    units = {unit: float(factor) for unit, factor in _BYTE_UNITS.items()}
    return Quantity("bytes", units=units, example=example, whole=True, open_word=open_word)


def bandwidth(example: str, *, open_word: str | None = None) -> Quantity:
    """Bytes a second: a number of bits (Gbit, Gbps) or bytes (GB) a second."""
    units: dict[str, float] = {}
    for power, prefix in enumerate(("", "k", "m", "g", "t")):
        units |= {f"{prefix}{word}": 1000.0**power / 8 for word in ("bit", "bps")}
        units |= {f"{prefix}b": 1000.0**power}
    return Quantity("bandwidth", units=units, example=example, open_word=open_word)


def latency(example: str, *, open_word: str | None = None) -> Quantity:
    """Seconds, or a number with ns, us, ms or s."""
    units = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
    return Quantity("latency", units=units, example=example, strict=False, open_word=open_word)


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def switch(name: str, *, default: bool, text: str) -> Decorator:
    """A boolean option that MLproject can pass a value to: `--x`, `--x true` or `--x false`."""
    return click.option(
        name,
        type=Switch(),
        is_flag=False,
        flag_value="true",
        default=str(default).lower(),
        show_default=True,
        metavar="[true|false]",
        help=text,
    )
