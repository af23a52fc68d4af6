"""Real processes on loopback train one model; one is killed and comes back, one joins late, one freezes."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.workers.elastic import DATA, PATIENCE, plain_loop

TOTAL = 160
FROZEN = 0.8
"""Seconds, less than `PATIENCE`."""
LIMIT = 60.0
"""Seconds for what takes a few on an idle machine."""


class Worker:
    """One process and what it said."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.lines: list[dict[str, Any]] = []
        self._come: queue.Queue[dict[str, Any]] = queue.Queue()
        variables = {**os.environ, "RINGFORT_HOME": str(folder / "home")}
        command = [sys.executable, "-m", "tests.workers.elastic", name, str(TOTAL), str(folder)]
        self.process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # the last one of a killed process may be cut short
                self._come.put(json.loads(line))

    def until(self, is_it: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for a line."""
        deadline = time.monotonic() + LIMIT
        while True:
            line = self._come.get(timeout=max(0.01, deadline - time.monotonic()))
            self.lines.append(line)
            if is_it(line):
                return line

    def end(self) -> None:
        """Kill it, if it runs, and wait."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LIMIT)
        self._reader.join(LIMIT)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def workers() -> Iterator[list[Worker]]:
    made: list[Worker] = []
    try:
        yield made
    finally:
        for worker in made:
            worker.end()


def counts(number: int) -> Callable[[dict[str, Any]], bool]:
    return lambda line: len(line["members"]) == number


def test_a_run_outlives_a_killed_member_that_returns_a_late_one_and_a_freeze(tmp_path: Path) -> None:
    with workers() as made:
        made += [Worker(name, tmp_path) for name in ("one", "two", "three")]
        one, two, three = made
        one.until(lambda line: counts(3)(line) and line["step"] >= 3)
        two.process.kill()
        one.until(counts(2))
        made += [Worker("two again", tmp_path), Worker("late", tmp_path)]
        one.until(counts(4))
        before = one.lines[-1]
        three.process.send_signal(signal.SIGSTOP)
        time.sleep(FROZEN)  # what is tested: nothing happens meanwhile
        three.process.send_signal(signal.SIGCONT)
        after = one.until(lambda line: line["step"] >= before["step"] + 3)
        assert after["members"] == before["members"]
        assert after["events"] == before["events"]
        (tmp_path / "hurry").touch()
        expected = plain_loop(TOTAL)
        for worker in (one, three, *made[3:]):
            last = worker.until(lambda line: "w" in line)
            assert last["step"] == TOTAL
            assert last["w"] == expected["w"].tolist()
            assert last["seen"] == [TOTAL * DATA.batch / DATA.samples] * DATA.samples
            assert worker.process.wait(LIMIT) == 0
        assert PATIENCE > FROZEN
