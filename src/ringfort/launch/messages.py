"""What launchers tell each other through the cluster, in msgpack. Pure."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ringfort.errors import ProtocolError
from ringfort.launch.blame import Failure

TOPIC: Final = "ringfort.run"
"""Of the notes that carry these."""

Key = tuple[int, Annotated[str, msgspec.Meta(max_length=64)]]
"""Names an epoch: its number and leader."""
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Text = Annotated[str, msgspec.Meta(max_length=256)]


class Place(msgspec.Struct, frozen=True):
    """Where the ranks meet: on the first machine."""

    host: Text
    torch_port: Port
    """MASTER_PORT: rank 0 opens it, if the program uses torch.distributed."""
    ringfort_port: Port
    """Open already; rank 0 is handed the socket. Not the same: a program may use both."""


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """From the first member's launcher: let us start this epoch's ranks, and meet there."""

    epoch: Key
    title: Text
    place: Place


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """To the first: I would start `title` in this epoch."""

    epoch: Key
    title: Text


class Go(msgspec.Struct, frozen=True, tag="go"):
    """From the first: all are ready."""

    epoch: Key


class Done(msgspec.Struct, frozen=True, tag="done"):
    """All my ranks of this epoch have ended well."""

    epoch: Key


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Stop: this happened."""

    failure: Failure


LauncherMessage = Offer | Ready | Go | Done | Failed

_decoder: msgspec.msgpack.Decoder[LauncherMessage] = msgspec.msgpack.Decoder(LauncherMessage)


def encode(message: LauncherMessage) -> bytes:
    """The bytes of a message."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> LauncherMessage:
    """The message. Raises `ProtocolError` for bytes that are none, or that break a limit."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"what another launcher says cannot be read: {exc}") from exc
