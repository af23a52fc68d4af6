"""How each system's members are started: commands, environment, and what is needed beside them."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import psutil

from benchmarks.compared.model_options import options_of
from tests.helpers.source import ROOT

LIGHTHOUSE = Path(__file__).with_name("lighthouse.py")
SUITED = ("--quorum_tick_ms", "50", "--heartbeat_timeout_ms", "1000", "--join_timeout_ms", "2000")
"""For members that send a heartbeat every 100 ms and make several steps per second. The defaults are 100, 5000 and
60000 ms."""


class System:
    """One of those that are compared."""

    coordinator: ClassVar[str]
    """Who leads: what is killed in the end."""

    def __init__(self, folder: Path, given: argparse.Namespace) -> None:
        self.folder, self.given = folder, given

    def begin(self) -> None:
        """Start what must be there before the first member."""

    @property
    def is_up(self) -> bool:
        """Whether what `begin` has started answers."""
        return True

    def end(self) -> None:
        """Stop what `begin` has started."""

    def command(self, member: int) -> list[str]:
        """Return the command of a member."""
        raise NotImplementedError

    def environment(self, member: int) -> dict[str, str]:
        """Return what is different in the environment of a member."""
        return {}

    def home(self, member: int) -> Path:
        """Return the folder of a member, which outlives its processes as a disk does."""
        home = self.folder / f"home-{member}"
        home.mkdir(0o700, exist_ok=True)
        return home

    def start(self, member: int, lines: Path, log: Path) -> subprocess.Popen[bytes]:
        """Start a process of a member. Its lines of JSON go to one file, the rest to another."""
        return _popen(self.command(member), self.environment(member), lines, log)

    def _module(self, name: str, member: int, python: str = sys.executable) -> list[str]:
        given = self.given
        command = [python, "-m", f"benchmarks.compared.{name}", "--number", str(member)]
        command += ["--members", str(given.members), "--batch", str(given.batch), "--folder", str(self.home(member))]
        return [*command, *options_of(given)]


def _popen(command: list[str], more: dict[str, str], out: Path, log: Path) -> subprocess.Popen[bytes]:
    # No GPU: torchft would use its streams, and the comparison is of processors.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}
    with out.open("wb") as stdout, log.open("wb") as stderr:
        # A session of its own: Linux shares the processor out between sessions, as between machines, and a member whose
        # threads often wait does not fall behind because of the others of its session.
        return subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=stdout, stderr=stderr, start_new_session=True
        )  # fmt: skip


class Plain(System):
    """Processes that know nothing of each other."""

    coordinator = "nobody"

    def command(self, member: int) -> list[str]:
        given = self.given
        samples, seconds = str(given.batch // given.members), str(given.plain)
        command = [sys.executable, "-m", "benchmarks.compared.plain", "--samples", samples, "--seconds", seconds]
        return [*command, *options_of(given)]


class Ringfort(System):
    """`ringfort.torch.elastic`, encrypted, with its defaults."""

    coordinator = "the leader"

    def __init__(self, folder: Path, given: argparse.Namespace) -> None:
        from ringfort.identity.namespace import NetworkNamespace

        super().__init__(folder, given)
        self._key = NetworkNamespace.generate("compared").join_code()

    def command(self, member: int) -> list[str]:
        more = [] if self.given.patience is None else ["--patience", str(self.given.patience)]
        return [*self._module("ringfort_member", member), "--microbatch", str(self.given.microbatch), *more]

    def environment(self, member: int) -> dict[str, str]:
        return {"RINGFORT_KEY": self._key, "RINGFORT_HOME": str(self.home(member)), "RINGFORT_CLUSTER": ""}


class Torchft(System):
    """torchft 0.2.0 with timeouts that suit it, in the lighthouse and in the members."""

    coordinator = "the lighthouse"
    lighthouse: ClassVar[tuple[str, ...]] = SUITED
    member: ClassVar[tuple[str, ...]] = ()

    def __init__(self, folder: Path, given: argparse.Namespace) -> None:
        super().__init__(folder, given)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self._count = 0

    def begin(self) -> None:
        command = [self.given.torchft_python, str(LIGHTHOUSE)]
        command += ["--bind", f"[::]:{self._port}", "--min_replicas", "1", *self.lighthouse]
        name = f"lighthouse-{self._count}"
        self._process = _popen(command, self.environment(0), self.folder / f"{name}.out", self.folder / f"{name}.log")
        self._count += 1

    @property
    def is_up(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self._port}/status", timeout=1):
            return True
        return False

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def environment(self, member: int) -> dict[str, str]:
        more = {"GLOO_SOCKET_IFNAME": "lo"}
        if self.given.torchft_path:
            path = (self.given.torchft_path, str(ROOT), os.environ.get("PYTHONPATH", ""))
            more["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
        return more

    def command(self, member: int) -> list[str]:
        where = ["--lighthouse", f"http://127.0.0.1:{self._port}"]
        return [*self._module("torchft_member", member, self.given.torchft_python), *where, *self.member]


class TorchftDefaults(Torchft):
    """torchft 0.2.0 with its own timeouts: 60 s, 5 s of heartbeat."""

    lighthouse = ()
    member = ("--defaults",)


class TorchftPublished(Torchft):
    """torchft 0.2.0 without the repair of its hook (torchft_member.py)."""

    member = ("--as-published",)


SYSTEMS: dict[str, type[System]] = {
    "ringfort": Ringfort,
    "torchft": Torchft,
    "torchft-defaults": TorchftDefaults,
    "torchft-published": TorchftPublished,
}
USUAL = ["ringfort", "torchft", "torchft-defaults"]
"""Without the last one: there is nothing to compare after the first kill."""


def cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    """Return the processor time of a process and of those that it has started."""
    total = 0.0
    with suppress(psutil.NoSuchProcess):
        main = psutil.Process(process.pid)
        for one in (main, *main.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = one.cpu_times()
                total += times.user + times.system
    return total


def kill(process: subprocess.Popen[bytes], *, whole: bool) -> None:
    """Kill a process with SIGKILL; with `whole` all processes of this member, as a power cut does."""
    children: list[Any] = []
    if whole:
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(process.pid).children(recursive=True)
            for one in (psutil.Process(process.pid), *children):
                with suppress(psutil.NoSuchProcess):
                    one.send_signal(signal.SIGSTOP)  # none of them may tell of the death of another
    process.kill()
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()
