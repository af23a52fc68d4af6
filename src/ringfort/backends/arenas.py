"""How the ranks of a group come to share a arena: one makes the memory, the others open it, and all agree that they
have. Whatever goes wrong, they go on over their links."""

from __future__ import annotations

import logging
import os
from struct import Struct
from typing import TYPE_CHECKING
from weakref import ref

import msgspec

from ringfort.errors import TransportError
from ringfort.transport.arena import CROWDED, EAGER, ONE_PROCESS, Arena, arena_bytes
from ringfort.transport.engine import Engine
from ringfort.transport.machine import cores
from ringfort.transport.messages import Envelope
from ringfort.transport.segment import Offer, Segment

if TYPE_CHECKING:
    from ringfort.backends.base import Backend

_log = logging.getLogger(__name__)

_OFFER = Struct("<H510s")
"""Where rank 0 says that the memory is, in so many bytes; in none if there is none."""
_ANSWER = Struct("<?q")
"""Whether a rank has opened it, and its process."""
_VERDICT = Struct("<??")
"""Whether all have, and whether some are threads of one process."""


class Arenas:
    """A group's way to its arena, and the arena's way to the group."""

    def __init__(self, group: Backend, engine: Engine, *, is_possible: bool, neighbours: int) -> None:
        """`is_possible` is the same at every rank; `neighbours` is how many ranks the host has in all."""
        self._group_ref = ref(group)  # which holds this: a cycle would keep its links open when nobody needs them
        self.engine = engine
        self._is_crowded = neighbours > cores()
        self._is_closed = False
        self._is_tried = False
        self.is_possible = is_possible

    @property
    def _group(self) -> Backend:
        group = self._group_ref()
        assert group is not None, "who calls holds it"
        return group

    def get(self, envelope: Envelope) -> Arena | None:
        """The arena; made by all ranks together when they first ask, in the collective of `envelope`. Raises what keeps
        a collective from beginning."""
        self.engine.check(envelope)
        arena = self._group.shared
        if arena is None and self.is_possible and not self._is_tried:
            self._is_tried = True
            arena = self._make(envelope)
            if not self._is_closed:
                self._group.shared = arena
        return arena

    def close(self) -> None:
        """The group is over. The memory goes when the last call that uses it ends."""
        self._is_closed = True
        group = self._group_ref()
        if group is None:
            return
        arena, group.shared = group.shared, None
        if arena is not None:
            group.persistent.clear()  # which knows the arena, and so would keep it

    # --- coming to share ------------------------------------------------------------------------------------------

    def _make(self, envelope: Envelope) -> Arena | None:
        group = self._group
        segment = _create(arena_bytes(group.world_size)) if group.rank == 0 else self._accept(envelope)
        is_shared = False
        try:
            is_shared, is_one_process = self._agree(segment, envelope)
        finally:
            if segment is not None:
                segment.settle() if is_shared else segment.close()
        if segment is None or not is_shared:
            return None
        patience = ONE_PROCESS if is_one_process else CROWDED if self._is_crowded else EAGER
        return Arena(segment, group.rank, group.members, self.engine, patience=patience)

    def _accept(self, envelope: Envelope) -> Segment | None:
        offer = bytearray(_OFFER.size)
        self._group.recv(offer, 0, tag=envelope)
        return _open(offer, arena_bytes(self._group.world_size))

    def _agree(self, segment: Segment | None, envelope: Envelope) -> tuple[bool, bool]:
        """Whether every rank has the memory, and whether some are threads of one process. Rank 0 asks and decides."""
        group = self._group
        verdict = bytearray(_VERDICT.size)
        if group.rank:
            group.send(_ANSWER.pack(segment is not None, os.getpid()), 0, tag=envelope)
            group.recv(verdict, 0, tag=envelope)
            return _VERDICT.unpack(verdict)
        others = range(1, group.world_size)
        offer = b"" if segment is None else msgspec.msgpack.encode(segment.offer)
        for rank in others:
            group.send(_OFFER.pack(len(offer), offer), rank, tag=envelope)
        is_shared, processes = segment is not None, {os.getpid()}
        answer = bytearray(_ANSWER.size)
        for rank in others:
            group.recv(answer, rank, tag=envelope)
            is_open, process = _ANSWER.unpack(answer)
            is_shared = is_shared and is_open
            processes.add(process)
        is_one_process = len(processes) < group.world_size
        for rank in others:
            group.send(_VERDICT.pack(is_shared, is_one_process), rank, tag=envelope)
        return is_shared, is_one_process


def _create(size: int) -> Segment | None:
    try:
        return Segment.create(size)
    except TransportError as exc:
        _log.debug("memory is not shared: %s", exc)
        return None


def _open(offer: bytearray, size: int) -> Segment | None:
    """The segment that rank 0 offers, or None if it offers none or this process cannot have it."""
    length, said = _OFFER.unpack(offer)
    if not length:
        return None
    try:
        return Segment.open(msgspec.msgpack.decode(said[:length], type=Offer), size)
    except (msgspec.MsgspecError, TransportError) as exc:
        _log.debug("memory is not shared: %s", exc)
        return None
