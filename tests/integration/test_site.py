"""The documentation site in a real browser: it is read and searched offline, from a server and from a disk."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

import pytest

from tests.helpers.documents import ROOT
from tests.integration.conftest import faults_by_axe, picture

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [
    pytest.mark.skipif(
        find_spec("zensical") is None, reason="needs Zensical: pip install zensical (`make integration` does it)"
    ),
    pytest.mark.timeout(600),
]

NewPage = Callable[..., "Page"]
SITE = ROOT / "build" / "site"
MAIN = (
    "index",
    "getting-started",
    "torch",
    "faq",
    "compared",
    "reference/start",
    "reference/settings",
    "reference/commands",
)


@pytest.fixture(scope="module")
def site() -> Path:
    subprocess.run([sys.executable, "-m", "scripts.build_site"], cwd=ROOT, timeout=500, check=True)
    return SITE


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    """The address of the site on a plain server."""
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(site)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        found = re.search(r"\((http://127.0.0.1:\d+/)\)", server.stdout.readline())
        assert found is not None
        try:
            with urlopen(found[1], timeout=10):
                yield found[1]
        finally:
            server.terminate()


@pytest.mark.parametrize("place", ["server", "disk"])
def test_the_search_finds_pages_offline(place: str, new_page: NewPage, served: str, site: Path) -> None:
    page = new_page()
    page.goto(f"{served if place == 'server' else site.as_uri() + '/'}index.html")
    page.get_by_role("button", name="Search").first.click()
    page.get_by_role("combobox").fill("straggler")
    page.get_by_role("option").first.wait_for()
    picture(page, f"site-search-{place}")
    page.get_by_role("option").first.click()
    page.wait_for_url("**/glossary.html*")
    assert "straggler" in page.locator("article").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_the_main_pages_fit_the_screen(width: int, scheme: str, new_page: NewPage, served: str) -> None:
    page = new_page(viewport={"width": width, "height": 1000}, color_scheme=scheme)
    for name in MAIN:
        page.goto(f"{served}{name}.html")
        assert page.locator("h1").count() == 1, name
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        page.screenshot(path=_picture(f"site-{name.replace('/', '-')}-{width}-{scheme}"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_read_the_main_pages(scheme: str, new_page: NewPage, served: str) -> None:
    page = new_page(color_scheme=scheme)
    for name in MAIN:
        page.goto(f"{served}{name}.html")
        assert [fault for fault in faults_by_axe(page) if fault.startswith(("serious", "critical"))] == [], name


def _picture(name: str) -> Path:
    folder = ROOT / "build" / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.png"
