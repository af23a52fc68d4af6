"""The first words on a connection: who one is and what the connection is for. Pure.

    magic "RGFT" · version (2 bytes) · length (2 bytes) · a message in msgpack

This outer form never changes, so that two versions can at least tell each other that they differ.
"""

from __future__ import annotations

from struct import Struct

import msgspec

from ringfort.errors import (
    InvalidArgumentError,
    ProtocolError,
    RankTakenError,
    RefusedError,
    VersionMismatchError,
    WorldSizeMismatchError,
)
from ringfort.transport.frames import PROTOCOL_VERSION

MAGIC = b"RGFT"
_PREFIX = Struct("<4sHH")
MAX_GREETING = 16 * 1024
"""Bytes: the addresses of a group of a few hundred ranks fit. Checked before anything is read."""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """To rank 0: I am `rank` of `world_size`, and the other ranks find me at this address."""

    rank: int
    world_size: int
    host: str
    port: int


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """From rank 0, once all are there: where everyone is, and the token that proves that one was told."""

    token: bytes
    addresses: list[tuple[str, int]]


class Meet(msgspec.Struct, frozen=True, tag="meet"):
    """To another rank: I am `rank` of the group of `token`."""

    rank: int
    world_size: int
    token: bytes


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """My links are up. From rank 0: everybody's are."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """No, and why. `code` is one of `REFUSALS`."""

    code: str
    reason: str


Greeting = Join | Welcome | Meet | Ready | Refused

REFUSALS: dict[str, type[RefusedError]] = {
    "version": VersionMismatchError,
    "world_size": WorldSizeMismatchError,
    "rank_taken": RankTakenError,
    "rank_range": RefusedError,
    "group": RefusedError,
    "failed": RefusedError,
}

_decoder: msgspec.msgpack.Decoder[Greeting] = msgspec.msgpack.Decoder(Greeting)


def encode(greeting: Greeting, *, version: int = PROTOCOL_VERSION) -> bytes:
    """The bytes of a greeting."""
    body = msgspec.msgpack.encode(greeting)
    if len(body) > MAX_GREETING:
        raise InvalidArgumentError("world_size", len(body), "the addresses of so many ranks do not fit a greeting")
    return _PREFIX.pack(MAGIC, version, len(body)) + body


class GreetingReader:
    """Collects one greeting from bytes that may come in any pieces. Never holds more than one."""

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def wants(self) -> int:
        """How many more bytes belong to this greeting, as far as is known."""
        if len(self._data) < _PREFIX.size:
            return _PREFIX.size - len(self._data)
        return _PREFIX.size + _PREFIX.unpack_from(self._data)[2] - len(self._data)

    def feed(self, data: bytes) -> Greeting | None:
        """The greeting when it is complete. Raises `ProtocolError` for a stranger's, `VersionMismatchError`."""
        self._data += data
        if not MAGIC.startswith(self._data[:4]):
            raise ProtocolError(f"this is not Ringfort: it began with {bytes(self._data[:16])!r}")
        if len(self._data) < _PREFIX.size:
            return None
        _, version, length = _PREFIX.unpack_from(self._data)
        if length > MAX_GREETING:
            raise ProtocolError(f"a greeting claims {length} bytes; the limit is {MAX_GREETING}")
        if len(self._data) < _PREFIX.size + length:
            return None
        if version != PROTOCOL_VERSION:
            raise VersionMismatchError(
                f"it speaks protocol version {version}, this side {PROTOCOL_VERSION}; install the same ringfort on both"
            )
        try:
            return _decoder.decode(self._data[_PREFIX.size :])
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            raise ProtocolError(f"a greeting cannot be read: {exc}") from exc


def to_error(refused: Refused, peer: str) -> RefusedError:
    """The error that a refusal is to the one refused."""
    return REFUSALS.get(refused.code, RefusedError)(refused.reason, peer=peer)
