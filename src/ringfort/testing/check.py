"""`Check`: a rule for every backend, as a program that every rank of a group runs.

    @check(ranks=2)
    def a_message_arrives(backend: Backend) -> None:
        if backend.rank == 0:
            backend.send(b"hello", 1)
        else:
            into = bytearray(5)
            backend.recv(into, 0)
            assert into == b"hello"

The same program runs with one thread or with one process per rank. `collective_check` is for rules of collectives.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from ringfort.backends.base import Backend
from ringfort.backends.sub import SubBackend
from ringfort.config import DistributedConfig
from ringfort.context import DistributedContext
from ringfort.testing.faults import FaultTimetable, FaultyBackend, RankKilled
from ringfort.testing.groups import GroupFactory
from ringfort.testing.ranks import run_ranks

if TYPE_CHECKING:
    from typing_extensions import Buffer

CHECK_TIMEOUT = 20.0
"""Seconds per call of a check. Only a broken backend takes so long, also on a busy machine."""

E = TypeVar("E", bound=BaseException)


class CheckFailedError(AssertionError):
    """A backend breaks a rule. The message says at which ranks, with their tracebacks."""

    def __init__(self, name: str, failures: dict[int, str]) -> None:
        words = "\n".join(f"rank {rank}:\n{failure}" for rank, failure in failures.items())
        super().__init__(f"{name} does not hold\n{words}")
        self.name = name
        self.failures = failures


@dataclass(frozen=True)
class Check:
    """A rule: its world size, the program of each rank, and the faults that occur meanwhile."""

    program: Callable[[Any], None]
    ranks: int
    faults: FaultTimetable
    takes: Callable[[Backend], object] = lambda backend: backend
    """Makes of a rank's backend what the program takes."""

    @property
    def name(self) -> str:
        """The rule, in words joined by underscores."""
        return self.program.__name__

    def run_rank(self, backend: Backend, *, is_process: bool = False) -> None:
        """Run the program of one rank. If it fails, abort the others, so that they need not time out."""
        rank = FaultyBackend(backend, self.faults, is_process=is_process) if self.faults else backend
        try:
            self.program(self.takes(rank))
        except RankKilled:
            raise
        except BaseException as exc:
            backend.abort(f"{self.name} failed at rank {backend.rank}: {type(exc).__name__}")
            raise

    def run(self, group: GroupFactory, *, config: DistributedConfig | None = None) -> None:
        """Run the check on a new group, with one thread per rank. Raises `CheckFailedError`."""
        with group(self.ranks, config or DistributedConfig(timeout=CHECK_TIMEOUT)) as backends:
            outcomes = run_ranks(backends, self.run_rank)
        self.judge([None if outcome is None else in_words(outcome) for outcome in outcomes])

    def judge(self, outcomes: Sequence[str | None]) -> None:
        """Raise `CheckFailedError` unless every rank passed (None), or was killed by the timetable."""
        failures = {rank: words for rank, words in enumerate(outcomes) if words is not None}
        for rank in self.faults.killed:
            if failures.pop(rank, None) != KILLED:
                failures[rank] = f"should have been killed, but was not: {outcomes[rank]}"
        if failures:
            raise CheckFailedError(self.name, failures)

    def __repr__(self) -> str:
        return f"<Check {self.name}, {self.ranks} ranks>"


def check(ranks: int, *, faults: FaultTimetable | None = None) -> Callable[[Callable[[Backend], None]], Check]:
    """Make a `Check` of a program."""
    return lambda program: Check(program, ranks, faults or FaultTimetable())


def collective_check(ranks: int) -> Callable[[Callable[[DistributedContext], None]], Check]:
    """Make a `Check` of a program that gets a `DistributedContext` over the backend."""

    return lambda program: Check(program, ranks, FaultTimetable(), takes=DistributedContext)


KILLED = "killed"
"""The outcome of a rank that the timetable killed."""


def in_words(outcome: BaseException) -> str:
    """The exception that ended a rank, as text."""
    return KILLED if isinstance(outcome, RankKilled) else "".join(traceback.format_exception(outcome))


# --- for programs -----------------------------------------------------------------------------------------------------


class Caught(Generic[E]):
    """The error that `raises` has caught, after its block."""

    error: E


@contextmanager
def raises(kind: type[E], *, saying: str = "", naming: int | None = None) -> Generator[Caught[E], None, None]:
    """Fail unless the block raises `kind`, with `saying` in its message and `naming` as its peer."""
    caught: Caught[E] = Caught()
    try:
        yield caught
    except kind as exc:
        caught.error = exc
    else:
        raise AssertionError(f"{kind.__name__} was not raised")
    assert saying in str(caught.error), f"{saying!r} is not in: {caught.error}"
    if naming is not None:
        peer = getattr(caught.error, "peer", None)
        assert peer == naming, f"rank {peer!r} is named, not {naming}: {caught.error}"


def refuses(
    kind: type[BaseException], *calls: Callable[[], object], saying: str = "", naming: int | None = None
) -> None:
    """Fail unless each of `calls` raises `kind`; see `raises`."""
    for call in calls:
        with raises(kind, saying=saying, naming=naming):
            call()


def refuses_any(
    kind: type[BaseException], values: Iterable[Any], *calls: Callable[[Any], object], saying: str = ""
) -> None:
    """Fail unless each of `calls` raises `kind` for each of `values`, with `saying.format(value)` in its message."""
    for value in values:
        refuses(kind, *(partial(call, value) for call in calls), saying=saying.format(value))


_NOISE = np.random.default_rng(0).bytes(65_521)
"""A prime number of bytes: no layer cuts messages into multiples of it."""


def pattern(seed: int, size: int) -> bytes:
    """Bytes in which a missing, repeated or foreign piece is noticed."""
    start = seed * 7919 % len(_NOISE)
    return (_NOISE * ((start + size) // len(_NOISE) + 1))[start : start + size]


def expect(backend: Backend, data: bytes, src: int, *, tag: int = 0) -> None:
    """Receive a message from `src`, and fail unless it is `data`."""
    into = bytearray(len(data))
    backend.recv(into, src, tag=tag)
    assert into == data, f"a message of {len(data)} bytes from rank {src} with tag {tag} is not what was sent"


def deliver(backend: Backend, data: Buffer, *, tag: int = 0) -> None:
    """At rank 0, send `data` to rank 1; there, fail unless it is what arrives."""
    if backend.rank == 0:
        backend.send(data, 1, tag=tag)
    else:
        expect(backend, memoryview(data).tobytes(), 0, tag=tag)


def expect_exchange(backend: Backend, out: Buffer, dst: int, data: bytes, src: int, *, tag: int = 0) -> None:
    """Send `out` to `dst`, receive a message from `src`, and fail unless it is `data`."""
    into = bytearray(len(data))
    backend.exchange(out, dst, into, src, tag=tag)
    assert into == data, f"a message of {len(data)} bytes from rank {src} with tag {tag} is not what was sent"


def outermost_rank(backend: Backend, rank: int) -> int:
    """The number by which errors name `rank`: that in the outermost group."""
    return backend.group.members[rank]


def leave(backend: Backend) -> None:
    """Close `backend` and its links: those of a sub-group belong to its parent."""
    backend.close()
    if isinstance(backend, FaultyBackend):
        leave(backend.backend)
    elif isinstance(backend, SubBackend):
        leave(backend.parent)
