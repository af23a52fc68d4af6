"""What one rank tells the others when a group fails: the payload of an ABORT frame, and the error it becomes. Pure."""

from __future__ import annotations

import msgspec

from ringfort.errors import (
    AbortedError,
    ChannelClosedError,
    CollectiveMismatchError,
    DistributedError,
    OperationTimeoutError,
    PeerLostError,
    ProtocolError,
)
from ringfort.transport.frames import MAX_CONTROL


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """A peer went away without a word."""

    peer: int
    reason: str
    by: int | None = None
    """Who has found out."""


class Left(msgspec.Struct, frozen=True, tag="left"):
    """A peer closed its backend while the group still needed it."""

    peer: int


class Mismatch(msgspec.Struct, frozen=True, tag="mismatch"):
    """Two ranks called different things."""

    rank: int
    ours: str
    peer: int
    theirs: str
    operation: int


class Aborted(msgspec.Struct, frozen=True, tag="aborted"):
    """A rank gave up, for the reason it states."""

    rank: int
    reason: str


class TimedOut(msgspec.Struct, frozen=True, tag="timeout"):
    """A rank waited too long in a collective."""

    rank: int
    what: str
    timeout: float
    peer: int | None


Notice = Lost | Left | Mismatch | Aborted | TimedOut

_decoder: msgspec.msgpack.Decoder[Notice] = msgspec.msgpack.Decoder(Notice)
_MAX_TEXT = 900
"""Characters of free text, so that the worst UTF-8 still fits a control frame."""


def encode(notice: Notice) -> bytes:
    """The payload; long reasons are cut."""
    for name in ("reason", "what"):
        text = getattr(notice, name, "")
        # A file's name in it may hold what UTF-8 cannot.
        plain = text.encode(errors="replace").decode()
        if len(plain) > _MAX_TEXT:
            plain = plain[:_MAX_TEXT] + "..."
        if plain != text:
            notice = msgspec.structs.replace(notice, **{name: plain})
    payload = msgspec.msgpack.encode(notice)
    assert len(payload) <= MAX_CONTROL
    return payload


def decode(payload: bytes) -> Notice:
    """The notice; raises `ProtocolError` for anything else."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise ProtocolError(f"an ABORT frame holds no notice: {exc}") from exc


def to_error(notice: Notice, me: int) -> DistributedError:
    """The error that `notice` is at rank `me`. A new object each time: a raised exception keeps its traceback."""
    match notice:
        case Lost(peer=peer, reason=reason, by=int() as other) if peer == me:  # to us, the other one is out of reach
            return PeerLostError(other, f"it has lost this rank: {reason}")
        case Lost(peer=peer, reason=reason):
            return PeerLostError(peer, reason)
        case Left(peer=peer):
            return ChannelClosedError(f"rank {peer} has closed its backend", peer=peer)
        case Mismatch(peer=peer) if peer == me:  # found by the other side: to us, that is the one who differs
            return CollectiveMismatchError(me, notice.theirs, notice.rank, notice.ours, operation=notice.operation)
        case Mismatch():
            return CollectiveMismatchError(
                notice.rank, notice.ours, notice.peer, notice.theirs, operation=notice.operation
            )
        case TimedOut(rank=rank) if rank == me:
            return OperationTimeoutError(notice.what, notice.timeout, peer=notice.peer)
        case TimedOut():
            return AbortedError(f"{notice.what}: timeout after {notice.timeout:g} s", peer=notice.rank)
        case Aborted(rank=rank, reason=reason):
            return AbortedError(reason, peer=None if rank == me else rank)
