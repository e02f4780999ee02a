"""Put made tables into a page: the text between `<!-- NAME -->` and `<!-- /NAME -->` is replaced.

python docs/sections.py docs/accuracy.md published=build/accuracy.md knee=build/knee.md
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


def put(page: str, name: str, text: str) -> str:
    """The page with one section replaced; a page without its marks is an error."""
    marks = re.compile(
        rf"(<!-- {re.escape(name)} -->\n).*?(<!-- /{re.escape(name)} -->)", re.DOTALL
    )
    if not marks.search(page):
        raise SystemExit(
            f"the page has no section {name!r}: add <!-- {name} --> and <!-- /{name} -->"
        )
    return marks.sub(lambda found: f"{found[1]}\n{text.strip()}\n\n{found[2]}", page)


def main() -> None:
    """Replace each section named on the command line."""
    page = Path(sys.argv[1])
    text = page.read_text()
    for word in sys.argv[2:]:
        name, _, source = word.partition("=")
        text = put(text, name, Path(source).read_text())
    page.write_text(text)


if __name__ == "__main__":
    main()
