"""Hellos: what a connection is for, and what ranks tell each other while a group forms, in msgpack. Pure."""

from __future__ import annotations

from typing import Union

import msgspec

from ringfort.errors import InvalidArgumentError, ProtocolError, RankTakenError, RefusedError, WorldSizeMismatchError
from ringfort.transport.machine import Machine
from ringfort.transport.segment import Offer

MAX_PURPOSE = 16 * 1024
"""Bytes of the hello inside a handshake, which an unauthenticated client may send too. Checked before it is read."""
MAX_HELLO = 64 * 1024
"""Bytes of any other hello: enough for the addresses and identities of a few hundred ranks."""


NOWHERE = Machine()
"""For a rank that does not tell its machine: no other rank shares memory with it."""


class Hello(msgspec.Struct, frozen=True):
    """The base of all hellos."""


class Join(Hello, frozen=True, tag="join"):
    """To rank 0: I am `rank` of `world_size`, and the other ranks find me at this address."""

    rank: int
    world_size: int
    host: str
    port: int
    machine: Machine = NOWHERE
    group: str = ""
    """The name of the group that the rank was started in; empty if it has none."""


class Welcome(Hello, frozen=True, tag="welcome"):
    """From rank 0, once all ranks have joined: every rank's address, and the token that its members know."""

    token: bytes
    addresses: list[tuple[str, int]]
    machine: Machine = NOWHERE
    """Rank 0's."""
    identities: list[bytes] = []
    """The key that each rank proved to rank 0, by rank; rank 0 proves its own in its handshake. Empty with encryption
    off."""


class Meet(Hello, frozen=True, tag="meet"):
    """To a lower rank: I am `rank` of the group with this `token`."""

    rank: int
    world_size: int
    token: bytes
    machine: Machine = NOWHERE


class Ready(Hello, frozen=True, tag="ready"):
    """My connections are open; from rank 0: all ranks' are. Also the answer to `Meet`, with the machine."""

    machine: Machine = NOWHERE


class Share(Hello, frozen=True, tag="share"):
    """To a higher rank on the same machine: the shared memory for the two of us. None if it could not be created."""

    offer: Offer | None


class Shared(Hello, frozen=True, tag="shared"):
    """The answer to `Share`: whether the memory could be opened. If not, both sides use the connection."""

    is_open: bool


class OfferConnections(Hello, frozen=True, tag="connections"):
    """To every rank, once connected: I want `count` connections with each. Higher ranks open theirs at this port, and
    prove with the token that they were told."""

    count: int
    port: int
    token: bytes
    members: bytes = b""
    """A digest of the keys that all ranks proved to me, by rank: every rank must be connected to the same machines."""


class ExtraConnection(Hello, frozen=True, tag="connection"):
    """To a lower rank: I am `rank`, and this is our connection `number`; the first one has number 0."""

    rank: int
    number: int
    token: bytes


class Calls(Hello, frozen=True, tag="calls"):
    """To a lower rank of an existing group: I am `rank`, and this connection is for RPC between our agents."""

    rank: int
    token: bytes


class Control(Hello, frozen=True, tag="control"):
    """This is a control link of a cluster; its own messages follow."""


class Probe(Hello, frozen=True, tag="probe"):
    """A short burst follows: measure its speed and answer."""


class OpenStream(Hello, frozen=True, tag="stream"):
    """From the peer `sender` of a cluster to the program of the peer `receiver`: a connection for `purpose`. The answer
    is `Ready`, once that program takes it."""

    sender: str
    receiver: str
    purpose: str


class Refused(Hello, frozen=True, tag="refused"):
    """The connection is refused. `code` is `world_size`, `rank_taken`, `rank_range`, `group`, `failed` or `stream`."""

    code: str
    reason: str


REFUSALS: dict[str, type[RefusedError]] = {
    "world_size": WorldSizeMismatchError,
    "rank_taken": RankTakenError,
}
"""The codes that have an error of their own."""

_kinds = tuple(Hello.__subclasses__())
_decoder: msgspec.msgpack.Decoder[Hello] = msgspec.msgpack.Decoder(Union[_kinds])  # noqa: UP007  # of any number


def encode(hello: Hello) -> bytes:
    """Return the bytes of a hello. Raises `InvalidArgumentError` if they are more than `MAX_HELLO`."""
    body = msgspec.msgpack.encode(hello)
    if len(body) > MAX_HELLO:
        raise InvalidArgumentError("world_size", len(body), "too many ranks: their addresses do not fit a hello")
    return body


def decode(data: bytes) -> Hello:
    """Return the hello. Raises `ProtocolError` for malformed bytes."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise ProtocolError(f"Malformed hello: {exc}") from exc


def to_error(refused: Refused, peer: str) -> RefusedError:
    """Return the error that the refused side raises."""
    return REFUSALS.get(refused.code, RefusedError)(refused.reason, peer=peer)
