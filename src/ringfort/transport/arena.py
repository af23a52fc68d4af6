"""`Arena`: memory that all ranks of a group on one machine write to and read from, and counters that say what is there.

Every rank has a **counter**, on a cache line of its own, and two **slots** of data. A collective is a fixed number of
steps: a rank puts data into its slot, calls `publish` to say so, and waits until the others have. The law of this
file: **in every operation every rank waits for every other**. So no rank is ever more than one operation ahead, and two
slots that take turns are enough.

Python can rely on the order in which one processor sees another's writes only on x86: elsewhere there is no arena. A
rank that waits first spins, then yields the processor, and then sleeps as a job of the engine, which also watches for
peers that die, aborts, timeouts and ranks that called something else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from struct import Struct
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from ringfort.config import KIB, MIB
from ringfort.errors import DistributedError
from ringfort.transport.engine import Engine
from ringfort.transport.messages import Envelope
from ringfort.transport.progress import LONGEST
from ringfort.transport.reducer import Array
from ringfort.transport.segment import PAGE, Segment

_SLOTS = 4 * MIB
"""Bytes of the slots that are in use at a time, of all ranks: what one rank writes is still in the cache when others
read it. Few ranks have larger ones, for every block is a meeting, which costs where something else wants the cores.
With 2 MiB a slot in place of 0.5 a training step of 2 ranks was 1.1 times as fast; 16 MiB of 4 ranks were 1.3 times
slower."""
_LARGEST_SLOT, _SMALLEST_SLOT = 2 * MIB, 256 * KIB
_LINE = 128
"""Bytes between what different ranks write: two cache lines, for processors fetch them in pairs."""
_WORDS = _LINE // 8
_LINES = 2
"""Of each rank: one begins with its counter, behind which are, for each of two operations in turn, its signature and
the two words of its call, so that who reads the one has the other; the next says whether the rank sleeps."""
_SIGNED, _SIGNATURE = 1, 3
"""The word where the signatures begin, and words of each."""
_ASLEEP = _WORDS
"""The word that says that the rank sleeps."""
_MOMENT = range(200)
"""Looks at a counter, some 6 us, after which a write has long been seen by all: it takes well under one."""


class Patience(NamedTuple):
    """What to do before going to sleep, which costs tens of microseconds: look at a counter so often, and then give the
    processor away so often, for so many seconds."""

    spins: int
    yields: int
    longest: float = float("inf")


EAGER = Patience(2000, 200, LONGEST)
"""Every rank has a processor: some 0.1 ms, in which a rank that is in the same collective gets through a block, and 0.2
ms. Giving the processor away earlier gave it to other programs, for milliseconds; where it does, as beside a thread
that computes, it is better to sleep and be woken."""
CROWDED = Patience(0, 200)
"""Ranks share processors: looking only keeps away the one that is waited for, and giving away is for that one."""
ONE_PROCESS = Patience(0, 0)
"""Ranks are threads of one process: only sleeping releases the interpreter lock."""


_CALL = Struct("<QQ")
"""A call's 16 bytes as words."""


@lru_cache(256)
def digest(call: bytes) -> int:
    """Return a number for a call. With an operation's added it is a signature: a word, which tells operations apart."""
    return int.from_bytes(blake2b(call, digest_size=7).digest(), "little")


def arena_bytes(world_size: int) -> int:
    """Bytes of a segment for an arena. Pages that are never touched take no memory."""
    return _slots_at(world_size) + world_size * 2 * slot_bytes(world_size)


