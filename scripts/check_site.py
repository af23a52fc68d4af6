"""Check the built site: links arrive, public names have a place, and nothing is loaded from elsewhere."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
SURFACE = ROOT / "tests" / "helpers" / "surface.txt"
_LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""Tags that make a browser load something."""


class _Page(HTMLParser):
    """What a page links to, what it loads, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag."""
        found = dict(attrs)
        self.anchors.update(value for name in ("id", "name") if (value := found.get(name)))
        if tag == "a" and (target := found.get("href")) is not None:
            self.links.append(target)
        if (target := found.get(_LOADED.get(tag, ""))) and found.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(target)


def faults(site: Path) -> Iterator[str]:
    """Everything that is wrong with a site."""
    pages = {path: _Page(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links are from the root of the host
        where = path.relative_to(site)
        yield from (f"{where}: loads {target}" for target in page.loaded if urlsplit(target).netloc)
        for target in {*page.links, *page.loaded}:
            if fault := _link_fault(page, target, pages):
                yield f"{where}: {fault}: {target}"
    for path in sorted(site.rglob("*.css")):
        for target in re.findall(r"url\(['\"]?(?!data:|#)([^)'\"]+)", path.read_text(encoding="utf-8")):
            if urlsplit(target).netloc or target.startswith("//"):
                yield f"{path.relative_to(site)}: loads {target}"
    known = documented(site)
    yield from (f"no place in the API reference: {name}" for name in public_names() if name not in known)


def _link_fault(page: _Page, target: str, pages: dict[Path, _Page]) -> str | None:
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return None
    aim = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
    aim = aim / "index.html" if aim.is_dir() else aim
    if not aim.exists():
        return "no such file"
    anchor = unquote(parts.fragment)
    if anchor and aim in pages and anchor not in pages[aim].anchors:
        return "no such anchor"
    return None


def documented(site: Path) -> frozenset[str]:
    """The Python names that have an anchor, from the inventory that other sites link by."""
    data = (site / "objects.inv").read_bytes()
    lines = zlib.decompress(data.split(b"\n", 4)[4]).decode().splitlines()
    return frozenset(line.split(" py:")[0] for line in lines)


def public_names() -> list[str]:
    """Names and members in the frozen surface (tests/helpers/surface.py)."""
    lines = SURFACE.read_text(encoding="utf-8").splitlines()
    return [line.partition("(")[0] for line in lines if line.startswith("ringfort.")]
