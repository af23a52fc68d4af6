"""`RRef`: a value that stays with the rank that made it, and the count of who holds it.

The owner counts for each rank how often it holds a reference, and frees the value when nobody does. The law of this
file: **whoever passes a reference on tells the owner first, in the name of the one who gets it, and before it lets go
of its own.** Both go over one link, in order, so the owner never sees nobody while somebody is on the way to be told.
One who gets it and lets go at once may be heard of earlier, over another link: a count below zero waits for its rise.

What one rank has this one keep is bounded (`RpcConfig.max_references`). A value beyond the bound is not made: who asked
for it gets an `RpcOverloadedError` and lets go of it at once. So a rank that goes far beyond keeps to no rule, and its
link is closed.

A message's references are named in its first frame. From then on they are held by the rank that reads it, whether it
takes the message or not; a message of which nothing was sent gives them back. When a rank dies it holds nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import Any, Final
from weakref import ref

from ringfort.config import RpcConfig
from ringfort.errors import InvalidArgumentError, InvalidMessageError, RpcOverloadedError
from ringfort.rpc.framing import Failed, Failure
from ringfort.rpc.link import Line
from ringfort.rpc.protocol import Count, Reference, pack_count

MAX_RANKS: Final = 1 << 32
"""As many as the wire has numbers for."""
_SLACK: Final = 65536
"""References beyond the bound that are still counted: of calls under way, whose callers are about to hear that the
value was not made."""


class RRef:
    """A value on another rank, or on this one. It may be sent to any rank, as an argument or in a result.

    The owner keeps the value until the last `RRef` to it, on whatever rank, is gone or its rank has died.
    """

    def __init__(self, references: References, name: Reference) -> None:
        """Holds the reference: the owner has been told."""
        self._references = references
        self._name = name
        self._hold = references.hold(self, name)
        self.created: Future[Any] | None = None
        """Where it was asked for: done when the owner has the value."""

    @property
    def owner(self) -> int:
        """The rank that has the value."""
        return self._name.owner

    @property
    def is_owner(self) -> bool:
        """Whether that is this one."""
        return self._name.owner == self._references.rank

    def to_here(self, timeout: float | None = None) -> Any:
        """The value: a copy of it, unless this rank is the owner. Waits until there is one.

        Raises what making the value raised, as `RemoteError`; `RpcNoConnectionError` and `RpcPeerLostError` if the
        owner is gone; `RpcTimeoutError`.
        """
        return self._references.fetch(self, self._name, timeout)

    def local_value(self, timeout: float | None = None) -> Any:
        """At the owner: the value itself. Elsewhere raises `InvalidArgumentError`, where `to_here` would copy it."""
        if not self.is_owner:
            raise InvalidArgumentError("rref", self, f"its value is on rank {self.owner}; to_here() brings a copy")
        return self.to_here(timeout)

    def __repr__(self) -> str:
        return f"<RRef {self._name.creator}.{self._name.number} on rank {self._name.owner}>"


class _Hold(ref[RRef]):
    """One hold on a value. It knows of which when its `RRef` is gone, and may be given up before that."""

    __slots__ = ("is_over", "name")

    name: Reference
    is_over: bool


class _Entry:
    """A value that this rank owns, or will."""

    def __init__(self, teller: int) -> None:
        self.teller = teller
        """The rank that first spoke of it."""
        self.holders: dict[int, int] = {}
        self.outcome: Future[Any] = Future()
        """The value, or a `Failed`."""


class Giver:
    """Gives the references in one message to one rank."""

    def __init__(self, references: References, to: int) -> None:
        self._references, self._to = references, to
        self._given: list[Reference] = []

    def __call__(self, value: object) -> Reference | None:
        if not isinstance(value, RRef):
            return None
        if value._references is not self._references:  # pyright: ignore[reportPrivateUsage]
            raise InvalidMessageError(f"{value} belongs to another agent")
        if value._hold.is_over:  # pyright: ignore[reportPrivateUsage]
            raise InvalidMessageError(f"{value} was refused by its owner, so it cannot be passed on")
        name = value._name  # pyright: ignore[reportPrivateUsage]
        self._references.tell(Count(name, self._to, 1))
        self._given.append(name)
        return name

    def undo(self) -> None:
        """Nothing of the message was sent."""
        given, self._given = self._given, []
        for name in given:
            self._references.tell(Count(name, self._to, -1))


Fetch = Callable[[Reference, "float | None"], Any]


class References:
    """This rank's values that others may hold, and its own holds on theirs."""

    def __init__(
        self,
        rank: int,
        line_to: Callable[[int], Line],
        soon: Callable[[Callable[[], None]], None],
        *,
        world_size: int = MAX_RANKS,
        most: int = RpcConfig.max_references,
    ) -> None:
        """`soon` runs something in the agent's thread. `most` values are kept for each other rank."""
        self.rank = rank
        self.most = most
        self._world_size = world_size
        self._told: dict[int, int] = {}
        """How many entries each rank has first spoken of."""
        self.remote_fetch: Fetch
        """How to ask an owner; the agent sets it."""
        self._line_to = line_to
        self._soon = soon
        self._numbers = count(1)
        self._entries: dict[Reference, _Entry] = {}
        self._dead: set[int] = set()
        self._lock = threading.RLock()
        self._is_over = False
        # Python may collect an `RRef` anywhere, under any lock, and swallows what is raised meanwhile (see
        # transport/finalisers.py): nothing but `deque.append`, in C, is called then. The agent's thread looks later.
        self._holds: set[_Hold] = set()
        self._dropped: deque[_Hold] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    # --- holding --------------------------------------------------------------------------------------------------

    def new(self, owner: int) -> RRef:
        """A reference to a value that `owner` is about to be asked to make."""
        name = Reference(owner, self.rank, next(self._numbers))
        self.tell(Count(name, self.rank, 1))
        return RRef(self, name)

    def taken(self, name: Reference) -> RRef:
        """A reference that somebody has given to this rank."""
        return RRef(self, name)

    def giver(self, to: int) -> Giver:
        """For the references of one message to the rank `to`."""
        return Giver(self, to)

    def hold(self, rref: RRef, name: Reference) -> _Hold:
        """Notices when `rref` is gone."""
        hold = _Hold(rref, self._dropped.append)
        hold.name, hold.is_over = name, False
        self._holds.add(hold)
        if len(self._holds) == 1 and not self._is_over:
            self._soon(lambda: None)  # from now on it must look
        return hold

    def created(self, rref: RRef, created: Future[Any]) -> None:
        """The outcome of what was asked for with `new`. A value that its owner refused to make, for it keeps too many,
        is not held: so the owner need not keep the name either."""
        rref.created = created
        hold = rref._hold  # pyright: ignore[reportPrivateUsage]  # not the `RRef`: the future must not keep it

        def release_if_refused(created: Future[Any]) -> None:
            if not created.cancelled() and isinstance(created.exception(), RpcOverloadedError):
                hold.is_over = True
                self._dropped.append(hold)
                self._soon(lambda: None)

        created.add_done_callback(release_if_refused)

    def let_go(self) -> bool:
        """Tells the owners of `RRef`s that are gone. For the agent's thread; whether it must look again."""
        while self._dropped:
            hold = self._dropped[0]
            if hold in self._holds:  # else it was given up before its `RRef` was gone
                self._holds.remove(hold)
                self.tell(Count(hold.name, self.rank, -1))
            self._dropped.popleft()
        return bool(self._holds)

    def tell(self, told: Count) -> None:
        """Tells the owner who holds what."""
        if told.reference.owner == self.rank:
            self.count(told, self.rank)
        elif not self._is_over:
            self._line_to(told.reference.owner).control(pack_count(told))

    # --- owning ---------------------------------------------------------------------------------------------------

    def count(self, told: Count, teller: int) -> str:
        """The rank `teller` says that a value of this rank is held once more, or once less. Returns what is wrong with
        that, if it cannot come from a rank that keeps to the rules."""
        name, user, delta = told
        with self._lock:
            if user in self._dead or name.owner != self.rank:
                return ""
            if not 0 <= user < self._world_size:
                return f"it speaks of rank {user}, and there is none"
            if name not in self._entries and teller != self.rank and self.kept_for(teller) >= self.most + _SLACK:
                return f"it goes on to ask for values to be kept: max_references here is {self.most}"
            entry = self._entry(name, teller)
            entry.holders[user] = entry.holders.get(user, 0) + delta
            if not entry.holders[user]:
                del entry.holders[user]
            self._free(name, entry)
        return ""

    def kept_for(self, peer: int) -> int:
        """How many values are kept here, or expected, because `peer` spoke of them."""
        return self._told.get(peer, 0)

    def is_full_for(self, peer: int) -> bool:
        """Whether `peer` has this rank keep more than it may. A rank may keep its own values without a bound."""
        return peer != self.rank and self.kept_for(peer) > self.most

    def _entry(self, name: Reference, teller: int) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = _Entry(teller)
            self._told[teller] = self.kept_for(teller) + 1
        return entry

    def lost(self, peer: int) -> None:
        """`peer` holds nothing any more."""
        with self._lock:
            self._dead.add(peer)
            for name, entry in tuple(self._entries.items()):
                if entry.holders.pop(peer, None) is not None or name.creator == peer:
                    self._free(name, entry)

    def _free(self, name: Reference, entry: _Entry) -> None:
        if entry.holders or self._entries.get(name) is not entry:
            return
        del self._entries[name]
        self._told[entry.teller] -= 1
        if not entry.outcome.done():
            entry.outcome.set_result(Failed(Failure("message", message=f"nobody holds reference {name} any more")))

    def fulfil(self, name: Reference, result: Any) -> None:
        """The value that was asked for, or why there is none. If nobody holds it any more it is dropped."""
        with self._lock:
            entry = self._entries.get(name)
        if entry is not None and not entry.outcome.done():
            entry.outcome.set_result(result)

    def outcome(self, name: Reference, asker: int) -> Future[Any]:
        """The value, when there is one, for the rank `asker`. Of a reference that is not known here yet its maker may
        still be on the way."""
        with self._lock:
            if name.creator in self._dead and name not in self._entries:
                gone: Future[Any] = Future()
                gone.set_result(Failed(Failure("message", message=f"rank {name.creator}, which made it, is lost")))
                return gone
            return self._entry(name, asker).outcome

    def forget(self, name: Reference) -> None:
        """Who asked for the value has given up."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is not None:
                self._free(name, entry)

    # --- fetching -------------------------------------------------------------------------------------------------

    def fetch(self, rref: RRef, name: Reference, timeout: float | None) -> Any:
        """The value of a reference."""
        if rref.created is not None and rref.created.done():
            rref.created.result()  # if it could not be made: why not
        return self.remote_fetch(name, timeout)

    def abandon(self) -> None:
        """In a forked child: nobody is told of anything."""
        self._is_over = True

    def close(self) -> None:
        """Frees everything."""
        self._is_over = True
        with self._lock:
            entries, self._entries, self._told = self._entries, {}, {}
        for entry in entries.values():
            if not entry.outcome.done():
                entry.outcome.set_result(Failed(Failure("message", message="the owner has closed its agent")))
