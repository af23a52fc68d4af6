"""Runs one system through its phases: calm, a storm of kills by a timetable, and the death of its coordinator."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compared.records import NEVER, Process, lines_of
from benchmarks.compared.systems import System, Torchft, cpu_seconds, kill

TICK = 0.02
LIMIT = 180.0
"""Seconds for all members to come together in the beginning."""


@dataclass(frozen=True)
class Kill:
    """One line of the timetable."""

    after: float
    """Seconds after the beginning of the storm."""
    member: int


def timetable(seconds: float, every: float, members: int, seed: int) -> list[Kill]:
    """Return who is killed when, the same for all systems. After the last kill there is time to recover from it."""
    chance = random.Random(seed)
    last = seconds - min(15.0, every / 2)
    count = int(last / every)
    return [Kill(number * every, chance.randrange(members)) for number in range(1, count + 1)]


class Running:
    """A process of a member that runs, and what it has said so far."""

    def __init__(self, member: int, process: subprocess.Popen[bytes], folder: Path, file: str) -> None:
        self.member, self.process, self.file = member, process, file
        self._path, self._read = folder / file, 0
        self.said = Process(member, time.monotonic())

    def settle(self) -> None:
        """Take what it has said since."""
        with self._path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        complete = new[: new.rfind(b"\n") + 1]
        self._read += len(complete)
        for line in lines_of(complete.decode()):
            self.said.take(line)

    @property
    def has_joined(self) -> bool:
        return self.said.joined < NEVER

    @property
    def last(self) -> dict[str, Any]:
        return self.said.committed[-1] if self.said.committed else {"step": 0, "members": 0, "leads": False, "at": 0.0}


class Runner:
    """Starts, kills and restarts the members of one system, and writes down what it does."""

    def __init__(
        self, system: System, folder: Path, given: argparse.Namespace, cores: Sequence[int], stop: threading.Event
    ) -> None:
        self._system, self._folder, self._given, self._cores, self._stop = system, folder, given, cores, stop
        self._running: dict[int, Running] = {}
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._count = 0

    def note(self, event: str, **more: Any) -> None:
        """Write an event down."""
        with (self._folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"event": event, "at": time.monotonic(), **more}) + "\n")

    def run(self) -> None:
        """Go through all phases."""
        os.sched_setaffinity(0, self._cores)  # of this thread, and so of all that it starts
        given = self._given
        try:
            self._system.begin()
            self._wait(lambda: self._system.is_up, f"{self._system.coordinator} answers")
            for member in range(given.members):
                self._start(member)
            self._wait(lambda: self._together() == given.members, "all members take part")
            self._phase("calm", given.calm, [])
            self._phase("storm", given.seconds, timetable(given.seconds, given.every, given.members, given.seed))
            if given.coordinator:
                self._kill_coordinator(given.coordinator)
        except (TimeoutError, InterruptedError) as exc:
            self.note("error", why=str(exc))
        finally:
            self.note("end")
            for one in self._running.values():
                kill(one.process, whole=True)
            self._system.end()

    def _cpu_seconds(self) -> float:
        return sum(cpu_seconds(one.process) for one in self._alive())

    def _alive(self) -> list[Running]:
        return [one for one in self._running.values() if one.process.poll() is None]

    def _together(self) -> int:
        """Return how many members have taken part in a step of all."""
        return sum(one.last["members"] == self._given.members for one in self._alive())

    def _start(self, member: int) -> None:
        file = f"lines-{self._count:03}-of-{member}.jsonl"
        log = self._folder / f"log-{self._count:03}-of-{member}.txt"
        self._count += 1
        self.note("start", member=member, file=file)
        process = self._system.start(member, self._folder / file, log)
        self._running[member] = Running(member, process, self._folder, file)

    def _settle(self) -> None:
        """Take what all have said, do what is due, and start again after a while who has ended by itself."""
        if self._stop.is_set():
            raise InterruptedError("interrupted")
        now = time.monotonic()
        for one in list(self._running.values()):
            one.settle()
            if one.process.poll() is not None:
                self.note("ended", member=one.member, file=one.file, code=one.process.returncode)
                self._start_later(one.member)
        for item in [item for item in self._due if item[0] <= now]:
            self._due.remove(item)
            item[1]()

    def _start_later(self, member: int) -> None:
        self._running.pop(member, None)
        self._due.append((time.monotonic() + self._given.away, lambda: self._start(member)))

    def _wait(self, is_it: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT
        while not is_it():
            self._settle()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {LIMIT:g} s")
            time.sleep(TICK)

    def _phase(self, name: str, seconds: float, kills: Sequence[Kill]) -> None:
        begin, left = time.monotonic(), list(kills)
        used = self._cpu_seconds()
        self.note("beginning of phase", name=name)
        while (now := time.monotonic()) < begin + seconds:
            self._settle()
            if left and now >= begin + left[0].after:
                self._kill(left.pop(0).member)
            time.sleep(TICK)
        self._settle()
        self.note("end of phase", name=name, cpu_s=self._cpu_seconds() - used)

    def _kill(self, member: int) -> None:
        victim = self._running.get(member)
        # Whoever holds the state last is spared: from its death on there would be nothing to compare.
        others = [one for one in self._alive() if one.member != member and one.has_joined]
        if victim is None or victim.process.poll() is not None or not others:
            self.note("left out", member=member)
            return
        victim.settle()
        self.note(
            "kill", member=member, file=victim.file, had_joined=victim.has_joined, leads=victim.last["leads"]
        )  # fmt: skip
        kill(victim.process, whole=self._given.power)
        self._start_later(member)

    def _kill_coordinator(self, seconds: float) -> None:
        """Kill the lighthouse, and start another one after half of the time; or kill the leader."""
        begin, system = time.monotonic(), self._system
        self.note("beginning of phase", name="coordinator")
        if isinstance(system, Torchft):
            self.note("coordinator killed", what=system.coordinator)
            system.end()

            def come_back() -> None:
                system.begin()
                self.note("coordinator started")

            self._due.append((begin + seconds / 2, come_back))
        else:
            newest = max(self._alive(), key=lambda one: one.last["at"])
            leader = next((one for one in self._alive() if one.last["leads"]), newest)
            self.note("coordinator killed", what=system.coordinator)
            self._kill(leader.member)
        while time.monotonic() < begin + seconds:
            self._settle()
            time.sleep(TICK)
        self.note("end of phase", name="coordinator")
