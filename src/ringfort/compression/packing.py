"""The header of every compressed message, 40 bytes: the codec, the number of elements, and whether they are valid."""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from ringfort.compression.strategy import CompressionStrategy, Method, QuantizationType
from ringfort.errors import ProtocolError
from ringfort.transport.reducer import Array

VERSION: Final = 1
_HEAD: Final = Struct("<BBBBIQQQQ")
SIZE: Final = _HEAD.size
MAX_COUNT: Final = 1 << 48
"""Elements. More than any machine's memory; what a header claims never sizes an allocation alone."""


class Head(NamedTuple):
    """The header of a compressed message."""

    method: Method
    values: QuantizationType
    elements: int
    """Elements of the decoded array."""
    rank: int = 0
    """POWER_SGD: the rank of the approximation."""
    rows: int = 0
    """POWER_SGD: rows of the matrix. TOP_K and RANDOM_K: elements that are sent."""
    nonfinite: int = 0
    """Elements that were infinite or NaN. If there are any, the rest of the message has no meaning."""
    basis: int = 0
    """In a collective: a digest of the state that all ranks must share for their messages to be added."""

    @classmethod
    def of(
        cls, strategy: CompressionStrategy, elements: int, *, rows: int = 0, nonfinite: int = 0, basis: int = 0
    ) -> Head:
        """The header of a message that `strategy` encodes."""
        return cls(strategy.method, strategy.values, elements, strategy.rank, rows, nonfinite, basis)

    def write(self, into: Array) -> None:
        """Write the header to the beginning of `into`."""
        method, values, elements, rank, *rest = self
        _HEAD.pack_into(into.data, 0, VERSION, method.value, values.value, 0, rank, elements, *rest)

    @classmethod
    def read(cls, data: Array) -> Head:
        """Read the header at the beginning of `data`. Raises `ProtocolError`."""
        if data.size < SIZE:
            raise ProtocolError(f"Invalid compressed message: {data.size} bytes, but its header has {SIZE}")
        version, method, values, reserved, rank, count, rows, nonfinite, basis = _HEAD.unpack_from(data.data)
        if version != VERSION:
            raise ProtocolError(
                f"Compressed message has version {version}, this side has {VERSION}; update the older side"
            )
        if reserved or count > MAX_COUNT or rows > count:
            raise ProtocolError(f"Invalid compressed message: {count} elements, {rows} rows")
        try:
            return cls(Method(method), QuantizationType(values), count, rank, rows, nonfinite, basis)
        except ValueError as exc:
            raise ProtocolError(f"Invalid compressed message: {exc}") from exc

    def check(self, expected: Head, peer: int) -> None:
        """Raise `ProtocolError` unless `peer` sent the `expected` header, apart from `nonfinite` and `basis`."""
        if self[:5] != expected[:5]:
            raise ProtocolError(f"Rank {peer} sent {self}, but {expected} was expected", peer=peer)
