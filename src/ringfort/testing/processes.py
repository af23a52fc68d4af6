"""Checks with a process a rank, on this machine: what threads share, processes do not.

    with ProcessRanks(4, "mypackage.testing:make") as ranks:
        for check in BACKEND_CHECKS:
            ranks.run(check)

`make(rank, addresses)` returns the backend of a rank; `addresses` has a free one for each. Checks get new groups.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ringfort.backends.base import Backend
from ringfort.backends.ring import RingBackend
from ringfort.backends.tcp import TcpBackend
from ringfort.config import DistributedConfig
from ringfort.testing.check import CHECK_TIMEOUT, KILLED, Check
from ringfort.testing.groups import reserved_addresses
from ringfort.testing.ranks import RANKS_TIMEOUT, results, run_ranks

if TYPE_CHECKING:
    from typing_extensions import Self

MakeBackend = Callable[[int, Sequence[str]], Backend]

PATIENCE = 2 * RANKS_TIMEOUT
"""Seconds to wait for a process's answer: longer than it gives itself, so that it can say where it stands."""
_LAST_CHANCE = 10.0
"""Seconds that a process may take to end once no more questions come, before it is killed."""
_LAST_WORDS = 6000
"""Characters of what a process wrote at the end: a traceback of every thread fits."""


def make_tcp(rank: int, addresses: Sequence[str]) -> Backend:
    """A rank over TCP that meets the others at rank 0."""
    return TcpBackend(rank, len(addresses), addresses[0], config=DistributedConfig(timeout=CHECK_TIMEOUT))


def make_ring(rank: int, addresses: Sequence[str]) -> Backend:
    """A rank over TCP that knows the addresses of all."""
    return RingBackend(DistributedConfig(nodes=addresses, rank=rank, timeout=CHECK_TIMEOUT))


def make_ring_without_shared_memory(rank: int, addresses: Sequence[str]) -> Backend:
    """The same, with all that it says on the network."""
    config = DistributedConfig(nodes=addresses, rank=rank, timeout=CHECK_TIMEOUT, shared_memory="off")
    return RingBackend(config)


class ProcessRanks:
    """Processes that run checks, one a rank. One that a check has killed is replaced when it is needed again."""

    def __init__(self, most: int, make: str = "ringfort.testing.processes:make_tcp") -> None:
        """For checks of up to `most` ranks. `make` names a `MakeBackend` as `module:function`."""
        self._workers = [_Worker(rank, make) for rank in range(most)]

    def run(self, check: Check) -> None:
        """Runs a check on a new group. Raises `CheckFailedError`."""
        with reserved_addresses(check.ranks) as addresses:
            workers = self._workers[: check.ranks]
            answers = run_ranks(workers, lambda worker: worker.ask(check.name, addresses), timeout=PATIENCE)
            check.judge(results(answers))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        results(run_ranks(self._workers, lambda worker: worker.stop()))


class _Worker:
    """One rank's process, started when it is first needed. It answers questions a line at a time."""

    def __init__(self, rank: int, make: str) -> None:
        self._rank = rank
        self._make = make
        self._process: subprocess.Popen[str] | None = None
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by stop(); a pipe could fill up

    def ask(self, name: str, addresses: Sequence[str]) -> str | None:
        """Has the process run its part of a check. Returns None, or in words what went wrong."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended: then there is no answer either
            process.stdin.write(json.dumps([name, self._rank, list(addresses)]) + "\n")
            process.stdin.flush()
        answer = process.stdout.readline()
        if answer:
            return json.loads(answer)
        code = self._end(process)
        return KILLED if code == -signal.SIGKILL else f"the process ended with code {code}:\n{self._last_words()}"

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "ringfort.testing.worker", self._make],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def stop(self) -> None:
        """Ends the process. It needs no signal: its standard input ends."""
        if self._process is not None:
            self._end(self._process)
        self._errors.close()

    def _end(self, process: subprocess.Popen[str]) -> int:
        """Ends the process, if it has not ended, and returns its exit code."""
        self._process = None
        for pipe in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):  # a question that was never read
                assert pipe is not None
                pipe.close()
        try:
            return process.wait(_LAST_CHANCE)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def _last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-_LAST_WORDS:]
