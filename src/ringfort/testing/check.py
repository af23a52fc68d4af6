"""`Check`: a rule that holds for every backend, as a program that every rank of a group runs.

    @check(ranks=2)
    def a_message_arrives(backend: Backend) -> None:
        if backend.rank == 0:
            backend.send(b"hello", 1)
        else:
            into = bytearray(5)
            backend.recv(into, 0)
            assert into == b"hello"

The same program runs with a thread a rank, or with a process a rank.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from ringfort.backends.base import Backend
from ringfort.backends.sub import SubBackend
from ringfort.config import DistributedConfig
from ringfort.testing.faults import FaultTimetable, FaultyBackend, RankKilled
from ringfort.testing.groups import GroupFactory
from ringfort.testing.ranks import run_ranks

CHECK_TIMEOUT = 20.0
"""Seconds that bound each call of a check. Only what is broken takes so long; a busy machine must not."""

E = TypeVar("E", bound=BaseException)
Program = Callable[[Backend], None]


class CheckFailedError(AssertionError):
    """A rule does not hold. The message says at which ranks, with their tracebacks."""

    def __init__(self, name: str, failures: dict[int, str]) -> None:
        words = "\n".join(f"rank {rank}:\n{failure}" for rank, failure in failures.items())
        super().__init__(f"{name} does not hold\n{words}")
        self.name = name
        self.failures = failures


@dataclass(frozen=True)
class Check:
    """A rule: the world size that it takes, what each rank does, and what goes wrong meanwhile."""

    program: Program
    ranks: int
    faults: FaultTimetable

    @property
    def name(self) -> str:
        """The rule in words, with underscores."""
        return self.program.__name__

    def run_rank(self, backend: Backend, *, is_process: bool = False) -> None:
        """One rank's part. If the rule does not hold there, the others are told, so that they need not time out."""
        rank = FaultyBackend(backend, self.faults, is_process=is_process) if self.faults else backend
        try:
            self.program(rank)
        except RankKilled:
            raise
        except BaseException as exc:
            backend.abort(f"{self.name} failed at rank {backend.rank}: {type(exc).__name__}")
            raise

    def run(self, group: GroupFactory, *, config: DistributedConfig | None = None) -> None:
        """Runs the check on a new group, with a thread a rank. Raises `CheckFailedError`."""
        with group(self.ranks, config or DistributedConfig(timeout=CHECK_TIMEOUT)) as backends:
            outcomes = run_ranks(backends, self.run_rank)
        self.judge([None if outcome is None else in_words(outcome) for outcome in outcomes])

    def judge(self, outcomes: Sequence[str | None]) -> None:
        """Raises `CheckFailedError` unless every rank passed (None), or was killed and was to be."""
        failures = {rank: words for rank, words in enumerate(outcomes) if words is not None}
        for rank in self.faults.killed:
            if failures.pop(rank, None) != KILLED:
                failures[rank] = f"was to be killed, and was not: {outcomes[rank]}"
        if failures:
            raise CheckFailedError(self.name, failures)

    def __repr__(self) -> str:
        return f"<Check {self.name}, {self.ranks} ranks>"


def check(ranks: int, *, faults: FaultTimetable | None = None) -> Callable[[Program], Check]:
    """Makes a `Check` of a program."""
    return lambda program: Check(program, ranks, faults or FaultTimetable())


KILLED = "killed"
"""The outcome of a rank that was killed by timetable."""


def in_words(outcome: BaseException) -> str:
    """What a rank ended with, for people."""
    return KILLED if isinstance(outcome, RankKilled) else "".join(traceback.format_exception(outcome))


# --- what programs are made of ----------------------------------------------------------------------------------------


class Caught(Generic[E]):
    """What `raises` has caught, once it has."""

    error: E


@contextmanager
def raises(kind: type[E], *, saying: str = "", naming: int | None = None) -> Generator[Caught[E], None, None]:
    """Fails unless the block raises `kind`; `saying` must be in its message, and `naming` be the peer it names."""
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


_NOISE = np.random.default_rng(0).bytes(65_521)
"""A prime number of bytes: nothing on the way cuts in multiples of it."""


def pattern(seed: int, size: int) -> bytes:
    """Bytes in which a piece that is missing, doubled or from elsewhere shows."""
    start = seed * 7919 % len(_NOISE)
    return (_NOISE * ((start + size) // len(_NOISE) + 1))[start : start + size]


def expect(backend: Backend, data: bytes, src: int, *, tag: int = 0, timeout: float | None = None) -> None:
    """Receives a message from `src` and fails unless it is `data`."""
    into = bytearray(len(data))
    backend.recv(into, src, tag=tag, timeout=timeout)
    assert into == data, f"a message of {len(data)} bytes from rank {src} with tag {tag} is not what was sent"


def outermost_rank(backend: Backend, rank: int) -> int:
    """By which number errors name `rank`."""
    return backend.group.members[rank]


def leave(backend: Backend) -> None:
    """Closes `backend` for good: a sub-group's links are its parent's."""
    backend.close()
    if isinstance(backend, FaultyBackend):
        leave(backend.backend)
    elif isinstance(backend, SubBackend):
        leave(backend.parent)