def slot_bytes(world_size: int) -> int:
    """Bytes a slot: whole pages."""
    return max(_SMALLEST_SLOT, min(_LARGEST_SLOT, _SLOTS // world_size)) // PAGE * PAGE


def _slots_at(world_size: int) -> int:
    """Where the slots begin: half a page off, because large arrays begin 16 bytes into one. Copying between places that
    lie so in their pages is up to six times as slow on some processors, which take the two for the same."""
    return -(-world_size * _LINES * _LINE // PAGE) * PAGE + PAGE // 2


class Arena:
    """One rank's access to its group's arena. For one operation at a time."""

    def __init__(
        self, segment: Segment, rank: int, members: Sequence[int], engine: Engine, *, patience: Patience
    ) -> None:
        """`members` are the group's ranks as `engine` numbers them, and `rank` is this one's place among them."""
        memory, world_size = segment.memory, len(members)
        self._segment = segment
        self._members = members
        self.engine = engine
        self.rank = rank
        self.world_size = world_size
        self.operations = 0
        self.step = 0
        self.turn = 0
        self._words = memory[: world_size * _LINES * _LINE].cast("Q")
        self._own = rank * _LINES * _WORDS
        self._others = tuple(r * _LINES * _WORDS for r in range(world_size) if r != rank)
        self._flags = tuple(at + _ASLEEP for at in self._others)
        self._called: list[bytes | None] = [None, None]  # what is written behind each signature
        self._spins, self._yields, self._longest = range(patience.spins), range(patience.yields), patience.longest
        start = _slots_at(world_size)
        self.slot = slot_bytes(world_size)
        self._slots = np.frombuffer(memory, np.uint8)[start : start + 2 * self.slot * world_size].reshape(
            world_size, 2, self.slot
        )

    def __enter__(self) -> None:
        """Every operation is inside a `with`: what interrupts it, such as Ctrl-C, leaves the ranks out of step."""

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and not issubclass(kind, DistributedError):  # those have ended the group already
            self.abandon()

    def abandon(self) -> None:
        """This rank stopped in the middle: what the others see of it is no longer whole. Ends all calls."""
        self.engine.abort("interrupted in the middle of a collective")

    def next_turn(self) -> int:
        """Which slots are to be used now: not those of the last time, which may still be read."""
        self.turn ^= 1
        return self.turn

    def slots(self, dtype: np.dtype[Any], size: int) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """For each turn the first `size` elements of every rank's slot."""
        end = size * dtype.itemsize
        return tuple(tuple(self._slots[r, turn, :end].view(dtype) for r in range(self.world_size)) for turn in (0, 1))  # pyright: ignore[reportReturnType]

    def begin(self, envelope: Envelope) -> None:
        """Raise what has ended the group; else say what this rank is about to do, which the next `publish` tells the
        others."""
        self.engine.check(envelope)
        self._sign(envelope.call, envelope.operation)

    def _sign(self, call: bytes, operation: int) -> None:
        self.operations += 1
        words, parity = self._words, self.operations & 1
        at = self._own + _SIGNED + _SIGNATURE * parity
        self._called[parity] = call
        words[at + 1], words[at + 2] = _CALL.unpack(call)
        words[at] = digest(call) + operation

    def publish(self) -> None:
        """What this rank has written so far is for the others to read."""
        words = self._words
        self.step = words[self._own] = self.step + 1
        for flag in self._flags:  # perhaps before the counter is seen: see `_wait_longer`
            if words[flag]:
                self.engine.nudge(self._member(flag))

    def meeting(self, call: bytes) -> Callable[[int], bool]:
        """`_sign`, `publish` and a look, for operations that are such a `call`: with an operation's number, whether all
        others are there soon and have called the same. If not, `wait_signed` goes on from there.

        A function with all that it needs in its own scope, and one more for two ranks, which have no loops: of the 3 us
        that a tiny all-reduce took, this is a quarter."""
        words, own, other, flag, spins = self._words, self._own, self._others[0], self._flags[0], self._spins
        called, summary = self._called, digest(call)
        low, high = _CALL.unpack(call)
        turns = tuple(_SIGNED + _SIGNATURE * parity for parity in (0, 1))
        lines = tuple((own + turn, other + turn) for turn in turns)

        def meet(operation: int) -> bool:
            self._sign(call, operation)
            self.publish()
            turn = turns[self.operations & 1]
            return self.is_met() and all(words[at + turn] == words[own + turn] for at in self._others)

        def meet_one(operation: int) -> bool:
            self.operations = number = self.operations + 1
            parity = number & 1
            at, there = lines[parity]
            if called[parity] is not call:
                called[parity] = call
                words[at + 1] = low
                words[at + 2] = high
            words[at] = signature = summary + operation
            self.step = words[own] = step = self.step + 1
            if words[flag]:
                self.engine.nudge(self._member(other))
            if words[other] < step:
                for _ in spins:
                    if words[other] >= step:
                        break
                else:
                    return False
            return words[there] == signature

        return meet if len(self._others) > 1 else meet_one

    def wait(self, envelope: Envelope) -> None:
        """Return when every other rank has published as often as this one; raise what ends the collective."""
        if not self.is_met():
            for at in self._others:
                if self._words[at] < self.step:
                    self._wait_longer(at, envelope)

    def is_met(self) -> bool:
        """Return whether every other rank has soon published as often as this one. If not, `wait` continues."""
        words, step = self._words, self.step
        for at in self._others:
            if words[at] >= step:
                continue
            for _ in self._spins:
                if words[at] >= step:
                    break
            else:
                return False
        return True

    def wait_signed(self, envelope: Envelope) -> None:
        """`wait` for the first step of an operation: then looks whether all have called the same."""
        self.wait(envelope)
        words, turn = self._words, _SIGNED + _SIGNATURE * (self.operations & 1)
        for other in self._others:
            at = other + turn
            if words[at] != words[self._own + turn]:
                call = _CALL.pack(words[at + 1], words[at + 2])
                self.engine.disagree(self._member(other), words[at] - digest(call), call, envelope)

    def _member(self, word: int) -> int:
        """Return the rank, as the engine numbers it, on whose lines `word` is."""
        return self._members[word // (_LINES * _WORDS)]

    def _wait_longer(self, at: int, envelope: Envelope) -> None:
        words, step = self._words, self.step
        until = time.monotonic() + self._longest
        for _ in self._yields:
            os.sched_yield()
            if words[at] >= step:
                return
            if time.monotonic() > until:
                break
        flag = self._own + _ASLEEP
        words[flag] = 1
        try:
            # A rank that publishes now may have looked at the flag before it was set, and before its counter is seen:
            # a write takes a moment to leave the processor, and nothing here waits for that. So we look once more,
            # after that moment.
            for _ in _MOMENT:
                if words[at] >= step:
                    return
            self.engine.watch(lambda: words[at] >= step, self._member(at), envelope)
        finally:
            words[flag] = 0

    def close(self) -> None:
        """Release the memory."""
        self._slots = np.empty((0, 2, 0), np.uint8)
        self._words.release()
        self._segment.close()
