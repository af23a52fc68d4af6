"""`Group`: one agreed set of ranks, and everything that is true only for it.

A group never changes after it was made: an epoch that follows is another `Group`, and so is every sub-group, over the
same links. What a layer above finds out about these ranks (costs, plans, trials, compressors) it keeps in `part`, by
type, so that it dies with the group; no module has a table of them.

Collectives are made of the messages below. Ranks are the group's own; errors name a lost peer by its rank in the
outermost group, which is what a person knows it by. A group does not know its backend: who holds the backend keeps the
links open, and nothing that is cached here does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import KW_ONLY, InitVar, dataclass, field
from hashlib import blake2b
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

from ringfort.backends.arena_setup import make_arena
from ringfort.bootstrap.links import Routes
from ringfort.config import DistributedConfig, check_timeout
from ringfort.errors import (
    DistributedError,
    InvalidArgumentError,
    InvalidRankError,
    InvalidWorldSizeError,
    SelfSendError,
    UnsupportedArrayError,
)
from ringfort.transport import fast_path
from ringfort.transport.arena import Arena
from ringfort.transport.engine import Engine, end_all
from ringfort.transport.forks import WeakGroup
from ringfort.transport.frames import WINDOW
from ringfort.transport.links import Link
from ringfort.transport.locks import Thread
from ringfort.transport.machine import Machine, hosts_of
from ringfort.transport.messages import Envelope, Job, Receive, Send
from ringfort.transport.reducer import Reducer

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ringfort.backends.engines.native import Native

T = TypeVar("T")

MAX_TAG: Final = 2**31 - 1
"""The largest tag a caller may use."""
COLLECTIVE_TAG: Final = 1 << 63
"""The tag of all messages of collectives: their order within a group tells them apart."""
BARRIER_CALL: Final = b"\x01" + bytes(15)
"""The signature of a barrier, which has no arguments (collectives/signature.py)."""
_ENDING: Final = 20.0
"""Seconds that closing waits for each engine, which has bounds of its own: the last words, and a leader to act."""


class RingStep(NamedTuple):
    """One exchange of a pipelined ring."""

    out: Buffer
    into: Buffer
    reduce: Reducer | None = None


class Ending:
    """A part of a group that does not end by itself when nobody holds it any more."""

    def end(self) -> None:
        """Begin to end; do not wait."""

    def join(self, seconds: float) -> None:
        """Wait for the end, `seconds` at most."""


class _Life:
    """What a group shares with its sub-groups: whether their ranks are still a group."""

    def __init__(self) -> None:
        self.error: Callable[[], DistributedError] | None = None
        self.groups: WeakGroup[Group] = WeakGroup()


@dataclass(eq=False, repr=False)
class Group:
    """One set of ranks over an engine, which has a link to each of them.

    `Group()` makes the outermost group of `engines`: one for each connection that every two ranks have.
    """

    rank: int
    config: DistributedConfig
    engines: InitVar[Sequence[Engine]]
    machines: Mapping[int, Machine]
    """Where each rank of the outermost group runs; their number is its length."""
    _: KW_ONLY
    ring: tuple[int, ...] = ()
    """The order in which rings visit the ranks; that of their numbers where it is empty."""
    bandwidths: Mapping[int, float] = field(default_factory=dict[int, float])
    """Bytes per second between this rank and others, where they were measured before the group was formed."""
    speeds_out: Mapping[int, float] = field(default_factory=dict[int, float])
    """The same from this rank to others: home links send more slowly than they receive."""
    routes: Routes | None = None
    is_measured: bool = False
    """Whether AUTO measures the links before it first chooses. Not where time is virtual."""
    next_operation: Callable[[], int] = field(default_factory=lambda: count(1).__next__)
    """Returns the number of the group's next collective. Atomic, whatever other threads do."""
    native: Native | None = field(default=None, init=False)
    """The collectives of another engine (NCCL, Gloo, MPI), where the backend has one."""
    comm_id: int = field(default=0, init=False)
    """The communicator id: keeps this group's messages apart from those of other groups over the same links."""

    def __post_init__(self, engines: Sequence[Engine]) -> None:
        self.world_size = len(self.machines)
        self.members = tuple(range(self.world_size))
        """The ranks, as the outermost group numbers them."""
        self.hosts = hosts_of(self.machines)
        """For each rank the lowest rank of this group on the same host."""
        self.ranks_on_host = self.hosts.count(self.hosts[self.rank])
        """How many ranks this host has, of the outermost group."""
        self._life = _Life()
        self._begin(engines)

    def _begin(self, engines: Sequence[Engine]) -> None:
        self.engine = engines[0]
        self.now = self.engine.now
        """Seconds on the clock that timeouts are measured by."""
        self._links: list[Link] = [self.engine.links.get(member) for member in self.members]  # pyright: ignore[reportAttributeAccessIssue]
        self._member_set = frozenset(self.members)
        self._parts: dict[type[object], object] = {}
        self._twins: dict[tuple[int, ...], count[int]] = {}
        """How many sub-groups of exactly these members there were before, which tells them apart."""
        self._arena: Arena | None = None
        self._is_arena_tried = False
        machines = [self.machines[member] for member in self.members]
        self.shares_memory = (
            self.world_size > 1
            and len(set(self.hosts)) == 1
            and all(machine.shares and machine.is_ordered for machine in machines)
        )
        """Whether there may be an arena: the same at every rank."""
        self.fast_plans: dict[object, Any] = {}
        """Plans for the commonest call, an all-reduce of a NumPy array, by what tells them apart."""
        self.connections: tuple[Group, ...] = (self, *self._over_others(engines[1:])) if len(engines) > 1 else (self,)
        """This group over each of the connections that its ranks have with each other; the first is the group itself.
        They may be used from different threads at once, for parts of one collective."""
        self._life.groups.add(self)

    def _over_others(self, engines: Sequence[Engine]) -> Iterable[Group]:
        for number, engine in enumerate(engines, start=1):
            other = copy(self)
            other.engine, other.connections = engine, (other,)
            other._links = [engine.links.get(member) for member in self.members]  # pyright: ignore[reportAttributeAccessIssue]
            if number % 2:
                # Every other one goes round the other way: between hosts that are joined by cables, a ring uses only
                # one direction of each.
                other.ring = tuple(reversed(self.ring or range(self.world_size)))
            yield other

    # --- sub-groups, parts and the end ----------------------------------------------------------------------------

    def sub_group(
        self, members: Iterable[int], *, is_ordered: bool = False, label: str | None = None, is_brief: bool = False
    ) -> Group:
        """Return the group of some of these ranks, over the same links; see `SubBackend`."""
        self.check()
        chosen = self._choose(members, is_ordered=is_ordered)
        sub = copy(self)
        sub.rank, sub.world_size = chosen.index(self.rank), len(chosen)
        sub.members = tuple(self.members[member] for member in chosen)
        first: dict[int, int] = {}
        sub.hosts = tuple(first.setdefault(self.hosts[member], rank) for rank, member in enumerate(chosen))
        sub.ring = ()
        sub.bandwidths = {r: self.bandwidths[member] for r, member in enumerate(chosen) if member in self.bandwidths}
        sub.speeds_out = {r: self.speeds_out[member] for r, member in enumerate(chosen) if member in self.speeds_out}
        if self.routes is not None:
            places = {r: self.routes.hosts[member] for r, member in enumerate(chosen) if member in self.routes.hosts}
            sub.routes = self.routes._replace(hosts=places)
        sub.native = None
        sub.is_measured = self.is_measured and not is_brief
        sub.next_operation = count(1).__next__
        # Both functions are atomic, whatever other threads do.
        twin = next(self._twins.setdefault(chosen, count())) if label is None else label
        sub.comm_id = _comm_id(self.comm_id, sub.members, twin)
        sub._begin([connection.engine for connection in self.connections])
        sub.shares_memory = sub.shares_memory and not is_brief
        return sub

    def _choose(self, members: Iterable[int], *, is_ordered: bool) -> tuple[int, ...]:
        try:
            chosen = list(members)
        except TypeError as exc:
            raise InvalidArgumentError("members", members, "must be a list of ranks of the parent group") from exc
        for member in chosen:
            self.check_rank(member, "members")
        found = tuple(dict.fromkeys(chosen if is_ordered else sorted(chosen)))
        if not found:
            raise InvalidWorldSizeError(0)
        if self.rank not in found:
            raise InvalidRankError(self.rank, len(found), members=found)
        return found

    def part(self, kind: type[T], make: Callable[[], T] | None = None) -> T:
        """Return the group's one object of `kind`, which is made when it is first asked for: by `make`, if given."""
        found = self._parts.get(kind)
        if found is None:
            found = self._parts.setdefault(
                kind, (make or kind)()
            )  # of two threads that ask at once, both get the first one's
        return found  # pyright: ignore[reportReturnType]

    def check(self) -> None:
        """Raise what ended the group, if it has ended."""
        if self._life.error is not None:
            raise self._life.error()

    def keep_fast(self, key: object, plan: object) -> None:
        """Keep a plan in `fast_plans`, unless the group has ended, perhaps just now."""
        self.fast_plans[key] = plan
        if self._life.error is not None:
            self.fast_plans.clear()

    def measure_links(self) -> None:
        """Have AUTO measure the links before it chooses again: for a group that was made without, to be used at once.
        All ranks call it at the same place among their collectives."""
        self.is_measured = True
        self.fast_plans.clear()
        self._parts.clear()

    def forget(self) -> list[Ending]:
        """Release shared memory and plans, here and in all sub-groups. Calls in progress keep theirs until they end.
        Return what ends a moment later."""
        endings: list[Ending] = []
        for group in self._life.groups.alive():
            group.fast_plans.clear()
            endings += [part for part in tuple(group._parts.values()) if isinstance(part, Ending)]
            group._parts.clear()
            group._arena, group._is_arena_tried = None, True
            group.native = None
        for ending in endings:
            ending.end()
        return endings

    # --- messages -------------------------------------------------------------------------------------------------

    def envelope(self, call: bytes, timeout: float | None = None) -> Envelope:
        """Return the envelope of the group's next collective, whose messages all take `timeout` together."""
        return self.envelope_of(self.next_operation(), call, timeout)

    def envelope_of(self, operation: int, call: bytes, timeout: float | None = None) -> Envelope:
        """`envelope` for a collective that has its number."""
        if self._life.error is not None:
            raise self._life.error()
        seconds = self.check_timeout(timeout)
        return Envelope(
            self.comm_id, COLLECTIVE_TAG, operation, call, self._member_set, False, seconds, self.now() + seconds
        )

    def tagged(self, tag: int, timeout: float | None = None) -> Envelope:
        """Return the envelope of a message between two ranks."""
        if not isinstance(tag, int) or isinstance(tag, bool) or not 0 <= tag <= MAX_TAG:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError("tag", tag, f"must be a whole number from 0 to {MAX_TAG}")
        seconds = self.check_timeout(timeout)
        return Envelope(self.comm_id, tag, timeout=seconds, deadline=self.now() + seconds)

    def send(self, data: Buffer, dst: int, envelope: Envelope) -> None:
        """Send a message."""
        job = Job("send", envelope.timeout, cast("float", envelope.deadline))
        self._add_send(job, data, dst, envelope)
        self.engine.run(job)

    def recv(self, into: Buffer, src: int, envelope: Envelope, reduce: Reducer | None = None) -> None:
        """Receive a message of exactly the size of `into`; with `reduce`, reduce it into what is there."""
        job = Job("recv", envelope.timeout, cast("float", envelope.deadline))
        self._add_receive(job, into, src, envelope, reduce)
        self.engine.run(job)

    def exchange(
        self, out: Buffer, dst: int, into: Buffer, src: int, envelope: Envelope, reduce: Reducer | None = None
    ) -> None:
        """Send to one rank while receiving from another: the step that rings, trees and pairwise collectives are made
        of."""
        job = Job("exchange", envelope.timeout, cast("float", envelope.deadline))
        self._add_send(job, out, dst, envelope)
        self._add_receive(job, into, src, envelope, reduce)
        self.engine.run(job)

    def pipelined_ring(self, steps: Sequence[RingStep], dst: int, src: int, envelope: Envelope) -> None:
        """Run exchanges each of which sends what the one before has received: its `out` is the other's `into`. So it
        may be on its way while it arrives. What is sent before must not be needed afterwards: what comes later may
        overwrite it as soon as the peers have it."""
        if all(len(as_bytes(step.out, "out", writable=False)) <= fast_path.LARGEST for step in steps):
            for step in steps:  # the fast path of small messages is quicker
                self.exchange(step.out, dst, step.into, src, envelope, step.reduce)
            return
        job = Job("pipelined ring", envelope.timeout, cast("float", envelope.deadline))
        before: list[tuple[Send | Receive, Link]] = []
        source: Receive | None = None
        for step in steps:
            before.extend(job.halves())
            self._add_send(job, step.out, dst, envelope, source)
            self._add_receive(job, step.into, src, envelope, step.reduce)
            source = job.receive
        job.before = tuple(before)
        self.engine.run(job)

    def swap(self, data: bytes | memoryview, into: memoryview, peer: int, envelope: Envelope) -> None:
        """An `exchange` with one peer, in a collective, of messages that are one frame each."""
        if not self.engine.swap(data, into, self.members[peer], envelope):
            self.exchange(data, peer, into, peer, envelope)

    def _add_send(self, job: Job, data: Buffer, dst: int, envelope: Envelope, source: Receive | None = None) -> None:
        view = as_bytes(data, "data", writable=False)
        # In a pipelined ring the first one's clear-to-send is for all of them: their receives are posted together.
        is_rendezvous = source is None and (envelope.sync or len(view) > WINDOW)
        job.send = Send(view, envelope, is_rendezvous=is_rendezvous, source=source)
        job.send_link = self._links[dst]

    def _add_receive(self, job: Job, into: Buffer, src: int, envelope: Envelope, reducer: Reducer | None) -> None:
        view = as_bytes(into, "into", writable=True)
        if reducer is not None and len(view) % reducer.dtype.itemsize:
            raise InvalidArgumentError("into", f"{len(view)} bytes", f"must have whole elements of {reducer.dtype}")
        job.receive = Receive(view, envelope, reducer)
        job.receive_link = self._links[src]

    def barrier(self, timeout: float | None = None) -> None:
        """Return when every rank of the group has called it."""
        arena, envelope = self.arena(BARRIER_CALL, timeout), self.envelope(BARRIER_CALL, timeout)
        if arena is None:
            self.meet(envelope)
            return
        with arena:
            arena.begin(envelope)
            arena.publish()
            arena.wait_signed(envelope)

    def meet(self, envelope: Envelope) -> None:
        """Return when every rank is in the collective of `envelope`; raise if one is in another. Rounds of empty
        messages at doubling distances."""
        distance = 1
        while distance < self.world_size:
            dst, src = (self.rank + distance) % self.world_size, (self.rank - distance) % self.world_size
            self.exchange(b"", dst, bytearray(), src, envelope)
            distance *= 2

    def abort(self, reason: str) -> None:
        """Wake every call of this process with `AbortedError`, and tell the peers."""
        if not isinstance(reason, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError("reason", reason, "must be a string that says why")
        self._on_all(lambda engine: engine.abort(reason))

    def close(self) -> None:
        """Say goodbye and close all links. Calls that wait end with `ChannelClosedError`. For the outermost group."""
        self._on_all(lambda engine: engine.close())
        for ending in self.forget():
            ending.join(_ENDING)

    def let_go(self) -> None:
        """`close` for a group that nobody holds any more; waits for nothing. Peers that still need this rank have lost
        it."""
        for connection in self.connections:
            connection.engine.let_go()
        self.forget()

    def drop(self) -> None:
        """Close all links without a word, as a process that dies does. For fault injection."""
        self._on_all(lambda engine: engine.drop())

    def fail(self, error: Callable[[], DistributedError]) -> None:
        """End every call of this process on this group and its sub-groups, now and later, with `error`. The peers are
        not told. Returns at once."""
        self._life.error = self._life.error or error
        self.forget()
        for connection in self.connections:
            connection.engine.fail(error)

    def lose(self, peer: int, reason: str) -> None:
        """`peer` was found to be gone: end what waits for it, and every collective that it is part of. Returns at
        once."""
        for connection in self.connections:
            connection.engine.lose(peer, reason)

    def _on_all(self, end: Callable[[Engine], None]) -> None:
        """End all engines at the same time: each may wait a moment for last words to be taken."""
        others = [connection.engine for connection in self.connections[1:]]
        threads = [Thread(end, (engine,), name="ringfort-end") for engine in others]
        for thread in threads:
            thread.start()
        end(self.engine)
        for thread in threads:
            thread.join(_ENDING)

    def describe_calls(self, describe: Callable[[bytes], str]) -> None:
        """Say how to put the signature of a call into words, for errors about ranks that called different things."""
        for connection in self.connections:
            connection.engine.table.describe = describe

    def share_failure(self, failed: Envelope, envelope: Envelope) -> None:
        """What ended the messages of `failed`, if anything has, ends the collective of `envelope` at all ranks."""
        abort_reason = self.engine.abort_reason_of(failed)
        if abort_reason is not None:
            self.engine.end(envelope, abort_reason)

    def end_connections(self, failed: int, envelope: Envelope, error: BaseException) -> None:
        """What ended the collective of `envelope` on one of the `connections` ends it on all."""
        end_all([connection.engine for connection in self.connections], failed, envelope, error)

    def traffic(self) -> Traffic:
        """Return what this process has sent and received, over all groups that share its links."""
        counts = (count for each in self.connections for count in each.engine.traffic())
        return Traffic(*map(sum, zip(*counts, strict=True)))

    def sent(self) -> tuple[dict[int, int], int]:
        """Return the bytes that this process has sent over its links, by rank of the outermost group, and all bytes
        that it has received. What ranks write into a shared-memory arena is sent to nobody."""
        sent, received = dict[int, int](), 0
        for connection in self.connections:
            for peer, link in connection.engine.links.items():
                sent[peer] = sent.get(peer, 0) + link.outbound.bytes
                received += link.inbound.bytes
        return sent, received

    # --- shared memory --------------------------------------------------------------------------------------------

    def arena(self, call: bytes, timeout: float | None = None) -> Arena | None:
        """Return the memory that all ranks of this group share, if they do. The first time all ranks make it together:
        a collective of its own, on behalf of `call`."""
        if self.shares_memory and not self._is_arena_tried:
            envelope = self.envelope(call, timeout)
            self.engine.check(envelope)
            self._is_arena_tried = True
            arena = make_arena(self, envelope)
            if self._life.error is None:
                self._arena = arena
        return self._arena

    # --- checks ---------------------------------------------------------------------------------------------------

    def check_peer(self, peer: int, name: str) -> None:
        """Raise unless `peer` is another rank of this group."""
        self.check_rank(peer, name)
        if peer == self.rank:
            raise SelfSendError(peer)

    def check_rank(self, rank: int, name: str = "rank") -> None:
        """Raise `InvalidRankError` unless `rank` is one of this group's."""
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < self.world_size:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidRankError(rank, self.world_size, name=name)

    def check_timeout(self, timeout: float | None) -> float:
        """Return the seconds that a call may take."""
        if timeout is None:
            return self.config.timeout
        check_timeout(timeout)
        return timeout

    def __repr__(self) -> str:
        return f"<Group rank {self.rank} of {self.world_size}>"


class Traffic(NamedTuple):
    """What a process has moved since its group was formed."""

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0


def as_bytes(data: Buffer, name: str, *, writable: bool) -> memoryview:
    """Return the memory of `data` as flat bytes, not copied."""
    try:
        view = memoryview(cast("Any", data))
        if writable and view.readonly:
            raise UnsupportedArrayError(name, type(data).__name__, "read-only; pass a writable buffer")
        return view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")
    except TypeError as exc:
        if isinstance(exc, UnsupportedArrayError):
            raise
        # An array without elements cannot be cast; it has no bytes either.
        if getattr(data, "size", None) == 0:
            return memoryview(bytearray())
        why = f"must be contiguous memory with the buffer protocol ({exc})"
        raise UnsupportedArrayError(name, type(data).__name__, why) from exc


def _comm_id(parent: int, members: tuple[int, ...], twin: int | str) -> int:
    """Return 64 bits that the members agree on without communicating. Never 0, which is the outermost group."""
    text = repr((parent, members, twin)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") or 1
