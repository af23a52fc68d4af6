"""Programs of elastic runs as processes of their own, for tests: what they said so far, and waiting for what they
should say. Such a program is a module of tests/workers with one argument in JSON, and prints lines in JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.workers.elastic import DATA, plain_loop

PATIENCE = 60.0
"""Seconds for something that takes one on an idle machine."""

Line = dict[str, Any]
Start = Callable[..., "Program"]


class Program:
    """A process and the lines that it has printed."""

    def __init__(
        self, module: str, home: Path, variables: Mapping[str, str], launcher: Callable[..., Any], arguments: Any
    ) -> None:
        self.lines: list[Line] = []
        self._changed = threading.Condition()
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RINGFORT_")}
        self.process = launcher(
            [sys.executable, "-m", module, json.dumps(arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**clean, "RINGFORT_HOME": str(home), **variables},
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._changed, suppress(ValueError):  # the last line of a killed process may be cut short
                self.lines.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def until(self, wanted: Callable[[Line], object], since: int = 0) -> Line:
        """Return the first line that is `wanted`, of those after the first `since`."""
        deadline = time.monotonic() + PATIENCE
        with self._changed:
            while True:
                for line in self.lines[since:]:
                    if wanted(line):
                        return line
                since = len(self.lines)
                is_over = self.process.poll() is not None and not self._reader.is_alive()
                assert (is_over, time.monotonic() > deadline) == (False, False), self.lines[-12:]
                self._changed.wait(0.1)

    def step(self, number: int, members: int = 1) -> Line:
        """Wait until it has applied a step of this number or a later one, with at least so many members."""
        return self.until(lambda line: line.get("step", 0) >= number and line.get("members", 0) >= members)

    def members(self, number: int) -> Line:
        """Wait for a step with so many members from now on."""
        return self.until(lambda line: line.get("members") == number, len(self.lines))

    def says(self, text: str) -> Line:
        """Wait until it has said something."""
        return self.until(lambda line: text in line.get("log", ""))

    def has_said(self, text: str) -> bool:
        """Return whether it has said something so far."""
        with self._changed:
            return any(text in line.get("log", "") for line in self.lines)

    def type(self, text: str) -> None:
        """Send a line to its standard input."""
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()

    @property
    def last_step(self) -> int:
        """The last step that it has told of."""
        with self._changed:
            return max((line.get("step", 0) for line in self.lines), default=0)

    @property
    def control(self) -> psutil.Process:
        """Its control process."""
        children = psutil.Process(self.process.pid).children()
        return next(child for child in children if "ringfort.cluster.net.service" in " ".join(child.cmdline()))

    def end(self) -> Line:
        """Wait for its end, and return its last line."""
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return self.lines[-1] if self.lines else {}

    def kill(self) -> None:
        """Kill it, if it runs, and wait for its end."""
        self.process.kill()
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)

    def close(self) -> None:
        """Kill it, and close its pipes."""
        self.kill()
        self.process.stdout.close()
        with suppress(BrokenPipeError):  # a line that it has not read
            self.process.stdin.close()


@contextmanager
def programs(module: str, home: Path) -> Iterator[Start]:
    """Yield a function that starts a program with the given arguments; all end with the block. `variables` are
    variables of its environment, and `launcher` starts it in place of `subprocess.Popen`."""
    made = list[Program]()

    def start(
        variables: Mapping[str, str] | None = None, launcher: Callable[..., Any] = subprocess.Popen, **arguments: Any
    ) -> Program:
        made.append(Program(module, home, variables or {}, launcher, arguments))
        return made[-1]

    home.mkdir(0o700, exist_ok=True)
    try:
        yield start
    finally:
        for program in made:
            program.close()


def check_end(program: Program, total: int) -> Line:
    """Wait for a program of `tests.workers.elastic_cases`, check that it has finished with the state of a plain loop
    to the bit, and return its last line."""
    end = program.end()
    assert (program.process.returncode, end.get("done")) == (0, total), program.lines[-5:]
    expected = plain_loop(total)
    assert end["w"] == expected["w"].tolist()
    assert end["seen"] == expected["seen"].tolist() == [total * DATA.batch / DATA.samples] * DATA.samples
    return end
