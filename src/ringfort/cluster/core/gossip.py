"""Messages on a control link that peers do not need in order to agree: the sender's machine, its link metrics, and
notes from its program. Also the codec for all control messages. Pure.

A receiver believes gossip only as far as a false statement can do no harm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Final

import msgspec

from ringfort.cluster.core.peer_messages import MAX_MEMBERS, MAX_MESSAGE_BYTES, AnyMessage, Hello, Message, PeerId, Text
from ringfort.cluster.core.topology import ConnectionProfile, NodeProfile
from ringfort.errors import ProtocolError

MAX_NOTE_BYTES: Final = 16 * 1024
"""Room for the last lines of a program that failed."""


class MachineReport(Message, frozen=True, tag="machine"):
    """The sender's machine. Sent once, when a link opens."""

    profile: NodeProfile
    uptime: Annotated[float, msgspec.Meta(ge=0, lt=1e10)] | None = None
    """Seconds since the sender joined the cluster. Its `profile.started` is a time of its own clock."""

    @classmethod
    def of(cls, profile: NodeProfile, now: float) -> MachineReport:
        """Return the report of a machine at the time `now`."""
        return cls(profile, None if profile.started is None else max(0.0, now - profile.started))

    def read(self, hello: Hello, now: float) -> NodeProfile:
        """Return the profile by this peer's clock. Who the sender is comes from its `hello`, which was checked."""
        member, started = hello.member, None if self.uptime is None else now - self.uptime
        return replace(
            self.profile, peer=member.peer, host=member.host, name=hello.name, version=hello.version, started=started
        )


class LinkReport(Message, frozen=True, tag="links"):
    """What the sender has measured of its links, by peer. Sent after each measurement; the leader orders the ring by
    it."""

    links: Annotated[dict[PeerId, ConnectionProfile], msgspec.Meta(max_length=MAX_MEMBERS)]


class Note(Message, frozen=True, tag="note"):
    """A message from the sender's program to the receiver's program."""

    topic: Text
    body: Annotated[bytes, msgspec.Meta(max_length=MAX_NOTE_BYTES)] = b""


Gossip = MachineReport | LinkReport | Note
_decoder: msgspec.msgpack.Decoder[AnyMessage | Gossip] = msgspec.msgpack.Decoder(AnyMessage | Gossip)


def encode(message: AnyMessage | Gossip) -> bytes:
    """Return a control message as bytes."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> AnyMessage | Gossip:
    """Return the control message in `data`. Raise `ProtocolError` if it is malformed or exceeds a limit."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a control message has at most {MAX_MESSAGE_BYTES} bytes, this one has {len(data)}")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"malformed control message: {exc}") from exc
