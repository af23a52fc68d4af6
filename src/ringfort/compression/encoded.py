"""One array as one message, head and all, and back. Pure."""

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
from ringfort.errors import ProtocolError
from ringfort.transport.reducer import Array

MOST_PER_BYTE: Final = 65536
"""Elements that a byte may stand for where nobody says how many there should be. Top-k has at most 16384; beyond this
random-k sends a few of a million. What a message claims must not size an allocation alone."""


def write(
    strategy: CompressionStrategy,
    flat: Array,
    shape: tuple[int, ...],
    factor: Array | None,
    seed: int,
    keep_error: bool,
) -> tuple[Array, Array | None]:
    """The bytes of an array of finite float32s, and for PowerSGD the factor that the next step starts from. With
    `keep_error`, `flat` becomes what the bytes lack."""
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
    """The elements, `count` of them if that is given. Raises `ProtocolError` for what `write` has not written; nothing
    is allocated for it."""
    head = Head.read(data)
    if count is not None and head.elements != count:
        raise ProtocolError(f"a message of {head.elements} elements, where {count} were due")
    if count is None and head.elements > MOST_PER_BYTE * data.size:
        raise ProtocolError(f"{data.size} bytes claim to be {head.elements} elements; say how many were due: count=")
    packing.strategy_of(head)
    if head.nonfinite:
        raise ProtocolError(f"the message says that {head.nonfinite} of its elements cannot be used")
    codec = _codec(head)
    codec.check_size(data[packing.SIZE :], head.elements)
    out = np.empty(head.elements, np.float32)
    codec.decode(data[packing.SIZE :], out)
    return out


def _codec(head: Head) -> Codec:
    values = codec_of(head.values)
    if head.method in (Method.TOP_K, Method.RANDOM_K):
        if head.elements and not head.rows:
            raise ProtocolError(f"none of {head.elements} elements is sent")
        return (TopK if head.method is Method.TOP_K else RandomK)(head.rows, values)
    if head.method is Method.POWER_SGD and head.rows:
        columns, left = divmod(head.elements, head.rows)
        if left:
            raise ProtocolError(f"{head.elements} elements make no matrix of {head.rows} rows")
        return LowRank(head.rows, columns, np.empty((head.rank, columns), np.float32))
    if head.method is Method.AUTO or (head.method is not Method.QUANTIZE and head.values is not QuantizationType.FP32):
        raise ProtocolError(f"no message is of the kind {head.method.name} with {head.values.name}")
    return values
