"""Encode one array as one message with its header, and decode it. Pure."""

from __future__ import annotations

from typing import Final

import numpy as np

from ringfort.compression import lowrank, packing
from ringfort.compression.codec import Codec
from ringfort.compression.lowrank import LowRank
from ringfort.compression.packing import Head
from ringfort.compression.quantize import codec_of
from ringfort.compression.sparse import RandomK, TopK
from ringfort.compression.strategy import CompressionStrategy, Method, QuantizationType
from ringfort.errors import InvalidArgumentError, ProtocolError
from ringfort.transport.reducer import Array

MOST_PER_BYTE: Final = 65536
"""Elements per byte that are accepted if the caller does not say how many there should be. Top-k has at most 16384;
random-k has more if it sends a few of a million. What a message claims must not size an allocation alone."""


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
    head = Head.of(strategy, flat.size, rows=rows)
    codec = low or _codec(head)
    data = np.empty(packing.SIZE + codec.nbytes(flat.size), np.uint8)
    head.write(data)
    codec.encode(flat, data[packing.SIZE :], seed, keep_error=keep_error)
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
    codec, body = _codec(head), data[packing.SIZE :]
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
    if head.method is Method.POWER_SGD and head.rows:
        columns, left = divmod(head.elements, head.rows)
        if left:
            raise ProtocolError(f"Invalid compressed message: {head.elements} elements in {head.rows} rows")
        return LowRank(head.rows, columns, np.empty((head.rank, columns), np.float32))
    if head.method is Method.AUTO or (head.method is not Method.QUANTIZE and head.values is not QuantizationType.FP32):
        raise ProtocolError(f"Invalid compressed message: {head.values.name} values by {head.method.name}")
    return values
