"""The messages that launchers send each other through the cluster, in msgpack. Pure."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ringfort.errors import ProtocolError
from ringfort.launch.failure_report import Failure, Line
from ringfort.launch.run_options import MAX_RESTARTS

MAX_ARGUMENTS: Final = 2048
"""Characters of a program's arguments that are sent, for messages; a digest covers all of them."""

Key = tuple[int, Annotated[str, msgspec.Meta(max_length=64)]]
"""Identifies an epoch: its number and leader."""
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Text = Annotated[str, msgspec.Meta(max_length=256)]
Digest = Annotated[str, msgspec.Meta(max_length=64)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_RESTARTS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]


class Place(msgspec.Struct, frozen=True):
    """Where the ranks meet, on the first machine."""

    host: Text
    torch_port: Port
    """MASTER_PORT: rank 0 listens there if the program uses torch.distributed."""
    ringfort_port: Port
    """Open already; rank 0 gets the socket. Not the same port: a program may use both."""


class Ticket(msgspec.Struct, frozen=True, tag="ticket"):
    """To every launcher of this run: what the sender was asked to run. Sent again when `restarts` changes."""

    host: Text
    script: Text
    """The script's name, without its folder: folders may differ between machines."""
    nodes: Text = "1"
    arguments: Annotated[str, msgspec.Meta(max_length=MAX_ARGUMENTS)] = ""
    arguments_digest: Digest = ""
    script_digest: Digest = ""
    """Empty for a module."""
    modified: Seconds = 0.0
    """When the script was last changed, by the clock of its machine."""
    max_restarts: Count = 0
    patience: Seconds = 0.0
    torch_backend: Text = ""
    python: Text = ""
    version: Text = ""
    """The version of Ringfort."""
    restarts: Count = 0
    """How often the sender has seen the run restart."""


class Running(msgspec.Struct, frozen=True, tag="running"):
    """To a launcher outside the run's epoch: a run of this name has started already."""

    seconds: Seconds
    """Since the start. Not a time of day, because clocks differ."""
    hosts: Annotated[tuple[Text, ...], msgspec.Meta(max_length=256)]


class _OfAttempt(msgspec.Struct, frozen=True):
    """What is said about one attempt in one epoch."""

    epoch: Key
    attempt: Count
    """The number of the restart; 0 for the first attempt."""


class Offer(_OfAttempt, frozen=True, tag="offer"):
    """From the leader: start the ranks of this epoch, and let them meet at `place`."""

    place: Place
    warnings: Annotated[tuple[Line, ...], msgspec.Meta(max_length=8)] = ()
    """In what the machines differ, where that may be intended."""


class Ready(_OfAttempt, frozen=True, tag="ready"):
    """To the leader: the sender is ready to start this attempt in this epoch."""


class Go(_OfAttempt, frozen=True, tag="go"):
    """From the leader: all are ready, start."""


class Done(_OfAttempt, frozen=True, tag="done"):
    """All ranks of the sender have succeeded in this attempt."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Stop the ranks: this happened."""

    failure: Failure
    attempt: Count = 0


LauncherMessage = Ticket | Running | Offer | Ready | Go | Done | Failed

_decoder: msgspec.msgpack.Decoder[LauncherMessage] = msgspec.msgpack.Decoder(LauncherMessage)


def topic_of(run: str) -> str:
    """The topic of the notes that carry the messages of `run`: notes reach all peers, also those of other runs."""
    return f"ringfort.run/{run}"


def encode(message: LauncherMessage) -> bytes:
    """The bytes of a message."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> LauncherMessage:
    """The message. Raises `ProtocolError` for malformed bytes, and for values beyond a limit."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"malformed message of another launcher: {exc}") from exc
