"""Draws the pictures of docs/watching.md: what `ringfort dash` shows in Chromium, and `ringfort top` in a terminal.

Needs the extra `ui`, the packages playwright and pillow, and a Chromium of the system.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI

from ringfort.dashboard.picture import picture
from ringfort.dashboard.scene import Scene
from ringfort.dashboard.web.server import DashServer

if TYPE_CHECKING:
    from typing_extensions import Self

    from ringfort.telemetry.view import RunView

COLUMNS, LINES = 88, 24
WIDTH, HEIGHT = 1180, 900
"""Pixels of the window. What is below the timeline is cut off."""
FONTS = re.compile(r"@font-face \{\{.*?\}\}\s*", re.DOTALL)


class Still:
    """A `Source` that always shows the same view."""

    def __init__(self, view: RunView) -> None:
        self._view = view

    def view(self, run: str | None = None) -> RunView:
        """Return the view."""
        return self._view

    def log(self, rank: int, run: str | None = None) -> list[str]:
        """Return nothing: the ranks have printed nothing."""
        return []

    def close(self) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def draw(views: Mapping[str, RunView], folder: Path) -> None:
    """Write NAME.png and NAME.svg of each view."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, view in views.items():
        (folder / f"watching-{name}.svg").write_text(terminal(view), encoding="utf-8")
    _draw_pages(views, folder)


def terminal(view: RunView) -> str:
    """Return what `ringfort top` shows, as SVG."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, color_system="standard")
    for line in picture(Scene(view, waited=60.0), COLUMNS, LINES):
        console.print(line, no_wrap=True, overflow="ignore", crop=False)
    # Without fonts of another site.
    plain = FONTS.sub("", CONSOLE_SVG_FORMAT).replace("Fira Code, monospace", "monospace")
    return console.export_svg(title="ringfort top", theme=DIMMED_MONOKAI, code_format=plain)


def _draw_pages(views: Mapping[str, RunView], folder: Path) -> None:
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise FileNotFoundError("Chromium is needed for the pictures: apt-get install chromium")
    flags = ["--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=[*flags, *(["--no-sandbox"] if os.getuid() == 0 else [])]
        )
        for name, view in views.items():
            with Still(view) as source, DashServer(source, port=0) as server:
                page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
                page.goto(server.new_link())
                page.wait_for_selector("#status[data-state=live]")
                page.wait_for_selector("#figures .value:not(:empty)")
                page.wait_for_selector("#timeline-canvas canvas, #timeline-canvas svg")
                page.evaluate("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
                timeline = page.locator("section.timeline").bounding_box()
                assert timeline is not None
                bottom = timeline["y"] + timeline["height"] + 16
                shot = page.screenshot(clip={"x": 0, "y": 0, "width": WIDTH, "height": bottom})
                _write(shot, folder / f"watching-{name}.png")
                page.close()
        browser.close()


def _write(png: bytes, path: Path) -> None:
    """Write a picture with 256 colours: a third of the bytes, for a repository."""
    from PIL import Image

    with Image.open(BytesIO(png)) as picture:
        picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
