"""Make the pictures of README.md: `python scripts/screenshots.py` runs the demo's training and photographs it.

docs/images/dash.png is the page of `ringfort dash`, by Chromium (`apt-get install chromium`, `pip install playwright`);
docs/images/top.svg is what `ringfort top` shows. Both show the same run at about the same time: three processes of this
machine, one of which was killed and is back.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ringfort.dashboard.source import LiveSource
from ringfort.dashboard.terminal import Terminal
from ringfort.dashboard.web.server import DashServer

IMAGES = Path(__file__).parents[1] / "docs" / "images"
STEPS = 3000
RUN = "demo"
PATIENCE = 300.0
"""Seconds until the killed peer is back."""
SETTLE = 9.0
"""Seconds after that, for curves and means of the run as it is then."""


def main() -> int:
    """Run the demo and photograph it. Returns the exit code."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("needs Chromium: apt-get install chromium", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:  # so that no other run of this machine is seen
        os.environ["XDG_RUNTIME_DIR"] = folder
        return photograph(chromium)


def photograph(chromium: str) -> int:
    """Run the demo and photograph page and terminal."""
    command = [sys.executable, "-m", "ringfort", "demo", "--no-live", "--framework", "numpy", "--steps", str(STEPS)]
    with (
        LiveSource(only_here=True) as source,
        DashServer(source, run=RUN) as server,
        subprocess.Popen(command, stdout=subprocess.DEVNULL) as demo,
    ):
        try:
            from playwright.sync_api import sync_playwright

            with sync_playwright() as playwright:
                flags = ["--no-sandbox"] if os.getuid() == 0 else []
                browser = playwright.chromium.launch(executable_path=chromium, args=flags)
                page = browser.new_page(viewport={"width": 1280, "height": 960}, device_scale_factor=1.5)
                page.goto(server.new_link())
                wait_for_return(source)
                page.wait_for_timeout(1000 * SETTLE)
                page.screenshot(path=IMAGES / "dash.png")
                browser.close()
        finally:
            asyncio.run(photograph_terminal(source))
            demo.kill()
    return 0


def wait_for_return(source: LiveSource) -> None:
    """Wait until a peer was lost and three train again."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        view = source.view(RUN)
        states = [rank.state for rank in view.ranks]
        if any(event.kind == "lost" for event in view.events) and states.count("training") == 3:
            return
        time.sleep(0.2)
    raise TimeoutError("The killed peer of the demo did not come back")


async def photograph_terminal(source: Any) -> None:
    """Write what `ringfort top` shows."""
    app = Terminal(source, run=RUN)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause(1.5)
        drawn = app.export_screenshot(title="ringfort top")
        (IMAGES / "top.svg").write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL))  # from elsewhere


if __name__ == "__main__":
    sys.exit(main())
