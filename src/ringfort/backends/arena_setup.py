"""How the ranks of a group come to share an arena: rank 0 makes the memory, the others open it, and all agree that they
have. Whatever goes wrong, they go on over their links."""

from __future__ import annotations

import logging
import os
from struct import Struct
from typing import TYPE_CHECKING

import msgspec

from ringfort.errors import TransportError
from ringfort.transport.arena import CROWDED, EAGER, ONE_PROCESS, Arena, arena_bytes
from ringfort.transport.machine import cores
from ringfort.transport.messages import Envelope
from ringfort.transport.segment import Offer, Segment

if TYPE_CHECKING:
    from ringfort.backends.group import Group

_log = logging.getLogger(__name__)

_OFFER = Struct("<H510s")
"""Where rank 0 says that the memory is: the length of the description, 0 if there is no memory, and the description."""
_ANSWER = Struct("<?q")
"""Whether a rank has opened it, and its process."""
_VERDICT = Struct("<??")
"""Whether all have, and whether some are threads of one process."""


def make_arena(group: Group, envelope: Envelope) -> Arena | None:
    """Return this rank's view of the group's arena, or None if not every rank can have one. Called by all ranks, in the
    collective of `envelope`."""
    segment = _segment(group, envelope)
    is_shared = False
    try:
        is_shared, is_one_process = _agree(group, segment, envelope)
    finally:
        if segment is not None:
            segment.settle() if is_shared else segment.close()
    if segment is None or not is_shared:
        return None
    patience = ONE_PROCESS if is_one_process else CROWDED if group.ranks_on_host > cores() else EAGER
    return Arena(segment, group.rank, group.members, group.engine, patience=patience)


def _segment(group: Group, envelope: Envelope) -> Segment | None:
    """Return the memory, which rank 0 makes and the others open; None if there is none or this process cannot have
    it."""
    size, offer = arena_bytes(group.world_size), bytearray(_OFFER.size)
    if group.rank:
        group.recv(offer, 0, envelope)
    length, said = _OFFER.unpack(offer)
    try:
        if group.rank == 0:
            return Segment.create(size)
        return Segment.open(msgspec.msgpack.decode(said[:length], type=Offer), size) if length else None
    except (msgspec.MsgspecError, TransportError) as exc:
        _log.debug("Shared memory is not used: %s", exc)
        return None


def _agree(group: Group, segment: Segment | None, envelope: Envelope) -> tuple[bool, bool]:
    """Whether every rank has the memory, and whether some are threads of one process. Rank 0 asks and decides."""
    verdict = bytearray(_VERDICT.size)
    if group.rank:
        group.send(_ANSWER.pack(segment is not None, os.getpid()), 0, envelope)
        group.recv(verdict, 0, envelope)
        return _VERDICT.unpack(verdict)
    others = range(1, group.world_size)
    offer = b"" if segment is None else msgspec.msgpack.encode(segment.offer)
    for rank in others:
        group.send(_OFFER.pack(len(offer), offer), rank, envelope)
    is_shared, processes = segment is not None, {os.getpid()}
    answer = bytearray(_ANSWER.size)
    for rank in others:
        group.recv(answer, rank, envelope)
        is_open, process = _ANSWER.unpack(answer)
        is_shared = is_shared and is_open
        processes.add(process)
    is_one_process = len(processes) < group.world_size
    for rank in others:
        group.send(_VERDICT.pack(is_shared, is_one_process), rank, envelope)
    return is_shared, is_one_process
