"""What nodes say on a control link beside what their cores say: what machine this is, how fast links are, and notes of
the program. Pure. None of it is needed to agree, so all of it is only believed as far as it harms nobody."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ringfort.cluster.core.link_kinds import LinkKind
from ringfort.cluster.core.peer_messages import MAX_MEMBERS, MAX_MESSAGE_BYTES, AnyMessage, Message, Part, PeerId, Text
from ringfort.cluster.core.topology import Accelerator, ConnectionProfile, NodeProfile
from ringfort.errors import ProtocolError

MAX_NOTE_BYTES: Final = 16 * 1024
"""A few last lines of a program that failed fit."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**60)]
Speed = Annotated[float, msgspec.Meta(gt=0, lt=1e15)]


class Gpu(Part, frozen=True, forbid_unknown_fields=True):
    """One accelerator."""

    name: Text
    memory: Count = 0


class About(Message, frozen=True, forbid_unknown_fields=True, tag="about"):
    """The sender's machine. Sent once, at the beginning."""

    platform: Text = ""
    cores: Count = 1
    memory: Count = 0
    gpus: Annotated[tuple[Gpu, ...], msgspec.Meta(max_length=64)] = ()
    program: Text = ""
    uptime: Annotated[float, msgspec.Meta(ge=0, lt=1e10)] | None = None
    """Seconds for which the sender has been in the cluster."""


class Way(Part, frozen=True, forbid_unknown_fields=True):
    """What the sender has measured of its link with `peer`."""

    peer: PeerId
    kind: LinkKind = LinkKind.UNKNOWN
    latency: Speed | None = None
    bandwidth_out: Speed | None = None
    bandwidth_in: Speed | None = None


class Ways(Message, frozen=True, forbid_unknown_fields=True, tag="ways"):
    """All of the sender's links. Sent when something was measured; the leader orders the ring by them."""

    ways: Annotated[tuple[Way, ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()


class Note(Message, frozen=True, forbid_unknown_fields=True, tag="note"):
    """From the program of one peer to those of all others."""

    topic: Text
    body: Annotated[bytes, msgspec.Meta(max_length=MAX_NOTE_BYTES)] = b""


NodeMessage = About | Ways | Note
_decoder: msgspec.msgpack.Decoder[AnyMessage | NodeMessage] = msgspec.msgpack.Decoder(AnyMessage | NodeMessage)


def encode(message: AnyMessage | NodeMessage) -> bytes:
    """The bytes of a message of either kind."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> AnyMessage | NodeMessage:
    """The message of either kind. Raises `ProtocolError` for bytes that are none, or that break a limit."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a control message has at most {MAX_MESSAGE_BYTES} bytes, this one has {len(data)}")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"a control message cannot be read: {exc}") from exc


def about(profile: NodeProfile, now: float) -> About:
    """A profile as it is told at `now`."""
    gpus = tuple(Gpu(one.name[:256], one.memory) for one in profile.accelerators[:64])
    uptime = None if profile.started is None else max(0.0, now - profile.started)
    return About(profile.platform[:256], profile.cores, profile.memory, gpus, profile.program[:256], uptime)


def profile(peer: str, host: str, name: str, version: str, said: About, now: float) -> NodeProfile:
    """A profile as it was told at `now`."""
    return NodeProfile(
        peer=peer,
        host=host,
        name=name,
        platform=said.platform,
        cores=said.cores,
        memory=said.memory,
        accelerators=tuple(Accelerator(gpu.name, gpu.memory) for gpu in said.gpus),
        version=version,
        program=said.program,
        started=None if said.uptime is None else now - said.uptime,
    )


def connection(way: Way) -> ConnectionProfile:
    """A link as it was told."""
    return ConnectionProfile(
        kind=way.kind, latency=way.latency, bandwidth_out=way.bandwidth_out, bandwidth_in=way.bandwidth_in
    )
