"""Programs of an elastic run that are away for a while, in processes of their own, and a bus for logind's word."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 60.0
"""Seconds for something that takes one on an idle machine."""

Line = dict[str, Any]
Start = Callable[..., "Program"]


class Program:
    """A process that prints lines of JSON."""

    def __init__(self, module: str, *arguments: str, **variables: str) -> None:
        self.lines: list[Line] = []
        self._changed = threading.Condition()
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RINGFORT_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**clean, **variables},
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(json.loads(line))
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
                assert (self._reader.is_alive(), time.monotonic() < deadline) == (True, True), self.lines[-12:]
                self._changed.wait(0.1)

    def members(self, number: int) -> Line:
        """Wait for a step with so many members from now on."""
        return self.until(lambda line: line.get("members") == number, len(self.lines))

    def says(self, text: str) -> Line:
        """Wait until it has said something."""
        return self.until(lambda line: text in line.get("log", ""))

    def type(self, text: str) -> None:
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()

    def end(self) -> Line:
        """Wait for its end, and return its last line."""
        assert self.process.wait(PATIENCE) == 0
        self._reader.join(PATIENCE)
        return self.lines[-1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        self.process.stdout.close()
        self.process.stdin.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    (tmp_path / "home").mkdir(0o700)
    made = list[Program]()

    def begin(module: str = "tests.workers.elastic_absence", bus: str = "unix:path=/nowhere", **given: Any) -> Program:
        arguments = [json.dumps({"folder": str(tmp_path), **given})]
        home = str(tmp_path / "home")
        made.append(Program(module, *arguments, RINGFORT_HOME=home, DBUS_SYSTEM_BUS_ADDRESS=bus))
        return made[-1]

    try:
        yield begin
    finally:
        for program in made:
            program.kill()


def ends_well(folder: Path, *programs: Program) -> None:
    """Stop the run. All have applied each sample equally often."""
    (folder / "stop").touch()
    ends = [program.end() for program in programs]
    assert len({end["done"] for end in ends}) == 1
    assert [end["seen"] for end in ends] == [[ends[0]["done"] // 3]] * len(ends)


def said(program: Program, text: str) -> bool:
    """Return whether it has said something so far."""
    return any(text in line.get("log", "") for line in program.lines)


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[str]:
    """The address of a private bus."""
    if shutil.which("dbus-daemon") is None or find_spec("jeepney") is None:
        pytest.skip("needs dbus-daemon and jeepney")
    address = f"unix:path={tmp_path}/bus"
    command = ["dbus-daemon", "--session", "--nofork", "--nopidfile", "--print-address", f"--address={address}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
        try:
            assert daemon.stdout.readline().startswith(address)
            yield address
        finally:
            daemon.kill()
