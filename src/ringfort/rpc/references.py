"""`RRef`: a reference to a value that stays with the rank that made it, and the count of its holders.

The owner counts for each rank how often it holds a reference, and frees the value when no rank does. The invariant of
this file: **a rank that passes a reference on tells the owner first, in the name of the receiver, and before it lets
its own reference go.** Both messages go over one link, in order, so the owner never counts zero while a reference is on
its way. A receiver that lets go at once may be heard earlier, over another link: a count below zero waits for its rise.

How many values one rank may have this one keep is bounded (`RpcConfig.max_references`). A value beyond the bound is not
made: the rank that asked gets an `RpcOverloadedError` and lets go at once. A rank that goes far beyond the bound breaks
the protocol, and its link is closed.

A message's references are listed in its first frame. The rank that reads this frame holds them from then on, whether it
takes the message or not; the sender takes them back if nothing of the message was sent. A lost rank holds nothing.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any, Final
from weakref import ref

from ringfort.errors import InvalidArgumentError, InvalidMessageError, RpcOverloadedError
from ringfort.rpc.protocol import Count, Reference, pack_count
from ringfort.rpc.requests import invalid

SLACK: Final = 65536
"""References beyond the bound that are still counted: those of calls whose callers are about to be refused."""


class RRef:
    """A reference to a value on another rank, or on this one. It may be sent to any rank, in arguments or results.

    `RpcAgent.remote` returns one. The owner keeps the value until the last `RRef` to it, on any rank, is gone or its
    rank has died.

        rref = agent.remote(1, "load", "shard-17")  # the value stays on rank 1
        agent.rpc_sync(1, "total", rref)            # the function gets the RRef; local_value() is the value itself
        rref.to_here()                              # a copy
    """

    def __init__(self, references: References, name: Reference) -> None:
        """Hold a reference that the owner already counts. `RpcAgent.remote` is how programs get one."""
        self._references = references
        self._name = name
        self._hold = references.hold(self, name)
        self.created: Future[Any] | None = None
        """At the rank that asked for the value: done when the owner has it."""

    @property
    def owner(self) -> int:
        """The rank that has the value."""
        return self._name.owner

    @property
    def is_owner(self) -> bool:
        """Whether this rank has the value."""
        return self._name.owner == self._references.rank

    def to_here(self, timeout: float | None = None) -> Any:
        """Return a copy of the value, or at the owner the value itself. Waits until there is one.

        Raises what making the value raised, as `RemoteError`; `RpcNoConnectionError` and `RpcPeerLostError` if the
        owner is gone; `RpcTimeoutError` after `timeout` seconds, by default the agent's timeout.
        """
        if self.created is not None and self.created.done():
            self.created.result()  # raises if the value could not be made
        return self._references.fetch(self._name, timeout)

    def local_value(self, timeout: float | None = None) -> Any:
        """Return the value itself, at its owner. Raises `InvalidArgumentError` elsewhere; otherwise as `to_here`."""
        if not self.is_owner:
            raise InvalidArgumentError("rref", self, f"the value is on rank {self.owner}; to_here() returns a copy")
        return self.to_here(timeout)

    def __repr__(self) -> str:
        return f"<RRef {self._name.creator}.{self._name.number} on rank {self._name.owner}>"


class _Hold(ref[RRef]):
    """One hold on a value, which outlives its `RRef`. It may be given up before the `RRef` is gone."""

    __slots__ = ("is_over", "name")

    name: Reference
    is_over: bool


class _Entry:
    """A value that this rank owns, or will own."""

    def __init__(self, teller: int) -> None:
        self.teller = teller
        """The rank that mentioned it first."""
        self.holders: Counter[int] = Counter()
        self.outcome: Future[Any] = Future()
        """The value, or a `Failure`."""


class References:
    """The values of this rank that others may hold, and its own holds on the values of others."""

    fetch: Callable[[Reference, float | None], Any]
    """Gets the value of a reference, within a timeout. The agent sets it."""

    def __init__(
        self, rank: int, post: Callable[[int, bytes], None], wake: Callable[[], None], *, world_size: int, most: int
    ) -> None:
        """`post` sends a control frame to a rank, `wake` makes the agent's thread call `let_go`. `most` values are kept
        for each other rank."""
        self.rank = rank
        self.most = most
        self._world_size = world_size
        self._told: Counter[int] = Counter()  # how many values are kept or expected because each rank mentioned them
        self._post = post
        self._wake = wake
        self._numbers = count(1)
        self._entries: dict[Reference, _Entry] = {}
        self._lost: set[int] = set()
        self._lock = threading.RLock()
        # Python may collect an `RRef` anywhere, under any lock, and swallows what is raised meanwhile (see
        # transport/finalisers.py). So only `deque.append`, which is written in C, runs then; the agent's thread looks
        # at the deque later.
        self._holds: set[_Hold] = set()
        self._dropped: deque[_Hold] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    # --- holding --------------------------------------------------------------------------------------------------

    def new(self, owner: int) -> RRef:
        """Return a reference to a value that `owner` is about to be asked to make."""
        name = Reference(owner, self.rank, next(self._numbers))
        self._tell(Count(name, self.rank, 1))
        return RRef(self, name)

    def hold(self, rref: RRef, name: Reference) -> _Hold:
        """Notice when `rref` is gone."""
        hold = _Hold(rref, self._dropped.append)
        hold.name, hold.is_over = name, False
        self._holds.add(hold)
        if len(self._holds) == 1:
            self._wake()  # the thread must look from now on
        return hold

    def created(self, rref: RRef, created: Future[Any]) -> None:
        """Set the outcome of what was asked for with `new`. A value that its owner refused to make, because it keeps
        too many, is not held: so the owner need not keep the name either."""
        rref.created = created
        hold = rref._hold  # pyright: ignore[reportPrivateUsage]  # not the `RRef`: the future must not keep it

        def release_if_refused(created: Future[Any]) -> None:
            if not created.cancelled() and isinstance(created.exception(), RpcOverloadedError):
                hold.is_over = True
                self._dropped.append(hold)
                self._wake()

        created.add_done_callback(release_if_refused)

    def let_go(self) -> bool:
        """Tell the owners of `RRef`s that are gone. For the agent's thread; return whether it must look again."""
        while self._dropped:
            hold = self._dropped[0]
            if hold in self._holds:  # otherwise it was given up before its `RRef` was gone
                self._holds.remove(hold)
                self._tell(Count(hold.name, self.rank, -1))
            self._dropped.popleft()
        return bool(self._holds)

    def name_of(self, value: object) -> Reference | None:
        """Return the name of an `RRef` that is to be sent; None for another object. Raises `InvalidMessageError`."""
        if not isinstance(value, RRef):
            return None
        if value._references is not self:  # pyright: ignore[reportPrivateUsage]
            raise InvalidMessageError(f"{value} belongs to another agent")
        if value._hold.is_over:  # pyright: ignore[reportPrivateUsage]
            raise InvalidMessageError(f"{value} was refused by its owner, so it cannot be passed on")
        return value._name  # pyright: ignore[reportPrivateUsage]

    def give(self, names: Sequence[Reference], to: int, delta: int = 1) -> None:
        """Tell the owners that the rank `to` holds these references, before it is sent them. With a `delta` of -1, take
        them back."""
        for name in names:
            self._tell(Count(name, to, delta))

    def _tell(self, told: Count) -> None:
        if told.reference.owner == self.rank:
            self.count(told, self.rank)
        else:
            self._post(told.reference.owner, pack_count(told))

    # --- owning ---------------------------------------------------------------------------------------------------

    def count(self, told: Count, teller: int) -> str:
        """The rank `teller` says that a value of this rank has one holder more, or one less. Return what is wrong with
        that if it breaks the protocol, else an empty string."""
        name, user, delta = told
        with self._lock:
            if user in self._lost or name.owner != self.rank:
                return ""
            if not 0 <= user < self._world_size:
                return f"it sent a count for rank {user}, which does not exist"
            if name not in self._entries and teller != self.rank and self._told[teller] >= self.most + SLACK:
                return f"it keeps asking for values to be kept: max_references here is {self.most}"
            entry = self._entry(name, teller)
            entry.holders[user] += delta
            if not entry.holders[user]:
                del entry.holders[user]
            self._free(name)
        return ""

    def is_full_for(self, peer: int) -> bool:
        """Whether `peer` has this rank keep more than it may. A rank may keep its own values without a bound."""
        return peer != self.rank and self._told[peer] > self.most

    def _entry(self, name: Reference, teller: int) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = _Entry(teller)
            self._told[teller] += 1
        return entry

    def lost(self, peer: int) -> None:
        """Free what only `peer` held."""
        with self._lock:
            self._lost.add(peer)
            for name, entry in tuple(self._entries.items()):
                if entry.holders.pop(peer, None) is not None or name.creator == peer:
                    self._free(name)

    def _free(self, name: Reference) -> None:
        """Drop a value that no rank holds. `_lock` is held."""
        entry = self._entries.get(name)
        if entry is not None and not entry.holders:
            del self._entries[name]
            self._told[entry.teller] -= 1
            _set(entry.outcome, invalid(f"no rank holds reference {name} any more"))

    def fulfil(self, name: Reference, result: Any) -> None:
        """Set the value that was asked for, or a `Failure`. If no rank holds it any more it is dropped."""
        with self._lock:
            entry = self._entries.get(name)
        if entry is not None:
            _set(entry.outcome, result)

    def outcome(self, name: Reference, asker: int) -> Future[Any]:
        """The value, when there is one, for the rank `asker`. The request that makes it may still be on its way."""
        with self._lock:
            if name.creator in self._lost and name not in self._entries:
                gone: Future[Any] = Future()
                gone.set_result(invalid(f"rank {name.creator}, which asked for this value, is lost"))
                return gone
            return self._entry(name, asker).outcome

    def forget(self, name: Reference) -> None:
        """The rank that asked for the value has given up."""
        with self._lock:
            self._free(name)

    def close(self) -> None:
        """Free everything."""
        with self._lock:
            entries, self._entries = self._entries, {}
            self._told.clear()
        for entry in entries.values():
            _set(entry.outcome, invalid("the owner has closed its agent"))


def _set(outcome: Future[Any], result: Any) -> None:
    if not outcome.done():
        outcome.set_result(result)
