"""What a simulated elastic run computes: gradients that are whole numbers, so the state after any number of samples is
known, and results that say in which epoch they were reduced."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any, NamedTuple
from zlib import crc32

import msgspec

from ringfort.cluster.core.peer_messages import Epoch, RunState
from ringfort.training.elastic.dealing import Data, Span
from ringfort.training.elastic.protocol import Replica, Result, Standstill
from ringfort.training.elastic.sample_order import sample_order

DATA = Data(samples=50, batch=12, microbatch=3, seed=7)
SCALED = Data(samples=50, batch=5, microbatch=3, seed=7, is_per_member=True)
"""The same samples in steps that grow with the members. The last micro-batch of most steps is short, so that sums for
steps of other sizes do not fit together."""
DAMAGE = 10**30
"""What a damaged copy has too much: states have less, so what a state would be without it is known."""


def some_hosts(random: Random) -> int:
    """Return how many hosts a history has: 2 to 9. What goes wrong mostly needs few, and many take long."""
    return random.choices(range(2, 10), [20, 20, 20, 20, 8, 5, 4, 3])[0]


def few_hosts(random: Random) -> int:
    """Return how many hosts a history about one danger has: that needs few, and with many comes more rarely."""
    return random.randint(2, 5)


class Total(NamedTuple):
    """A reduced gradient, or a state."""

    value: int
    made: str
    """In which epoch it was reduced."""


class Saved(NamedTuple):
    """A checkpoint."""

    step: int = -1
    cursor: int = 0
    state: int = 0
    branch: str = ""


class Wrong(AssertionError):  # noqa: N818  # a verdict
    """A history broke a promise."""


def gradient(sample: int) -> int:
    """Return the gradient of one sample."""
    return (sample * 2654435761) % 1000003


@cache
def part_sum(span: Span, part: int) -> int:
    """Return the sum of the gradients of one micro-batch of a step."""
    return sum(gradient(int(i)) for i in DATA.part(span, part))


@cache
def expected(cursor: int) -> int:
    """Return the state after `cursor` samples, whatever the steps were that they came in."""
    number, place = divmod(cursor, DATA.samples)
    whole_passes = number * sum(gradient(i) for i in range(DATA.samples))
    return whole_passes + sum(gradient(int(i)) for i in sample_order(DATA.seed, number, DATA.samples, 0, place))


def digest(result: Result, me: int, size: int) -> int:
    """Return the digest of the first member's share, which is everything."""
    return crc32(repr(result.payload).encode()) if me == 0 else 0


def whole(result: Result) -> int:
    """Return the digest of everything."""
    return digest(result, 0, 1)


def run_state(stands: Standstill, *, is_ready: bool = False) -> RunState:
    """Return what the law of membership is told."""
    mark = stands.mark
    text = crc32(repr(mark).encode()).to_bytes(16, "big") if mark.branch else b""
    return RunState(text, stands.lineage, mark.step, stands.is_pending, is_ready)


def damaged(copy: Any) -> Any:
    """Return a damaged copy of a reduced gradient, or of a result or state that was sent."""
    if isinstance(copy, Result):
        return msgspec.structs.replace(copy, payload=damaged(copy.payload))
    return copy._replace(value=copy.value + DAMAGE)


def void_after(replica: Replica, epoch: Epoch) -> str:
    """Return the reduction that a replica knows to be void after it found that copies differ in `epoch`."""
    return str(epoch.key) if replica.report().void == epoch.number else ""


def applied(state: int, result: Result) -> int:
    """Return the state after `result`."""
    return result.payload.value + (0 if result.is_state else state)
