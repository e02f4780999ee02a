"""Units, lists and open words of the command line."""

from __future__ import annotations

import click
import pytest

from mlflow_tula.cli import types


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (types.duration("6h"), "90", 90.0),
        (types.duration("6h"), "1.5h", 5400.0),
        (types.duration("6h"), "2 min", 120.0),
        (types.num_bytes("1GiB"), "1GiB", 2**30),
        (types.num_bytes("1GiB"), "1.5 GB", 1_500_000_000),
        (types.num_bytes("1GiB"), "4096", 4096),
        (types.count("3"), "1e3", 1000),
        (types.count("3", open_word="auto"), "auto", None),
        (types.real("0.1"), "1e-1", 0.1),
        (types.Listed(example="1,2"), "32, 8,8", (8, 32)),
        (types.Listed(example="1,2"), "auto", None),
        (types.OpenText("none"), "none", None),
        (types.OpenText("none"), "a path", "a path"),
        # `mlflow run` logs values shell-quoted and passes them so on some platforms.
        (types.count("3"), "'3'", 3),
    ],
)
def test_text_becomes_a_number_in_si_units(
    kind: click.ParamType, text: str, expected: object
) -> None:
    assert kind.convert(text, None, None) == expected


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (types.duration("6h"), "0"),
        (types.duration("6h"), "-3s"),
        (types.duration("6h"), "3 parsecs"),
        (types.num_bytes("1GiB"), "0.5"),
        (types.num_bytes("1GiB"), "1..5GB"),
        (types.count("3"), "2.5"),
        (types.count("3"), "0"),
        (types.count("3"), "nan"),
        (types.count("3"), "auto"),
        (types.real("0.1"), "inf"),
        (types.Listed(example="1,2"), "8,,32"),
        (types.Listed(example="1,2"), "8,-1"),
        (types.Listed(example="1,2"), "eight"),
        (types.Listed(example="1,2"), ""),
    ],
)
def test_bad_text_names_the_value_and_an_example(kind: click.ParamType, text: str) -> None:
    with pytest.raises(click.BadParameter, match="for example"):
        kind.convert(text, None, None)
