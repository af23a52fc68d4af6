"""Encode one array as one message, and decode it. The header of 40 bytes has the codec, the number of elements, and
whether they are valid. Pure."""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

import numpy as np

from ringfort.compression import lowrank
from ringfort.compression.chunked import ChunkedTopK
from ringfort.compression.codec import Codec
from ringfort.compression.lowrank import LowRank
from ringfort.compression.quantize import codec_of
from ringfort.compression.sparse import RandomK, TopK
from ringfort.compression.strategy import CompressionStrategy, Method, QuantizationType
from ringfort.errors import InvalidArgumentError, ProtocolError
from ringfort.transport.reducer import Array

VERSION: Final = 1
_HEAD: Final = Struct("<BBBBIQQQQ")
SIZE: Final = _HEAD.size
MAX_COUNT: Final = 1 << 48
"""Elements. More than any machine's memory; what a header claims never sizes an allocation alone."""
MOST_PER_BYTE: Final = 65536
"""Elements per byte that are accepted if the caller does not say how many there should be. Top-k has at most 16384;
random-k has more if it sends a few of a million. What a message claims must not size an allocation alone."""


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


def write(
    strategy: CompressionStrategy,
    flat: Array,
    shape: tuple[int, ...],
    factor: Array | None,
    seed: int,
    keep_error: bool,
) -> tuple[Array, Array | None]:
    """Encode an array of finite float32s. Return the bytes and, for PowerSGD, the factor that the next step starts
    from. With `keep_error`, `flat` becomes the error of the encoding."""
    rows = strategy.kept(flat.size) if strategy.method in (Method.TOP_K, Method.RANDOM_K) else 0
    low: LowRank | None = None
    if strategy.method is Method.POWER_SGD:
        dims = lowrank.matrix_shape(shape, strategy.rank)
        if dims is not None:
            first = lowrank.first_factor(strategy.rank, dims[1], "") if factor is None else factor
            low, rows = LowRank(*dims, first), dims[0]
    head = Head(strategy.method, strategy.values, flat.size, strategy.rank, rows)
    codec = low or _codec(head)
    data = np.empty(SIZE + codec.nbytes(flat.size), np.uint8)
    head.write(data)
    codec.encode(flat, data[SIZE:], seed, keep_error=keep_error)
    return data, None if low is None else low.factor


def read(data: Array, count: int | None = None) -> Array:
    """Decode what `write` returned: `count` elements, if that is given. Raises `ProtocolError` for invalid bytes, and
    before any memory is allocated for them."""
    head = Head.read(data)
    if count is not None and head.elements != count:
        raise ProtocolError(f"Invalid compressed message: {head.elements} elements, but {count} were expected")
    if count is None and head.elements > MOST_PER_BYTE * data.size:
        raise ProtocolError(
            f"{data.size} bytes claim to be {head.elements} elements; pass count= to accept the message"
        )
    if head.nonfinite:
        raise ProtocolError(f"Invalid compressed message: {head.nonfinite} of its elements were infinite or NaN")
    codec, body = _codec(head), data[SIZE:]
    codec.check_size(body, head.elements)
    out = np.empty(head.elements, np.float32)
    codec.decode(body, out)
    return out


def _codec(head: Head) -> Codec:
    try:
        CompressionStrategy(head.method, head.values, rank=head.rank)  # checks the combination
    except InvalidArgumentError as exc:
        raise ProtocolError(f"Invalid compressed message: {exc}") from exc
    values = codec_of(head.values)
    if head.method in (Method.TOP_K, Method.RANDOM_K):
        if head.elements and not head.rows:
            raise ProtocolError(f"Invalid compressed message: none of its {head.elements} elements is sent")
        return (TopK if head.method is Method.TOP_K else RandomK)(head.rows, values)
    if head.method is Method.SPARSE:
        return ChunkedTopK()
    if head.method is Method.POWER_SGD and head.rows:
        columns, left = divmod(head.elements, head.rows)
        if left:
            raise ProtocolError(f"Invalid compressed message: {head.elements} elements in {head.rows} rows")
        return LowRank(head.rows, columns, np.empty((head.rank, columns), np.float32))
    if head.method is Method.AUTO or (head.method is not Method.QUANTIZE and head.values is not QuantizationType.FP32):
        raise ProtocolError(f"Invalid compressed message: {head.values.name} values by {head.method.name}")
    return values
