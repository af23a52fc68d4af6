"""`SubBackend`: some ranks of a group, as a group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from hashlib import blake2b
from typing import TYPE_CHECKING

from ringfort.backends.base import Backend, RingStep, Tag, Traffic, Ways
from ringfort.backends.group import Group
from ringfort.backends.mesh import MeshBackend
from ringfort.errors import InvalidArgumentError, InvalidRankError, InvalidWorldSizeError
from ringfort.transport.arena import Arena
from ringfort.transport.messages import Envelope
from ringfort.transport.reducer import Reducer

if TYPE_CHECKING:
    from typing_extensions import Buffer


class SubBackend(Backend):
    """A group over the links of another. Every member must make it, with the same members, in the same order among the
    sub-groups of those members. It works at the same time as its parent and its siblings, from any threads.

    Ranks are this group's own, 0 to `world_size - 1` in the order of the parent's ranks; errors name a lost peer by its
    rank in the outermost group, which is what a person knows it by.
    """

    def __init__(
        self,
        parent: Backend,
        members: Iterable[int],
        *,
        is_ordered: bool = False,
        label: str | None = None,
        is_brief: bool = False,
    ) -> None:
        """`members` are ranks of `parent`; repetition does not matter, nor does order unless `is_ordered`: then it is
        that of the ranks here. With a `label`, which must be the same at all members and no other group's of theirs,
        their sub-groups may be made in any order. A group that `is_brief`, made for a few collectives, spends no time
        on measuring links and on shared memory of its own.

        Raises `InvalidWorldSizeError` without members, `InvalidRankError` if this rank is not among them or one is no
        rank of the parent."""
        parent = parent.current  # a group that follows it has other ranks, and sub-groups of its own
        parent.group.check()
        try:
            chosen = list(members)
        except TypeError as exc:
            raise InvalidArgumentError("members", members, "must be a list of ranks of the parent") from exc
        for member in chosen:
            if not isinstance(member, int) or isinstance(member, bool) or not 0 <= member < parent.world_size:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InvalidRankError(member, parent.world_size, name="members")
        locals_ = tuple(dict.fromkeys(chosen if is_ordered else sorted(chosen)))
        if not locals_:
            raise InvalidWorldSizeError(0)
        if parent.rank not in locals_:
            raise InvalidRankError(parent.rank, len(locals_), members=locals_)
        super().__init__(locals_.index(parent.rank), len(locals_), parent.config, group=Group(parent.group))
        self.parent = parent
        self._in_parent = locals_
        # Messages go straight to the outermost backend: nesting costs nothing.
        self._outermost: Backend = parent._outermost if isinstance(parent, SubBackend) else parent
        self.is_measured = parent.is_measured and not is_brief
        self.speeds = {rank: parent.speeds[member] for rank, member in enumerate(locals_) if member in parent.speeds}
        self._members = tuple(parent.members[member] for member in locals_)
        self._member_set = frozenset(self._members)
        mesh = None if is_brief else self._outermost
        self._arenas = mesh.arenas_for(self) if isinstance(mesh, MeshBackend) else None
        twin = parent.count_sub_group(locals_) if label is None else label
        self._comm_id = _comm_id(parent.comm_id, self._members, twin)

    @property
    def comm_id(self) -> int:
        return self._comm_id

    @property
    def members(self) -> tuple[int, ...]:
        return self._members

    @property
    def hosts(self) -> tuple[int, ...]:
        outer = self._outermost.hosts
        first: dict[int, int] = {}
        return tuple(first.setdefault(outer[member], rank) for rank, member in enumerate(self._members))

    @property
    def ways(self) -> Ways | None:
        outer = self._outermost.ways
        if outer is None:
            return None
        places = {rank: outer.hosts[member] for rank, member in enumerate(self._members) if member in outer.hosts}
        return Ways(places, outer.credentials)

    @property
    def connections(self) -> tuple[Backend, ...]:
        outer = self._outermost.connections
        return (self,) if len(outer) == 1 else (self, *(self._over(connection) for connection in outer[1:]))

    def _over(self, connection: Backend) -> SubBackend:
        """The same group over other links of the outermost."""
        group = copy(self)
        group._outermost = connection
        if connection.ring != self._outermost.ring:  # that one goes round the other way
            group.ring = tuple(reversed(self.ring or range(self.world_size)))
        return group

    def share_failure(self, failed: Envelope, envelope: Envelope) -> None:
        self._outermost.share_failure(failed, envelope)

    def end_connections(self, failed: int, envelope: Envelope, error: BaseException) -> None:
        self._outermost.end_connections(failed, envelope, error)

    @property
    def shares_memory(self) -> bool:
        return self._arenas is not None and self._arenas.is_possible

    def arena(self, envelope: Envelope) -> Arena | None:
        return None if self._arenas is None else self._arenas.get(envelope)

    def to_global(self, rank: int) -> int:
        """The parent's rank of this group's `rank`. Raises `InvalidRankError`."""
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < self.world_size:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidRankError(rank, self.world_size)
        return self._in_parent[rank]

    def to_local(self, rank: int) -> int:
        """This group's rank of the parent's `rank`. Raises `InvalidRankError` if it is not a member."""
        if isinstance(rank, bool) or rank not in self._in_parent:
            raise InvalidRankError(rank, self.world_size, members=self._in_parent)
        return self._in_parent.index(rank)

    def send(self, data: Buffer, dst: int, *, tag: Tag = 0, timeout: float | None = None) -> None:
        self.check_peer(dst, "dst")
        self._outermost.send(data, self._members[dst], tag=self.check_tag(tag), timeout=timeout)

    def recv(
        self, into: Buffer, src: int, *, reduce: Reducer | None = None, tag: Tag = 0, timeout: float | None = None
    ) -> None:
        self.check_peer(src, "src")
        self._outermost.recv(into, self._members[src], reduce=reduce, tag=self.check_tag(tag), timeout=timeout)

    def exchange(
        self,
        out: Buffer,
        dst: int,
        into: Buffer,
        src: int,
        *,
        reduce: Reducer | None = None,
        tag: Tag = 0,
        timeout: float | None = None,
    ) -> None:
        self.check_peer(dst, "dst")
        self.check_peer(src, "src")
        self._outermost.exchange(
            out,
            self._members[dst],
            into,
            self._members[src],
            reduce=reduce,
            tag=self.check_tag(tag),
            timeout=timeout,
        )

    def pipelined_ring(
        self, ring_steps: Sequence[RingStep], dst: int, src: int, *, tag: Tag = 0, timeout: float | None = None
    ) -> None:
        self.check_peer(dst, "dst")
        self.check_peer(src, "src")
        self._outermost.pipelined_ring(
            ring_steps, self._members[dst], self._members[src], tag=self.check_tag(tag), timeout=timeout
        )

    def swap(self, data: bytes | memoryview, into: memoryview, peer: int, envelope: Envelope) -> None:
        self._outermost.swap(data, into, self._members[peer], envelope)

    def envelope_of(self, operation: int, call: bytes, timeout: float | None = None) -> Envelope:
        self.group.check()  # a group of one asks nobody else, and would go on after its epoch
        return super().envelope_of(operation, call, timeout)

    def abort(self, reason: str) -> None:
        """Aborts the whole process's group: a rank that gives up cannot serve its other groups either."""
        self._outermost.abort(reason)

    def close(self) -> None:
        """Does nothing: the links are the parent's."""

    def now(self) -> float:
        return self._outermost.now()

    def traffic(self) -> Traffic:
        return self._outermost.traffic()


def _comm_id(parent: int, members: tuple[int, ...], twin: int | str) -> int:
    """64 bits that the members agree on without a word. Never 0, which is the outermost group."""
    text = repr((parent, members, twin)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") or 1
