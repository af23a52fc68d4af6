"""The files of the page, read once: what is not in this table cannot be asked for."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Page(NamedTuple):
    """A file as it is served."""

    data: bytes
    media_type: str


@cache
def pages() -> dict[str, Page]:
    """All files by path, such as `app.js` and `uplot/uPlot.esm.js`."""
    return dict(_files(resources.files("ringfort.dashboard.web") / "static", ""))


def _files(folder: Traversable, before: str) -> list[tuple[str, Page]]:
    found: list[tuple[str, Page]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _files(entry, f"{before}{entry.name}/")
        elif (suffix := entry.name[entry.name.rfind(".") :]) in TYPES:
            found.append((f"{before}{entry.name}", Page(entry.read_bytes(), TYPES[suffix])))
    return found
