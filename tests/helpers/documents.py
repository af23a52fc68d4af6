"""The code blocks of the documents, for the test that runs them.

A block runs as it stands, in a program of its own. A comment in front of it, which readers do not see, says what it
needs beyond NumPy: `<!-- needs: torch -->`, `<!-- needs: torch, cuda -->`. Blocks that need what is not installed
are left out, and named. Those that start ranks themselves need a cluster, and the tests that have one run them.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_BLOCK = re.compile(r"^(?:<!-- needs: (?P<needs>[^>]*?) -->\n)?```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(
    r"^(?P<fence> *(?:```+|~~~+)) *(?P<word>[\w{.]*)[^\n]*\n(?P<text>.*?)^(?P=fence) *$", re.MULTILINE | re.DOTALL
)

PACKAGES = ("torch", "accelerate", "lightning", "transformers")
CLUSTERS = ("a Ray cluster", "a Dask cluster")
"""Blocks of these are run by tests/integration/test_ray.py and test_dask.py."""
NEEDS = (*PACKAGES, "cuda", *CLUSTERS)


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


def python_fences(text: str) -> Iterator[str]:
    """The text of every fenced block of a page that says Python, or that says nothing and is Python."""
    for found in _FENCE.finditer(text):
        if found["word"] in ("python", "py") or (not found["word"] and _is_python(found["text"])):
            yield found["text"]


def _is_python(text: str) -> bool:
    """Whether it is a program, and not just something that has the same grammar, such as one word."""
    try:
        nodes = list(ast.walk(ast.parse(textwrap.dedent(text))))
    except SyntaxError:
        return False
    return any(isinstance(node, ast.Import | ast.ImportFrom | ast.Call | ast.Assign) for node in nodes)
