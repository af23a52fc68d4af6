"""The members of `python -m benchmarks.elastic`: processes on hosts that are network namespaces, or on loopback."""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks.elastic_member import known_weight
from ringfort.identity.namespace import NetworkNamespace
from tests.helpers.namespaces import Host, Lan, lan

LIMIT = 120.0
"""Seconds for any one thing."""
TAIL = 15
"""Lines of the log of a member that has failed."""


class WrongStateError(AssertionError):
    """A member has another state than a run without faults."""


class MemberFailedError(ChildProcessError):
    """A member has ended by itself."""


class Member:
    """A process of a member and what it said."""

    def __init__(
        self, number: int, host: Host | None, key: str, homes: Path, log: Path, given: argparse.Namespace
    ) -> None:
        self.number, self.host, self.log = number, host, log
        self.lines: list[dict[str, Any]] = []
        self.notes: list[dict[str, Any]] = []
        self.started = time.monotonic()
        self.ready = float("inf")
        self.died = float("inf")
        self.joined = float("inf")
        """When it first took part in a step. Before that it may have applied some, as a learner."""
        self.is_frozen = self.is_cut = False
        self._come: queue.Queue[dict[str, Any]] = queue.Queue()
        own = homes / str(number)
        own.mkdir(0o700, exist_ok=True)
        variables = {"RINGFORT_KEY": key, "RINGFORT_HOME": str(own), "RINGFORT_CLUSTER": ""}
        command = [sys.executable, "-m", "benchmarks.elastic_member", "--folder", str(own / "checkpoints")]
        command += ["--mib", str(given.mib), "--state-mb", str(given.state_mb), "--patience", str(given.patience)]
        command += ["--batch", str(given.batch), "--host", str(number)]
        if given.timeline:
            command.append("--timeline")
        with log.open("wb") as stderr:
            if host is None:
                environment = {**os.environ, **variables}
                command.append("--loopback")
                self.process = subprocess.Popen(
                    command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True
                )
            else:
                self.process = host.start(
                    *command, variables=variables, stdout=subprocess.PIPE, stderr=stderr, text=True
                )
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, stdout: IO[str]) -> None:
        with stdout:
            for line in stdout:
                if line.endswith("}\n"):
                    self._come.put(json.loads(line))

    def settle(self) -> None:
        """Take what it has said."""
        while not self._come.empty():
            line = self._come.get()
            if "ready" in line:
                self.ready = line["ready"]
            elif "note" in line:
                self.notes.append(line)
            else:
                self.lines.append(line)
                if line["members"]:
                    self.joined = min(self.joined, line["at"])

    @property
    def last(self) -> dict[str, Any]:
        return self.lines[-1] if self.lines else {"step": 0, "members": 0, "epoch": 0, "leads": False, "at": 0.0}

    @property
    def has_joined(self) -> bool:
        return self.joined < float("inf")

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def has_ended_by_itself(self) -> bool:
        return self.died == float("inf") and not self.is_alive

    @property
    def is_over(self) -> bool:
        """Whether it has ended and said all that it will say."""
        return not self.is_alive and not self._reader.is_alive() and self._come.empty()

    @property
    def tail(self) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL:])

    def kill(self) -> float:
        """Kill its training process with SIGKILL. Return when."""
        self.died = time.monotonic()
        self.process.kill()
        self.process.wait(LIMIT)
        return self.died

    def freeze(self) -> None:
        """Stop all its processes, as a machine that is frozen does."""
        self.is_frozen = True
        # The training process first: while it is stopped, its control process cannot take it for dead.
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Undo `freeze`."""
        self.is_frozen = False
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.process.pid)
            for one in (process, *process.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    one.send_signal(number)


class Cluster:
    """All members."""

    def __init__(self, network: Lan | None, size: int, homes: Path, logs: Path, given: argparse.Namespace) -> None:
        self.network, self.given, self.logs = network, given, logs
        self.hosts: Sequence[Host | None] = [None] * size if network is None else network.hosts
        self.members: dict[int, Member] = {}
        """The latest of each host."""
        self.all: list[Member] = []
        """All that were ever started."""
        self.failed: list[Member] = []
        """Those that ended by themselves, whom `settle` found."""
        self._open: list[Member] = []
        """Those that may still say something."""
        self._homes = homes
        self._key = NetworkNamespace.generate("benchmark").join_code()

    def start(self, number: int) -> Member:
        """Start the member of a host."""
        log = self.logs / f"{len(self.all):04}-on-host-{number}.txt"
        made = Member(number, self.hosts[number], self._key, self._homes, log, self.given)
        self.members[number] = made
        self.all.append(made)
        self._open.append(made)
        return made

    @property
    def alive(self) -> list[Member]:
        return [member for member in self.members.values() if member.is_alive]

    def settle(self) -> None:
        """Take what all have said, and compare their states with what a run without faults has."""
        for member in list(self._open):
            if member.is_over:
                self._open.remove(member)
                if member.has_ended_by_itself:
                    member.died = time.monotonic()
                    self.failed.append(member)
            seen = len(member.lines)
            member.settle()
            for line in member.lines[seen:]:
                self._check(member, line)

    def _check(self, member: Member, line: dict[str, Any]) -> None:
        known = known_weight(line["step"], self.given.batch)
        if line["w"] != known or not line["same"]:
            raise WrongStateError(
                f"member {member.number} has {line['w']} after step {line['step']}, "
                f"{'in all' if line['same'] else 'not in all'} elements; right is {known}. Its log: {member.log}"
            )

    def check_failures(self) -> None:
        """Raise `MemberFailedError` if one has ended by itself."""
        for member in self.failed:
            code = member.process.returncode
            raise MemberFailedError(f"member {member.number} ended with {code}; {member.log} ends:\n{member.tail}")

    def until(self, is_it: Callable[[], bool], what: str) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + LIMIT
        while True:
            self.settle()
            if is_it():
                return
            self.check_failures()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {LIMIT:g} s")
            time.sleep(0.002)

    def whole(self, size: int) -> None:
        """Wait until `size` members have done some steps together."""
        self.until(
            lambda: len(self.alive) == size and all(m.last["members"] == size for m in self.alive), f"{size} together"
        )
        begin = max(m.last["step"] for m in self.alive)
        self.until(lambda: all(m.last["step"] > begin + 2 for m in self.alive), "some steps")

    def next_step(self) -> float:
        """Wait for a step that nobody has applied yet. Return when the first member had."""
        before = max((m.last["step"] for m in self.alive), default=0)
        self.until(lambda: any(m.last["step"] > before for m in self.alive), "the next step")
        return min(line["at"] for m in self.alive for line in m.lines[-9:] if line["step"] > before)

    def cut(self, member: Member) -> None:
        """Cut its host off."""
        assert self.network is not None
        assert member.host is not None
        member.is_cut = True
        self.network.cut(member.host)

    def heal(self, member: Member) -> None:
        """Undo `cut`."""
        assert self.network is not None
        assert member.host is not None
        member.is_cut = False
        self.network.heal(member.host)

    def end(self) -> None:
        for member in self.alive:
            member.thaw()  # a control process that is stopped would outlive it
            member.kill()

    def tell(self, what: str, begin: float, end: float, only: Sequence[int] = ()) -> None:
        """Print the time line of all members, or of some, with `--timeline`."""
        if not self.given.timeline:
            return
        members = [m for m in self.members.values() if not only or m.number in only]
        found = [(one["at"], m.number, one["note"]) for m in members for one in m.notes if begin <= one["at"] <= end]
        print(f"--- {what}")
        for at, number, text in sorted(found):
            print(f"    {at - begin:7.3f} s  member {number}: {text[:160]}")


@contextmanager
def cluster(name: str, size: int, given: argparse.Namespace) -> Iterator[Cluster]:
    """Yield hosts for `size` members, none started. With `--keep` their logs stay in that folder, otherwise only after
    an error."""
    logs = Path(given.keep or tempfile.mkdtemp(prefix="ringfort-elastic-logs-")) / name
    logs.mkdir(parents=True, exist_ok=True)
    try:
        with ExitStack() as stack:
            homes = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ringfort-elastic-")))
            network = None if given.loopback else stack.enter_context(lan(size, machine_ids=True))
            made = Cluster(network, size, homes, logs, given)
            stack.callback(made.end)
            yield made
    except BaseException:
        print(f"The logs of the members are in {logs}", file=sys.stderr)
        raise
    if given.keep is None:
        shutil.rmtree(logs.parent)
