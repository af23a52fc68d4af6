"""`OwnedValues`: the values that this rank keeps for `RRef`s, and who holds them. Counts in, values freed; no I/O.

The owner counts each pair of a holder and its **giver**, the rank that passed the reference on to it. The giver tells
of the rise, the holder of the fall, each over its own link: a fall that is heard first makes a count below zero, which
waits for its rise. A value is freed when all counts are zero.

If a link between holder, giver and owner is cut, rise or fall may be lost. Then the holder counts in its own name what
it still holds from this giver, and after that sends a `Lost`: the owner forgets the pair, whatever its count is. See
references.py. What a lost rank itself held is counted until every other rank has sent a `Lost` for every lost rank:
until then one of them may have a reference that the lost rank passed on without the owner hearing of it.

How many values one rank may have this one keep is bounded (`RpcConfig.max_references`). A value beyond the bound is not
made: the rank that asked gets an `RpcOverloadedError` and lets go at once. A rank that goes far beyond the bound breaks
the protocol, and its link is closed.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, Final

from ringfort.rpc.protocol import Count, Reference
from ringfort.rpc.requests import Failure, invalid

SLACK: Final = 65536
"""References beyond the bound that are still counted: those of calls whose callers are about to be refused."""

Pair = tuple[int, int]
"""A holder and its giver. They are the same rank if it counts in its own name."""


class _Entry:
    """A value that this rank owns, or will own."""

    def __init__(self, teller: int) -> None:
        self.teller = teller
        """The rank that mentioned it first."""
        self.counts: Counter[Pair] = Counter()
        """Those that are not zero."""
        self.outcome: Future[Any] = Future()
        """The value, or a `Failure`."""


class OwnedValues:
    """The values of this rank that others may hold."""

    def __init__(self, rank: int, *, world_size: int, most: int) -> None:
        """`most` values are kept for each other rank."""
        self.most = most
        self.parted: set[Pair] = set()
        """`(a, b)` if a has sent a `Lost` for b: nothing that a and b tell of each other counts any more."""
        self._rank = rank
        self._world_size = world_size
        self._told: Counter[int] = Counter()  # how many values are kept or expected because each rank mentioned them
        self._entries: dict[Reference, _Entry] = {}
        self._leaving: set[int] = set()  # lost, but what they held is still counted
        self._gone: set[int] = set()  # lost, and they hold nothing
        self._ends: deque[tuple[Future[Any], Failure]] = deque()  # outcomes to be set when `_lock` is free
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    # --- counting -------------------------------------------------------------------------------------------------

    def count(self, told: Count, teller: int) -> str:
        """The rank `teller` says that a value of this rank has one holder more, or one less. Return what is wrong with
        that if it breaks the protocol, else an empty string."""
        name, user, giver, delta = told
        if name.owner != self._rank:
            return ""
        for rank in (user, giver):
            if not 0 <= rank < self._world_size:
                return f"it sent a count for rank {rank}, which does not exist"
        with self._lock:
            if user in self._gone or (user, giver) in self.parted:
                return ""
            if name not in self._entries and teller != self._rank and self._told[teller] >= self.most + SLACK:
                return f"it keeps asking for values to be kept: max_references here is {self.most}"
            counts = self._entry(name, teller).counts
            counts[user, giver] += delta
            if not counts[user, giver]:
                del counts[user, giver]
            self._free(name)
        self._set_ends()
        return ""

    def is_full_for(self, peer: int) -> bool:
        """Whether `peer` has this rank keep more than it may. A rank may keep its own values without a bound."""
        return peer != self._rank and self._told[peer] > self.most

    def part(self, holder: int, giver: int) -> None:
        """`holder` counts in its own name what it has from `giver`."""
        with self._lock:
            self.parted.add((holder, giver))
            self._drop(lambda pair: pair == (holder, giver))
            self._release()
        self._set_ends()

    def lost(self, peer: int, making: Collection[Reference] = ()) -> None:
        """`peer` is lost, and this rank counts in its own name what it has from `peer`. Of what `peer` has asked for
        and has no value yet, only `making` will have one."""
        with self._lock:
            self._leaving.add(peer)
            self._drop(lambda pair: pair == (self._rank, peer))
            for name, entry in tuple(self._entries.items()):
                if name.creator == peer:
                    if name not in making:
                        self._ends.append((entry.outcome, _never_asked(peer)))
                    self._free(name)  # somebody waits for it, but nobody holds it
            self._release()
        self._set_ends()

    def _release(self) -> None:
        """Forget what lost ranks held, if nobody can have a reference of them that is not counted. `_lock` is held."""
        others = set(range(self._world_size)) - {self._rank} - self._leaving - self._gone
        if all((other, lost) in self.parted for lost in self._leaving for other in others):
            gone, self._leaving = self._leaving, set()
            self._gone |= gone
            self._drop(lambda pair: pair[0] in gone)

    def _drop(self, is_over: Callable[[Pair], bool]) -> None:
        """Forget these counts. `_lock` is held."""
        for name, entry in tuple(self._entries.items()):
            over = [pair for pair in entry.counts if is_over(pair)]
            for pair in over:
                del entry.counts[pair]
            if over:
                self._free(name)

    # --- values ---------------------------------------------------------------------------------------------------

    def _entry(self, name: Reference, teller: int) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = _Entry(teller)
            self._told[teller] += 1
            if self._is_lost(name.creator):
                entry.outcome.set_result(_never_asked(name.creator))
        return entry

    def _is_lost(self, rank: int) -> bool:
        return rank in self._leaving or rank in self._gone

    def _free(self, name: Reference) -> None:
        """Drop a value that no rank holds. `_lock` is held."""
        entry = self._entries.get(name)
        if entry is not None and not entry.counts:
            del self._entries[name]
            self._told[entry.teller] -= 1
            self._ends.append((entry.outcome, invalid(f"no rank holds reference {name} any more")))

    def _set_ends(self) -> None:
        # Not under `_lock`: whoever waits for an outcome answers a call, and may wait for a thread that writes, which
        # may wait for `_lock` to take back a reference that it could not send.
        with suppress(IndexError):
            while True:
                _set(*self._ends.popleft())

    def fulfil(self, name: Reference, result: Any) -> None:
        """Set the value that was asked for, or a `Failure`. If no rank holds it any more it is dropped."""
        with self._lock:
            entry = self._entries.get(name)
        if entry is not None:
            _set(entry.outcome, result)

    def outcome(self, name: Reference, asker: int) -> Future[Any]:
        """The value, when there is one, for the rank `asker`. The request that makes it may still be on its way."""
        with self._lock:
            if self._is_lost(name.creator) and name not in self._entries:
                never: Future[Any] = Future()
                never.set_result(_never_asked(name.creator))
                return never
            return self._entry(name, asker).outcome

    def forget(self, name: Reference) -> None:
        """The rank that asked for the value has given up."""
        with self._lock:
            self._free(name)
        self._set_ends()

    def close(self) -> None:
        """Free everything."""
        with self._lock:
            entries, self._entries = self._entries, {}
            self._told.clear()
        for entry in entries.values():
            _set(entry.outcome, invalid("the owner has closed its agent"))


def _never_asked(creator: int) -> Failure:
    return invalid(f"rank {creator}, which asked for this value, is lost")


def _set(outcome: Future[Any], result: Any) -> None:
    with suppress(InvalidStateError):  # it has been set
        outcome.set_result(result)
