"""`ringfort top` in a real terminal, which tmux is, with a real run."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKER = str(ROOT / "tests" / "workers" / "watched.py")
PATIENCE = 60.0
"""Seconds for what takes one or two; the machines that run this are shared."""
POLL = 0.05
"""Seconds between two looks at the screen."""

pytest.importorskip("textual", reason="needs textual")
needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")


class Tmux:
    """A terminal of a given size in which a command runs. The terminal is the command's own tmux server."""

    def __init__(self, folder: Path, variables: dict[str, str], command: str, width: int, height: int) -> None:
        self._socket = str(folder / "tmux")
        # UTF-8 and colours as most terminals have them, whatever this machine is set to.
        environment = variables | {"LC_ALL": "C.UTF-8", "TERM": "xterm-256color"}
        size = ("-x", str(width), "-y", str(height))
        self.do("-f", "/dev/null", "-u", "new-session", "-d", *size, command, environment=environment)

    def do(self, *arguments: str, environment: dict[str, str] | None = None) -> str:
        command = ["tmux", "-S", self._socket, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout

    def screen(self) -> str:
        return self.do("capture-pane", "-p")

    def until(self, is_so: Callable[[str], bool]) -> str:
        """Wait until the screen is as it should be, and return it."""
        deadline = time.monotonic() + PATIENCE
        while not is_so(screen := self.screen()):
            assert time.monotonic() < deadline, f"the screen stays like this:\n{screen}"
            time.sleep(POLL)
        return screen


@contextmanager
def watched(folder: Path, width: int, height: int) -> Iterator[Tmux]:
    """A run of two ranks, and `ringfort top` in a terminal. Other runs of this machine are not seen."""
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        "RINGFORT_INTERFACES": "127.0.0.1",
        "XDG_RUNTIME_DIR": str(folder),
    }
    ringfort = (sys.executable, "-m", "ringfort.cli")
    run = subprocess.Popen(
        [*ringfort, "run", "-n", "2", WORKER], env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        terminal = Tmux(
            folder, variables, f"{shlex.join((*ringfort, 'top'))}; echo ended with $?; read line", width, height
        )
        try:
            yield terminal
        finally:
            terminal.do("kill-server")
    finally:
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=PATIENCE)


@needs_tmux
def test_a_real_run_in_terminals_of_two_sizes(tmp_path: Path) -> None:
    with watched(tmp_path, 80, 24) as terminal:
        screen = terminal.until(lambda text: "waits" in text and "RANKS" in text and " step 0" not in text)
        assert "watched.py" in screen.splitlines()[0]
        assert "2 ranks on 1 machine" in screen.splitlines()[0]
        screen = terminal.until(lambda text: "of each step for rank 1" in text)
        assert "Rank 0 waits" in screen
        assert [line[:4] for line in screen.splitlines() if " █" in line[5:]][-2:] == [">  0", "   1"]
        assert "CPU" in screen
        colours = terminal.do("capture-pane", "-p", "-e")
        assert "\x1b[32m█" in colours  # the terminal's own green, not a mixture that suits one background only
        assert "38;2;" not in colours
        assert "48;2;" not in colours

        terminal.do("resize-window", "-x", "60", "-y", "20")
        screen = terminal.until(lambda text: len(text.splitlines()) == 20 and "q quit" in text.splitlines()[-1])
        assert max(map(len, screen.splitlines())) <= 60
        assert "RANKS  █ compute  ░ waiting  = wire  : data" in screen
        assert "waits" in screen

        terminal.do("send-keys", "Down")
        terminal.until(lambda text: ">  1" in text)
        terminal.do("send-keys", "l")
        terminal.until(lambda text: "LOG  rank 1 on " in text and "\nrank 1 has begun\n" in text)
        terminal.do("send-keys", "?")
        terminal.until(lambda text: "KEYS AND PARTS OF A STEP" in text)
        terminal.do("send-keys", "q")
        screen = terminal.until(lambda text: "ended with 0" in text)
        assert "RANKS" not in screen  # the terminal is as it was before
