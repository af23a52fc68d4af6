"""Tokens as arrays of one size, so that sealing a step takes one small all-gather. Pure."""

from __future__ import annotations

from hashlib import blake2b
from struct import Struct
from typing import Final

import numpy as np

from ringfort.errors import ProtocolError
from ringfort.training.elastic.protocol import Token
from ringfort.training.elastic.sample_order import Array

_HEAD: Final = Struct("<16s6q2Q")
"""Digest of what the token is about; step, cursor, speed, overhead, period and flags; digests of the share and of what
is compared."""
_CHECKSUM: Final = 8
"""Bytes at the end that show damage. A token passes through other members, and what one member takes for different
results all must take for that: otherwise some would drop a result that others apply."""
_PAUSE: Final = 1
_IMAGE: Final = 2
_FINITE: Final = 4
_PREPARING: Final = 8
_MAX: Final = 2**62
"""Of a speed, an overhead and a period."""


class TokenCodec:
    """Packs the tokens of a run whose steps have at most `parts` micro-batches."""

    def __init__(self, parts: int) -> None:
        self._coverage = -(-parts // 64) * 8
        self.nbytes = _HEAD.size + self._coverage + _CHECKSUM
        """The size of a packed token: the same at every member and in every step."""

    def pack(self, token: Token) -> Array:
        """Return a token as bytes."""
        about = blake2b(repr(token.about).encode(), digest_size=16).digest()
        _, _, step, cursor, *_ = token.about
        flags = _PAUSE * token.wants_pause | _IMAGE * token.wants_image | _FINITE * token.is_finite
        flags |= _PREPARING * token.is_preparing
        mask = 0
        for part in token.covered:
            mask |= 1 << part
        speed, overhead, period = min(token.speed, _MAX), min(token.overhead, _MAX), min(token.period, _MAX)
        head = _HEAD.pack(about, step, cursor, speed, overhead, period, flags, token.digest, token.copy)
        data = head + mask.to_bytes(self._coverage, "little")
        return np.frombuffer(data + _checksum(data), np.uint8)

    def unpack(self, packed: Array) -> Token:
        """Return the token in `packed`. What it is about is a digest, and for people its step and cursor: tokens are
        only compared. Raise `ProtocolError` if it is damaged."""
        data = packed.tobytes()
        data, checksum = data[:-_CHECKSUM], data[-_CHECKSUM:]
        if checksum != _checksum(data):
            raise ProtocolError("A token was damaged on its way through the members")
        about, step, cursor, speed, overhead, period, flags, digest, copy = _HEAD.unpack_from(data)
        mask, covered = int.from_bytes(data[_HEAD.size :], "little"), list[int]()
        while mask:
            lowest = mask & -mask
            covered.append(lowest.bit_length() - 1)
            mask ^= lowest
        return Token(
            (about, step, cursor),
            digest,
            frozenset(covered),
            max(0, speed),
            bool(flags & _PAUSE),
            bool(flags & _IMAGE),
            bool(flags & _FINITE),
            overhead=max(0, overhead),
            period=max(0, period),
            copy=copy,
            is_preparing=bool(flags & _PREPARING),
        )


def _checksum(data: bytes) -> bytes:
    return blake2b(data, digest_size=_CHECKSUM).digest()
