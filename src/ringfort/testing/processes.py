"""`ProcessRanks`: runs checks with one process per rank on this machine, so that ranks share nothing.

    with ProcessRanks(4, "mypackage.testing:make") as ranks:
        for check in BACKEND_CHECKS:
            ranks.run(check)

`make(rank, addresses)` returns the backend of a rank; `addresses` has a free address per rank. Every check gets a new
group.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pkgutil import resolve_name

from ringfort.backends.base import Backend
from ringfort.backends.ring import RingBackend
from ringfort.backends.tcp import TcpBackend
from ringfort.config import DistributedConfig
from ringfort.launch.failure_report import describe_exit
from ringfort.launch.processes import Child, Children
from ringfort.testing.check import CHECK_TIMEOUT, KILLED, Check, in_words
from ringfort.testing.conformance import ALL_CHECKS
from ringfort.testing.groups import reserved_addresses
from ringfort.testing.ranks import RANKS_TIMEOUT, HangError

MakeBackend = Callable[[int, Sequence[str]], Backend]

PATIENCE = 2 * RANKS_TIMEOUT
"""Seconds to wait for the answers: longer than a process waits before it prints its stacks and ends."""
TAIL_LINES = 200
"""Lines of output to keep per process: the stacks of all its threads fit."""


def make_tcp(rank: int, addresses: Sequence[str]) -> Backend:
    """A rank over TCP that meets the others at rank 0."""
    return TcpBackend(rank, len(addresses), addresses[0], config=DistributedConfig(timeout=CHECK_TIMEOUT))


def make_ring_without_shared_memory(rank: int, addresses: Sequence[str]) -> Backend:
    """A rank over TCP that knows the addresses of all."""
    config = DistributedConfig(nodes=addresses, rank=rank, timeout=CHECK_TIMEOUT, shared_memory="off")
    return RingBackend(config)


class ProcessRanks(AbstractContextManager["ProcessRanks"]):
    """Processes that run checks, one per rank. Each is started when it is first needed, and again after it ended."""

    def __init__(self, most: int, make: str = "ringfort.testing.processes:make_tcp") -> None:
        """For checks of up to `most` ranks. `make` names a `MakeBackend` as `module:function`."""
        self._command = [sys.executable, "-c", "from ringfort.testing.processes import serve; serve()", make]
        self._children = Children(tail_lines=TAIL_LINES)
        self._workers: list[Child | None] = [None] * most

    def run(self, check: Check) -> None:
        """Run a check on a new group. Raises `CheckFailedError`."""
        with reserved_addresses(check.ranks) as addresses:
            for rank in range(check.ranks):
                self._ask(rank, json.dumps([check.name, rank, addresses]))
            check.judge(self._answers(check.ranks))

    def _ask(self, rank: int, question: str) -> None:
        worker = self._workers[rank]
        if worker is None or worker.is_over:
            worker = self._children.start(rank, self._command, {}, stdin=subprocess.PIPE)
            self._workers[rank] = worker
        assert worker.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and its exit code is the answer
            worker.process.stdin.write(question.encode() + b"\n")

    def _answers(self, ranks: int) -> list[str | None]:
        """One answer per rank: None, or what went wrong."""
        answers: dict[int, str | None] = {}
        deadline = time.monotonic() + PATIENCE
        while len(answers) < ranks:
            for output in self._children.poll():
                lines = output.lines()
                if output.is_error:
                    output.child.keep(lines)
                else:
                    answers.update((output.child.number, json.loads(line)) for line in lines)
            for rank, worker in enumerate(self._workers[:ranks]):
                if worker is not None and worker.is_over and rank not in answers:
                    answers[rank] = _ending(worker)
            if time.monotonic() > deadline:
                silent = set(range(ranks)) - answers.keys()
                raise HangError(PATIENCE, dict.fromkeys(sorted(silent), "  (in a process of its own)\n"))
        return [answers[rank] for rank in range(ranks)]

    def __exit__(self, *_: object) -> None:
        self._children.close()


def _ending(worker: Child) -> str:
    if worker.exit_code == -signal.SIGKILL:
        return KILLED
    assert worker.exit_code is not None
    return f"the process {describe_exit(worker.exit_code)}:\n" + "\n".join(worker.tail)


# --- in the process of a rank -----------------------------------------------------------------------------------------


def _answer(make: MakeBackend, name: str, rank: int, addresses: Sequence[str]) -> str | None:
    """Run one rank's part of a check. Returns None, or what went wrong."""
    # A hang ends the process, with the stacks of all threads.
    faulthandler.dump_traceback_later(RANKS_TIMEOUT, exit=True)
    try:
        with make(rank, addresses) as backend:
            ALL_CHECKS[name].run_rank(backend, is_process=True)
    except BaseException as exc:  # whatever it is, it is the answer
        return in_words(exc)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return None


def serve() -> None:
    """Answer until standard input ends: what each process of `ProcessRanks` does."""
    make: MakeBackend = resolve_name(sys.argv[1])
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_answer(make, *json.loads(line))) + "\n")
        sys.stdout.flush()
