"""`ringfort dash` beside a real elastic run of three processes, of which one is killed and comes back."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ringfort.errors import ProtocolError
from ringfort.telemetry.records import Step
from ringfort.telemetry.trace_file import TraceReader
from tests.integration.conftest import picture

if TYPE_CHECKING:
    from playwright.sync_api import Page

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic_numpy.py"
RINGFORT = [sys.executable, "-m", "ringfort"]
NUMBER = re.compile(r"[\d,.]+")
START = 60_000
"""Milliseconds: three processes that start on a busy machine."""


@contextmanager
def started(*arguments: str, env: dict[str, str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (
        output.open("wb") as file,
        subprocess.Popen([*RINGFORT, *arguments], env=env, stdout=file, stderr=file) as child,
    ):
        try:
            yield child
        finally:
            child.send_signal(signal.SIGINT)
            child.wait(30)


def link_in(output: Path) -> str:
    deadline = time.monotonic() + START / 1000
    while time.monotonic() < deadline:
        if found := re.search(r"http://\S+#\S+\n", output.read_text()):
            return found[0].strip()
        time.sleep(0.05)
    raise AssertionError(output.read_text())


def member_since(home: Path, before: set[Path]) -> float:
    """Wait until a process that was started after the kill has made a step of the run. Return when that step ended, by
    its own trace."""
    deadline = time.monotonic() + START / 1000
    while time.monotonic() < deadline:
        for path in set(home.rglob("*.trace")) - before:
            with suppress(OSError, ProtocolError), closing(TraceReader(path)) as reader:
                steps = (record for record in reader.new_records() if isinstance(record, Step))
                if (first := next(steps, None)) is not None and reader.header().rank >= 0:
                    return first.at
        time.sleep(0.02)
    raise AssertionError("The killed peer did not come back")


def test_three_peers_train_and_a_kill_and_the_return_are_seen(new_page: Callable[..., Page], tmp_path: Path) -> None:
    from playwright.sync_api import expect

    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    # Loopback and a cluster of its own: nobody else is found, nor finds it.
    own = {"RINGFORT_HOME": str(home), "XDG_RUNTIME_DIR": str(home), "RINGFORT_INTERFACES": "127.0.0.1"}
    env = {**os.environ, **own, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    training = ("run", "--elastic", "-n", "3", "--nodes", "1:3", str(EXAMPLE), "--steps", "1000000", "--pause", "0.01")
    record = str(tmp_path / "live.rec")
    page = new_page()
    with (
        started(*training, env=env, output=tmp_path / "run"),
        started("dash", "--no-browser", "--port", "0", "--record", record, env=env, output=tmp_path / "dash"),
    ):
        page.goto(link_in(tmp_path / "dash"))
        page.wait_for_selector("#ranks tbody tr[data-state=training]:nth-child(3)", timeout=START)
        step, loss = page.locator("#figures .value").nth(0), page.locator("#figures .value").nth(1)
        expect(step).to_have_text(NUMBER, timeout=START)
        expect(step).not_to_have_text(step.inner_text(), timeout=START)
        expect(loss).to_have_text(NUMBER)
        row = page.locator("#ranks tbody tr").nth(2)
        title = row.locator(".name").get_attribute("title") or ""
        pid = int(re.findall(r"process (\d+)", title)[0])
        key = row.get_attribute("data-key")

        before = set(home.rglob("*.trace"))
        os.kill(pid, signal.SIGKILL)
        killed, began = time.monotonic(), time.time()
        page.wait_for_selector(f"#ranks tr[data-key='{key}'][data-state=lost]", timeout=10_000)
        lost = time.monotonic() - killed
        returned = member_since(home, before)
        expect(page.locator("#ranks tr[data-state=training]")).to_have_count(3, timeout=START)
        seen = time.time()
        back = returned - began
        print(f"the kill was seen after {lost:.2f} s; the return, after {back:.1f} s, in {seen - returned:.2f} s")
        assert lost < 2
        assert seen - returned < 2
        page.wait_for_selector("#events li[data-mood=bad]")
        picture(page, "live")
    assert (tmp_path / "live.rec").stat().st_size > 1000
