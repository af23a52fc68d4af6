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
    """A peer went away without a goodbye."""

    peer: int
    reason: str
    by: int | None = None
    """The rank that found out."""


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


AbortReason = Lost | Left | Mismatch | Aborted | TimedOut

_decoder: msgspec.msgpack.Decoder[AbortReason] = msgspec.msgpack.Decoder(AbortReason)
_MAX_TEXT = 900
"""Characters of free text, so that the worst UTF-8 still fits a control frame."""


def encode(abort_reason: AbortReason) -> bytes:
    """Return the payload; long reasons are cut."""
    for name in ("reason", "what"):
        text = getattr(abort_reason, name, "")
        # A file name in it may contain characters that UTF-8 cannot encode.
        plain = text.encode(errors="replace").decode()
        if len(plain) > _MAX_TEXT:
            plain = plain[:_MAX_TEXT] + "..."
        if plain != text:
            abort_reason = msgspec.structs.replace(abort_reason, **{name: plain})
    payload = msgspec.msgpack.encode(abort_reason)
    assert len(payload) <= MAX_CONTROL
    return payload


def decode(payload: bytes) -> AbortReason:
    """Return the abort reason. Raises `ProtocolError` for a malformed payload."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise ProtocolError(f"Malformed abort reason: {exc}") from exc


def to_error(abort_reason: AbortReason, me: int) -> DistributedError:
    """Return the error that rank `me` raises for `abort_reason`. A new object per call: a raised exception keeps its
    traceback."""
    match abort_reason:
        case Lost(peer=peer, reason=reason, by=int() as other) if peer == me:  # to us, the other rank is lost
            error = PeerLostError(other, f"it reported that its connection to this rank failed: {reason}")
            error.args = (f"Rank {other} reported that its connection to this rank failed: {reason}",)
            return error
        case Lost(peer=peer, reason=reason):
            return PeerLostError(peer, reason)
        case Left(peer=peer):
            return ChannelClosedError(f"The backend of rank {peer} was closed", peer=peer)
        case Mismatch(rank=rank, ours=ours, peer=peer, theirs=theirs):
            # If a peer found the mismatch with us, the error here says that we differ from that peer.
            sides = (me, theirs, rank, ours) if peer == me else (rank, ours, peer, theirs)
            return CollectiveMismatchError(*sides, operation=abort_reason.operation)
        case TimedOut(rank=rank) if rank == me:
            return OperationTimeoutError(abort_reason.what, abort_reason.timeout, peer=abort_reason.peer)
        case TimedOut():
            return AbortedError(
                f"timeout after {abort_reason.timeout:g} s: {abort_reason.what}", peer=abort_reason.rank
            )
        case Aborted(rank=rank, reason=reason):
            return AbortedError(reason, peer=None if rank == me else rank)
