"""What a connection is for, and what ranks say to each other while a group forms, in msgpack. Pure."""

from __future__ import annotations

import msgspec

from ringfort.errors import InvalidArgumentError, ProtocolError, RankTakenError, RefusedError, WorldSizeMismatchError
from ringfort.transport.machine import Machine
from ringfort.transport.segment import Offer

MAX_PURPOSE = 16 * 1024
"""Bytes of the hello inside a handshake, which a stranger may send too. Checked before anything is read."""
MAX_HELLO = 64 * 1024
"""Bytes of any other: the addresses and identities of a group of a few hundred ranks fit."""


NOWHERE = Machine()
"""What a rank says that does not say where it is: nobody shares its machine."""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """To rank 0: I am `rank` of `world_size`, and the other ranks find me at this address."""

    rank: int
    world_size: int
    host: str
    port: int
    machine: Machine = NOWHERE


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """From rank 0, once all are there: where everyone is, and the token that proves that one was told."""

    token: bytes
    addresses: list[tuple[str, int]]
    machine: Machine = NOWHERE
    """Rank 0's."""
    identities: list[bytes] = []
    """The key that each rank proved to rank 0, by rank; rank 0's own is in its handshake. Empty with encryption off."""


class Meet(msgspec.Struct, frozen=True, tag="meet"):
    """To another rank: I am `rank` of the group of `token`."""

    rank: int
    world_size: int
    token: bytes
    machine: Machine = NOWHERE


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """My links are up. From rank 0: everybody's are. Answers a `Meet` too, and then says on which machine."""

    machine: Machine = NOWHERE


class Share(msgspec.Struct, frozen=True, tag="share"):
    """To a higher rank on the same machine: this is the memory for the two of us. None if there is none to be had."""

    offer: Offer | None


class Shared(msgspec.Struct, frozen=True, tag="shared"):
    """The answer: whether it could be opened. If not, both stay on the connection."""

    is_open: bool


class OfferConnections(msgspec.Struct, frozen=True, tag="connections"):
    """To everybody, once linked: this is how many connections I want with each. Those above me open the others at this
    port, and prove with the token that they were told."""

    count: int
    port: int
    token: bytes
    members: bytes = b""
    """A digest of the keys that all ranks proved to me, by rank: every rank must have met the same machines."""


class ExtraConnection(msgspec.Struct, frozen=True, tag="connection"):
    """To a lower rank: I am `rank`, and this is our connection number `number`, where the first has 0."""

    rank: int
    number: int
    token: bytes


class Calls(msgspec.Struct, frozen=True, tag="calls"):
    """To a lower rank of a group that has formed: I am `rank`, and over this connection our agents call each other."""

    rank: int
    token: bytes


class Control(msgspec.Struct, frozen=True, tag="control"):
    """This is a control link of a cluster: what follows are its own messages."""


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """What follows is a short burst: say how fast it came."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """No, and why. `code` is one of `REFUSALS`."""

    code: str
    reason: str


Hello = (
    Join
    | Welcome
    | Meet
    | Ready
    | Share
    | Shared
    | OfferConnections
    | ExtraConnection
    | Calls
    | Control
    | Probe
    | Refused
)

REFUSALS: dict[str, type[RefusedError]] = {
    "world_size": WorldSizeMismatchError,
    "rank_taken": RankTakenError,
    "rank_range": RefusedError,
    "group": RefusedError,
    "failed": RefusedError,
}

_decoder: msgspec.msgpack.Decoder[Hello] = msgspec.msgpack.Decoder(Hello)


def encode(hello: Hello) -> bytes:
    """The bytes of a hello."""
    body = msgspec.msgpack.encode(hello)
    if len(body) > MAX_HELLO:
        raise InvalidArgumentError("world_size", len(body), "the addresses of so many ranks do not fit a hello")
    return body


def decode(data: bytes) -> Hello:
    """The hello. Raises `ProtocolError` for bytes that are none."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise ProtocolError(f"a hello cannot be read: {exc}") from exc


def to_error(refused: Refused, peer: str) -> RefusedError:
    """The error that a refusal is to the one refused."""
    return REFUSALS.get(refused.code, RefusedError)(refused.reason, peer=peer)
