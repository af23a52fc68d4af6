"""What launchers tell each other through the cluster, in msgpack. Pure."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ringfort.errors import ProtocolError
from ringfort.launch.failure_report import MAX_LINE_BYTES, Failure
from ringfort.launch.run_options import MAX_RESTARTS

MAX_ARGUMENTS: Final = 2048
"""Characters of a program's arguments that are shown; a digest stands for all of them."""

Key = tuple[int, Annotated[str, msgspec.Meta(max_length=64)]]
"""Names an epoch: its number and leader."""
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Text = Annotated[str, msgspec.Meta(max_length=256)]
Digest = Annotated[str, msgspec.Meta(max_length=64)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_RESTARTS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]
Line = Annotated[str, msgspec.Meta(max_length=MAX_LINE_BYTES)]


class Place(msgspec.Struct, frozen=True):
    """Where the ranks meet: on the first machine."""

    host: Text
    torch_port: Port
    """MASTER_PORT: rank 0 opens it, if the program uses torch.distributed."""
    ringfort_port: Port
    """Open already; rank 0 is handed the socket. Not the same: a program may use both."""


class Ticket(msgspec.Struct, frozen=True, tag="ticket"):
    """To every launcher of this run that is met: what I was asked to run. Sent again when `restarts` changes."""

    host: Text
    script: Text
    """The script's name, without its folder: folders may differ between machines."""
    nodes: Text = "1"
    arguments: Annotated[str, msgspec.Meta(max_length=MAX_ARGUMENTS)] = ""
    arguments_digest: Digest = ""
    script_digest: Digest = ""
    """Empty for a module, which is not looked into."""
    modified: Seconds = 0.0
    """When the script was changed last, by its machine's clock."""
    max_restarts: Count = 0
    patience: Seconds = 0.0
    python: Text = ""
    version: Text = ""
    """Ringfort's."""
    restarts: Count = 0
    """How often this launcher has seen the run start again."""


class Running(msgspec.Struct, frozen=True, tag="running"):
    """To a launcher that is not in the run's epoch: the run of this name goes on without you."""

    seconds: Seconds
    """Since its start. Not a time of day: clocks differ."""
    hosts: Annotated[tuple[Text, ...], msgspec.Meta(max_length=256)]


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """From the first member's launcher: let us start this epoch's ranks, and meet there."""

    epoch: Key
    attempt: Count
    """0, or the how-manieth restart this is."""
    place: Place
    warnings: Annotated[tuple[Line, ...], msgspec.Meta(max_length=8)] = ()
    """How the machines differ, where that may be meant."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """To the first: I would start this attempt in this epoch."""

    epoch: Key
    attempt: Count


class Go(msgspec.Struct, frozen=True, tag="go"):
    """From the first: all are ready."""

    epoch: Key
    attempt: Count


class Done(msgspec.Struct, frozen=True, tag="done"):
    """All my ranks of this attempt have ended well."""

    epoch: Key
    attempt: Count


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Stop: this happened."""

    failure: Failure
    attempt: Count = 0


LauncherMessage = Ticket | Running | Offer | Ready | Go | Done | Failed

_decoder: msgspec.msgpack.Decoder[LauncherMessage] = msgspec.msgpack.Decoder(LauncherMessage)


def topic_of(run: str) -> str:
    """Of the notes that carry these: notes go to all in sight, and those of another run are not for this one."""
    return f"ringfort.run/{run}"


def encode(message: LauncherMessage) -> bytes:
    """The bytes of a message."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> LauncherMessage:
    """The message. Raises `ProtocolError` for bytes that are none, or that break a limit."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"what another launcher says cannot be read: {exc}") from exc
