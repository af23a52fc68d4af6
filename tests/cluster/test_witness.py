"""`ringfort witness` with two real programs: the one that it sees goes on, whatever its id."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import ringfort

SOURCE = Path(ringfort.__file__).parents[1]
MEMBER = Path(__file__).parents[1] / "workers" / "witnessed.py"
PATIENCE = 20.0
"""Seconds for something that takes one or two on an idle machine."""


class Program:
    """A process, and the lines that it has printed."""

    def __init__(self, home: Path, *command: str) -> None:
        environment = {**os.environ, "RINGFORT_HOME": str(home), "PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"}
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    @property
    def steps(self) -> dict[int, tuple[int, str]]:
        """For each step, how many members there were and what the state was."""
        found = [line.split() for line in self.lines if len(line.split()) == 4]
        return {int(number): (int(members), value) for _, number, members, value in found}

    @property
    def last(self) -> tuple[int, int]:
        """The last step, and how many members there were."""
        steps = self.steps
        return (max(steps), steps[max(steps)][0]) if steps else (0, 0)

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


def until(condition: Callable[[], object], programs: list[Program]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        printed = "\n".join("".join(program.lines[-20:]) for program in programs)
        assert time.monotonic() < deadline, f"it takes too long:\n{printed}"
        time.sleep(0.01)


def test_the_machine_with_the_higher_id_goes_on_with_a_witness(tmp_path: Path) -> None:
    programs = [Program(tmp_path, str(MEMBER))]
    witness = Program(tmp_path, "-m", "ringfort.cli", "witness", "--name", "elastic", "--interface", "127.0.0.1")
    everybody = [witness, *programs]
    try:
        until(lambda: programs[0].last[0], everybody)
        programs.append(Program(tmp_path, str(MEMBER)))
        everybody.append(programs[-1])
        until(lambda: any("votes with" in line and line.count(",") == 1 for line in witness.lines), everybody)
        until(lambda: all(program.last[1] == 2 for program in programs), everybody)
        lower, higher = sorted(programs, key=lambda program: program.lines[-1].split()[0])
        lower.process.send_signal(signal.SIGSTOP)  # its links stay open, and it would win a tie
        until(lambda: higher.last[1] == 1, everybody)
        alone = higher.last[0]
        until(lambda: higher.last[0] >= alone + 10, everybody)
        lower.process.send_signal(signal.SIGCONT)
        until(lambda: all(program.last[0] > alone and program.last[1] == 2 for program in programs), everybody)
        witness.process.send_signal(signal.SIGTERM)
        assert witness.process.wait(PATIENCE) == 0
        at = higher.last[0]
        until(lambda: higher.last[0] >= at + 5, everybody)  # a witness that says goodbye leaves it free
        assert all(value == higher.steps[n][1] for n, (_, value) in lower.steps.items() if n in higher.steps)
    finally:
        for program in everybody:
            program.end()
