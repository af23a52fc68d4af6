"""A real browser for these tests: Chromium, driven by Playwright. `make integration` says what is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    # Without these it asks the internet for updates, beside what the page asks for.
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Frames as on a screen, whatever the machine does beside.
    "--disable-background-timer-throttling",
    "--disable-renderer-backgrounding",
    *(["--no-sandbox"] if os.getuid() == 0 else []),
]
PICTURES = Path(__file__).parents[2] / "build" / "pictures"
"""Where screenshots are left, to be looked at."""
AXE = Path(__file__).parent / "axe" / "axe.min.js"


# Not for the whole session: Playwright keeps an event loop running in this thread, and Jupyter's client starts threads
# where one runs.
@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if find_spec("playwright") is None:
        pytest.skip("needs Playwright: pip install playwright (`make integration` does it)")
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, ThreadPoolExecutor(1) as files:
        # One thread for files, which starts here: another one would count as left behind by the test that needs it.
        playwright._impl_obj._loop.set_default_executor(files)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page()
        page.screenshot(path=tmp_path_factory.mktemp("browser") / "first.png")
        page.close()
        yield browser
        browser.close()


class Faults(list[str]):
    """What the page complained about: errors, also of the content policy, and requests to other hosts."""

    def watch(self, page: Page) -> None:
        page.on("pageerror", lambda error: self.append(f"error: {error}"))
        page.on("console", lambda said: self.append(said.text) if said.type in ("error", "warning") else None)

        def asked(request: Any) -> None:
            if not request.url.startswith(("http://127.0.0.1:", "blob:", "data:", "file:")):
                self.append(f"asked {request.url}")

        page.on("request", asked)


@pytest.fixture
def faults() -> Iterator[Faults]:
    found = Faults()
    yield found
    # A server that ends or refuses is what some tests are about, and the browser says so.
    usual = ("ERR_", "status of 401", "status of 403")
    real = [fault for fault in found if not any(word in fault for word in usual)]
    assert real == []


@pytest.fixture
def new_page(browser: Browser, faults: Faults) -> Iterator[Callable[..., Page]]:
    """Makes pages, each in a browser of its own: no cookie is shared."""
    contexts: list[Any] = []

    def make(**options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1440, "height": 1000}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        faults.watch(page)
        return page

    yield make
    for context in contexts:
        context.close()


def picture(page: Page, name: str) -> None:
    """Leave a screenshot."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png", full_page=True)


def faults_by_axe(page: Page) -> list[str]:
    """What axe finds: how bad it is, which rule, and where."""
    page.evaluate(AXE.read_text())
    found = page.evaluate("async () => (await axe.run()).violations")
    return [f"{one['impact']}: {one['id']}: {one['nodes'][0]['html']}" for one in found]


def reached_by_tab(page: Page) -> list[str]:
    """Go through all controls with the Tab key, and return their names. Each must be reached in its turn, and show that
    it has the focus."""
    controls = (
        "[...document.querySelectorAll('a[href], button, input, select, summary, [tabindex=\"0\"]')]"
        ".filter((node) => node.checkVisibility())"
    )
    names: list[str] = []
    for place in range(page.evaluate(f"() => {controls}.length")):
        page.keyboard.press("Tab")
        reached, name, is_seen = page.evaluate(
            "() => { const node = document.activeElement; const ring = node.querySelector(':scope.node > circle');"
            " const isSeen = getComputedStyle(node).outlineStyle !== 'none'"
            " || (ring && getComputedStyle(ring).strokeWidth === '4px');"
            f" return [{controls}.indexOf(node), node.id || node.outerHTML.slice(0, 100), isSeen]; }}"
        )
        assert reached == place, f"{name} is reached as number {place}"
        assert is_seen, f"{name} has the focus, and it cannot be seen"
        names.append(name)
    return names
