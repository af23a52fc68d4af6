"""The head of every compressed message, 40 bytes: what follows, how many elements it is, and whether it can be used."""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from ringfort.compression.strategy import CompressionStrategy, Method, QuantizationType
from ringfort.errors import InvalidArgumentError, ProtocolError
from ringfort.transport.reducer import Array

VERSION: Final = 1
_HEAD: Final = Struct("<BBBBIQQQQ")
SIZE: Final = _HEAD.size
MAX_COUNT: Final = 1 << 48
"""Elements. More than any machine's memory; what a head claims never sizes an allocation alone."""

_WORD: Final = (1 << 64) - 1


class Head(NamedTuple):
    """What a message says of itself."""

    method: Method
    values: QuantizationType
    elements: int
    """Elements of the array that it stands for."""
    rank: int = 0
    """POWER_SGD: columns of each factor."""
    rows: int = 0
    """POWER_SGD: rows of the matrix. TOP_K and RANDOM_K: elements that are sent."""
    nonfinite: int = 0
    """Elements that were infinite or not a number. Then what follows means nothing."""
    basis: int = 0
    """In a collective: a digest of what must be the same at all ranks for a sum of their messages to mean anything."""

    @classmethod
    def of(
        cls, strategy: CompressionStrategy, elements: int, *, rows: int = 0, nonfinite: int = 0, basis: int = 0
    ) -> Head:
        """The head of a message by `strategy`."""
        return cls(strategy.method, strategy.values, elements, strategy.rank, rows, nonfinite, basis)

    def write(self, into: Array) -> None:
        """Puts it at the beginning of `into`."""
        numbers = (
            self.method.value,
            self.values.value,
            0,
            self.rank,
            self.elements,
            self.rows,
            self.nonfinite,
            self.basis,
        )
        _HEAD.pack_into(into.data, 0, VERSION, *numbers)

    @classmethod
    def read(cls, data: Array) -> Head:
        """What the beginning of `data` says. Raises `ProtocolError`."""
        if data.size < SIZE:
            raise ProtocolError(f"{data.size} bytes are no compressed message: its head alone takes {SIZE}")
        version, method, values, reserved, rank, count, rows, nonfinite, basis = _HEAD.unpack_from(data.data)
        if version != VERSION:
            raise ProtocolError(
                f"compressed data of version {version}; this is version {VERSION}: update the older side"
            )
        if reserved or count > MAX_COUNT or rows > count:
            raise ProtocolError(f"the head of a compressed message makes no sense: {count} elements, {rows} of them")
        try:
            return cls(Method(method), QuantizationType(values), count, rank, rows, nonfinite, basis)
        except ValueError as exc:
            raise ProtocolError(f"compressed data of a kind that this version does not know: {exc}") from exc

    def check(self, expected: Head, peer: int) -> None:
        """Raises `ProtocolError` unless it is what `peer` should have sent, finite or not."""
        if self[:5] != expected[:5]:
            raise ProtocolError(f"rank {peer} sent {self}, where {expected} was due", peer=peer)


def strategy_of(head: Head, ratio: float = 1.0) -> CompressionStrategy:
    """The strategy that a message was made by, as far as reading it needs. Raises `ProtocolError`."""
    try:
        return CompressionStrategy(head.method, head.values, ratio, head.rank)
    except InvalidArgumentError as exc:
        raise ProtocolError(f"the head of a compressed message makes no sense: {exc}") from exc
