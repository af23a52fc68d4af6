"""The code blocks of the documents, for the test that runs them.

A block runs as it stands, in a program of its own. A comment in front of it, which readers do not see, says what it
needs beyond NumPy: `<!-- needs: torch -->`, `<!-- needs: torch, cuda -->`. Blocks that need what is not installed
are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_BLOCK = re.compile(r"^(?:<!-- needs: (?P<needs>[^>]*?) -->\n)?```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One block of Python."""

    where: str
    """Page and line, for people."""
    code: str
    needs: tuple[str, ...]


def blocks() -> Iterator[Block]:
    """Those of all pages, in order."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in _BLOCK.finditer(text):
            line = text.count("\n", 0, found.start("code")) + 1
            needs = tuple(part.strip() for part in (found["needs"] or "").split(",") if part.strip())
            yield Block(f"{page.relative_to(ROOT)}:{line}", found["code"], needs)
