"""`ringfort demo --web` as a person uses it: the link is opened, the demo trains, and the page stays until Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers.agents import until
from tests.integration.conftest import picture

if TYPE_CHECKING:
    from playwright.sync_api import Page

PATIENCE = 180
"""Seconds for what takes some on an idle machine: three processes start, and train 600 steps."""


@pytest.mark.timeout(4 * PATIENCE)
def test_the_demo_begins_when_its_page_is_open_and_shows_the_kill_and_the_return(
    new_page: Callable[..., Page], tmp_path: Path
) -> None:
    home, said = tmp_path / "home", tmp_path / "said"
    home.mkdir(mode=0o700)
    page = new_page()
    ours, terminal = os.openpty()
    with said.open("wb") as file:
        demo = subprocess.Popen(
            [sys.executable, "-m", "ringfort", "demo", "--web", "--framework", "numpy", "--no-live"],
            stdin=terminal,
            stdout=file,
            stderr=file,
            env={**os.environ, "XDG_RUNTIME_DIR": str(home)},
        )
    os.close(terminal)
    try:
        until(lambda: "begins when the page is open" in said.read_text(), "no link is printed", PATIENCE)
        link = re.findall(r"within 60 s; it works once:\n  (http://127\.0\.0\.1:\d+/open#\S+)\n", said.read_text())
        assert len(link) == 1
        assert "step 1 " not in said.read_text()
        page.goto(link[0])
        page.wait_for_selector("#ranks tbody tr[data-state=training]:nth-child(3)", timeout=1000 * PATIENCE)
        page.wait_for_selector("#ranks tr[data-state=lost]", timeout=1000 * PATIENCE)
        picture(page, "demo")
        page.wait_for_selector("#sentence:has-text('All ranks have ended.')", timeout=1000 * PATIENCE)
        until(lambda: "the page stays; Ctrl-C ends" in said.read_text(), "the demo does not end", PATIENCE)
        demo.send_signal(signal.SIGINT)
        assert demo.wait(PATIENCE) == 0, said.read_text()
        assert said.read_text().count("PASS") == 5, "one more with a kill"
        page.wait_for_selector("#status[data-state=lost]")
    finally:
        demo.kill()
        demo.wait()
        os.close(ours)
