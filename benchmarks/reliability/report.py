"""The table of the reliability campaign, from the JSON lines that its parts wrote.

    python benchmarks/reliability/report.py [--folder build/reliability] [--markdown FILE]

Prints faults injected, survived, lost; inputs tried, crashes; checks. Exits 1 where something was
lost, where a part broke off, or where there is nothing to report.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from facts import FOLDER, Outcome

HEADS = {
    "fault": ("faults", "injected", "survived", "lost"),
    "input": ("inputs", "tried", "handled", "crashes"),
    "check": ("checks", "made", "passed", "failed"),
}
_MOST_DETAILS = 3


@dataclass(kw_only=True)
class Part:
    """What one file holds."""

    name: str
    header: dict[str, Any] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float | None = None
    broken: str = ""


def read(path: Path) -> Part:
    """One part's file; a last line that was cut off counts as a part that broke."""
    part = Part(name=path.stem)
    for line in path.read_text().splitlines():
        try:
            document = json.loads(line)
        except ValueError:
            part.broken = "a line of its file is cut off"
            continue
        if document.pop("header", False):
            part.header = document
        elif document.pop("end", False):
            part.seconds, part.broken = document["seconds"], document["broken"]
        else:
            part.outcomes.append(Outcome(**document))
    if part.seconds is None and not part.broken:
        part.broken = "it did not come to its end"
    return part


def tables(parts: list[Part]) -> str:
    """One Markdown table a kind, a row a case, with sums."""
    texts = []
    for kind, (title, *columns) in HEADS.items():
        rows: dict[tuple[str, str], list[Outcome]] = {}
        for part in parts:
            for one in part.outcomes:
                if one.kind == kind:
                    rows.setdefault((one.part, one.case), []).append(one)
        if not rows:
            continue
        lines = [f"| {title} | {' | '.join(columns)} | |", "|---|---:|---:|---:|---|"]
        for (part_name, case), found in rows.items():
            lines.append(f"| {part_name}: {case} | {_sums(found)} | {_details(found)} |")
        lines.append(f"| **all** | {_sums([one for found in rows.values() for one in found])} | |")
        texts.append("\n".join(lines))
    return "\n\n".join(texts)


def _sums(found: list[Outcome]) -> str:
    counts = (sum(getattr(one, name) for one in found) for name in ("injected", "survived", "lost"))
    return " | ".join(f"{count:,}" for count in counts)


def _details(found: list[Outcome]) -> str:
    """What was lost; else what a single outcome has to say."""
    lost = [one.detail for one in found if one.lost and one.detail]
    shown = lost or ([found[0].detail] if len(found) == 1 else [])
    more = f" and {len(lost) - _MOST_DETAILS} more" if len(lost) > _MOST_DETAILS else ""
    text = "; ".join(dict.fromkeys(shown[:_MOST_DETAILS])) + more
    return text.replace("|", "/").replace("\n", " ")


def conditions(parts: list[Part]) -> str:
    """When, how long and on what; parts may come from different days."""
    lines = []
    for part in parts:
        head = part.header
        took = "broken off" if part.seconds is None else f"{part.seconds:,.0f} s"
        seed = "" if head.get("seed") is None else f", seed {head['seed']}"
        short = ", short" if head.get("short") else ""
        end = f" **broke off: {part.broken}**" if part.broken else ""
        lines.append(f"- {part.name}: {head.get('date', '?')}, {took}{seed}{short}{end}")
    head = parts[-1].header
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    lines.append(f"- {head['machine']}; Python {head['python']}, {versions}")
    return "\n".join(lines)


def main() -> int:
    """Print the report; 1 where something was lost or missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    parts = [read(path) for path in sorted(arguments.folder.glob("*.jsonl"))]
    if not parts:
        print(f"nothing in {arguments.folder}: run `make reliability` first", file=sys.stderr)
        return 1
    text = f"{tables(parts)}\n\n{conditions(parts)}\n"
    print(text)
    if arguments.markdown is not None:
        arguments.markdown.write_text(text)
    lost = sum(one.lost for part in parts for one in part.outcomes)
    return int(lost > 0 or any(part.broken for part in parts))


if __name__ == "__main__":
    sys.exit(main())
