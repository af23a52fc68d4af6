"""`RRef`: a reference to a value that stays with the rank that made it, and this rank's holds on such values.

The owner counts how often each rank holds a reference, and frees the value when no rank does (owned.py). The invariant
of this file: **a rank that passes a reference on tells the owner first, in the name of the receiver, and before it lets
its own reference go.** Both messages go over one link, in order, so the owner never counts zero while a reference is on
its way.

A message's references are listed in its first frame. The rank that reads this frame holds them from then on, whether it
takes the message or not; the sender takes them back if nothing of the message was sent.

**Lost connections.** If the rank that passed a reference on, its giver, has lost the owner or the receiver, nobody
knows which of the two messages was read. So the receiver puts it right: it counts in its own name what it still holds
from this giver, and then sends the owner a `Lost`, after which the owner forgets what the giver told. A rank does this
for all owners when it loses a rank, and for one owner when a giver says that it has lost that owner; so whoever loses a
rank tells all others. When a rank dies nothing is left of it, and no value is freed that another rank still holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any
from weakref import ref

from ringfort.errors import InvalidArgumentError, InvalidMessageError, RpcOverloadedError
from ringfort.rpc.owned import OwnedValues
from ringfort.rpc.protocol import Count, Lost, Reference, pack_count, pack_lost


class RRef:
    """A reference to a value on another rank, or on this one. It may be sent to any rank, in arguments or results.

    `RpcAgent.remote` returns one. The owner keeps the value until the last `RRef` to it, on any rank, is gone or its
    rank has died.

        rref = agent.remote(1, "load", "shard-17")  # the value stays on rank 1
        agent.rpc_sync(1, "total", rref)            # the function gets the RRef; local_value() is the value itself
        rref.to_here()                              # a copy
    """

    def __init__(self, references: References, name: Reference, giver: int) -> None:
        """Hold a reference that `giver` has told the owner of. `RpcAgent.remote` is how programs get one."""
        self._references = references
        self._name = name
        self._hold = references.hold(self, name, giver)
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

    __slots__ = ("giver", "is_over", "name")

    name: Reference
    giver: int
    """The rank in whose name the owner counts it: the one that passed the reference on, or this one."""
    is_over: bool


class References:
    """This rank's holds on values, its own and those of others."""

    fetch: Callable[[Reference, float | None], Any]
    """Gets the value of a reference, within a timeout. The agent sets it."""

    def __init__(
        self, rank: int, post: Callable[[int, bytes], None], wake: Callable[[], None], *, world_size: int, most: int
    ) -> None:
        """`post` sends a control frame to a rank, `wake` makes the agent's thread call `work`. `most` values are kept
        for each other rank."""
        self.rank = rank
        self.owned = OwnedValues(rank, world_size=world_size, most=most)
        self._world_size = world_size
        self._post = post
        self._wake = wake
        self._is_closed = False
        self._numbers = count(1)
        # Python may collect an `RRef` anywhere, under any lock, and swallows what is raised meanwhile (see
        # transport/finalisers.py). So only `deque.append`, which is written in C, runs then; the agent's thread looks
        # at the deque later.
        self._holds: set[_Hold] = set()
        self._dropped: deque[_Hold] = deque()
        self._apart: deque[tuple[int, int]] = deque()  # what `work` is to do: a rank, and another that it has lost

    # --- holding --------------------------------------------------------------------------------------------------

    def new(self, owner: int) -> RRef:
        """Return a reference to a value that `owner` is about to be asked to make."""
        name = Reference(owner, self.rank, next(self._numbers))
        self._tell(Count(name, self.rank, self.rank, 1))
        return RRef(self, name, self.rank)

    def hold(self, rref: RRef, name: Reference, giver: int) -> _Hold:
        """Notice when `rref` is gone."""
        hold = _Hold(rref, self._dropped.append)
        hold.name, hold.giver, hold.is_over = name, giver, False
        self._holds.add(hold)
        # In this order: `work` first notes who has parted and then looks for holds, so one of the two sees the other.
        if (giver, name.owner) in self.owned.parted:
            self._apart.append((giver, name.owner))
            self._wake()
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

    def work(self) -> bool:
        """Tell owners what has changed. For the agent's thread; return whether it must look again."""
        while self._apart:
            peer, lost = self._apart.popleft()
            self.owned.part(peer, lost)
            self._adopt(peer, lost)
            self._send(lost, pack_lost(Lost(peer)))
        while self._dropped:
            hold = self._dropped[0]
            if hold in self._holds:  # otherwise it was given up before its `RRef` was gone
                self._holds.remove(hold)
                self._tell(Count(hold.name, self.rank, hold.giver, -1))
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
            self._tell(Count(name, to, self.rank, delta))

    def _tell(self, told: Count) -> None:
        if told.reference.owner == self.rank:
            self.owned.count(told, self.rank)
        else:
            self._send(told.reference.owner, pack_count(told))

    def _send(self, peer: int, frame: bytes) -> None:
        if not self._is_closed:  # else the others are about to lose this rank, and its goodbye must be the last frame
            self._post(peer, frame)

    # --- what others tell -----------------------------------------------------------------------------------------

    def hear(self, told: Count | Lost, teller: int) -> str:
        """Take what the rank `teller` says. Return what is wrong with that if it breaks the protocol, else an empty
        string."""
        if isinstance(told, Count):
            return self.owned.count(told, teller)
        if not 0 <= told.rank < self._world_size:
            return f"it has lost rank {told.rank}, which does not exist"
        if told.rank != self.rank and (teller, told.rank) not in self.owned.parted:
            self._apart.append((teller, told.rank))
            self._wake()
        return ""

    def lost(self, peer: int, making: Collection[Reference] = ()) -> None:
        """`peer` is lost: nothing more comes from it. For the agent's thread. `making` has the values that `peer` asked
        for and that are still being made."""
        self._adopt(peer, None)
        for other in range(self._world_size):
            if other not in (self.rank, peer):
                self._send(other, pack_lost(Lost(peer)))
        self.owned.lost(peer, making)

    def _adopt(self, giver: int, owner: int | None) -> None:
        """Count in this rank's own name what it holds from `giver`, of one owner or of all. For the agent's thread,
        which also lets go: so each hold is let go in the name in which it is counted."""
        for hold in tuple(self._holds):
            if hold.giver == giver and owner in (None, hold.name.owner):
                hold.giver = self.rank
                self._tell(Count(hold.name, self.rank, self.rank, 1))

    def close(self) -> None:
        """Free everything, and tell others nothing more."""
        self._is_closed = True
        self.owned.close()
