"""The codecs that encode every element in fewer bits. Pure; NumPy in place, on chunks that stay in the cache.

A chunk has first the scales, one float32 per block of elements, and then the elements. The error of a decoded element
is at most:

    FP16     2**-11 of the element, plus 2**-25
    BF16     2**-8 of the element, plus 1e-40
    INT8     1/127 of the largest magnitude in the block
    INT4     1/7 of the largest magnitude in the block
    ONE_BIT  the largest magnitude in the block

Blocks whose largest magnitude is below 1e-36 are sent as zeros: their scale would be too small to divide by.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ringfort.collectives.float16 import round_bits
from ringfort.compression.codec import ChunkCodec, rounding_noise, scratch
from ringfort.compression.strategy import QuantizationType
from ringfort.transport.reducer import Array

_LARGEST: Final = np.finfo(np.float32).max
_LEAST_SCALE: Final = np.float32(1e-38)
"""The smallest scale used: its reciprocal is a float32 too."""


class Whole(ChunkCodec):
    """FP32: the elements unchanged."""

    def chunk_bytes(self, count: int) -> int:
        return 4 * count

    def encode_chunk(self, x: Array, out: Array, seed: int, chunk: int, decoded: Array | None) -> None:
        out.view(np.float32)[...] = x
        if decoded is not None:
            decoded[...] = x

    def decode_chunk(self, data: Array, out: Array) -> None:
        out[...] = data.view(np.float32)


class Half(ChunkCodec):
    """FP16. NumPy's own conversion takes 5 ns per element, this one 1 ns: multiplying by a power of two moves the
    exponent, and is exact or rounds as float16 must; the bits are rounded and shifted as integers."""

    _TOP: Final = np.float32(65504)
    _DOWN, _UP = np.float32(2.0**-112), np.float32(2.0**112)

    def chunk_bytes(self, count: int) -> int:
        return 2 * count

    def encode_chunk(self, x: Array, out: Array, seed: int, chunk: int, decoded: Array | None) -> None:
        y, odd = scratch("work")[: x.size], scratch("bits", np.uint32)[: x.size]
        np.clip(x, -self._TOP, self._TOP, out=y)
        np.multiply(y, self._DOWN, out=y)
        bits = y.view(np.uint32)
        round_bits(bits, 13, odd)
        sign = np.right_shift(bits, 16, out=odd)
        sign &= 0x8000
        bits >>= 13
        bits |= sign
        np.copyto(out.view(np.uint16), bits, casting="unsafe")  # the shifted sign is above these 16 bits
        if decoded is not None:
            self.decode_chunk(out, decoded)

    def decode_chunk(self, data: Array, out: Array) -> None:
        bits = out.view(np.int32)
        np.copyto(bits, data.view(np.int16))  # which repeats the sign in the upper half
        np.left_shift(bits, 13, out=bits)
        np.bitwise_and(bits, -0x70000001, out=bits)  # all but the three repeated signs below the highest
        np.multiply(out, self._UP, out=out)


class Brain(ChunkCodec):
    """BF16: the upper half of the float32, rounded to nearest even."""

    _TOP: Final = np.array([0x7F7F0000], np.uint32).view(np.float32)[0]

    def chunk_bytes(self, count: int) -> int:
        return 2 * count

    def encode_chunk(self, x: Array, out: Array, seed: int, chunk: int, decoded: Array | None) -> None:
        y, odd = scratch("work")[: x.size], scratch("bits", np.uint32)[: x.size]
        np.clip(x, -self._TOP, self._TOP, out=y)
        bits = y.view(np.uint32)
        round_bits(bits, 16, odd)
        bits >>= 16
        np.copyto(out.view(np.uint16), bits, casting="unsafe")
        if decoded is not None:
            np.left_shift(bits, 16, out=decoded.view(np.uint32))

    def decode_chunk(self, data: Array, out: Array) -> None:
        bits = out.view(np.uint32)
        np.copyto(bits, data.view(np.uint16))
        np.left_shift(bits, 16, out=bits)


class _Scaled(ChunkCodec):
    """What INT8, INT4 and ONE_BIT have in common: blocks with one scale each."""

    block: int

    def payload_bytes(self, count: int) -> int:
        """How many bytes the elements take without their scales."""
        raise NotImplementedError

    def chunk_bytes(self, count: int) -> int:
        return 4 * -(-count // self.block) + self.payload_bytes(count)

    def _blocks(self, x: Array, room: Array) -> Array:
        """One row per block: `x` itself, or a copy padded with zeros if its last block is incomplete."""
        if x.size % self.block == 0:
            return x.reshape(-1, self.block)
        rows = -(-x.size // self.block)
        whole = room[: rows * self.block]
        whole[: x.size] = x
        whole[x.size :] = 0
        return whole.reshape(rows, self.block)

    def _cut(self, data: Array, count: int) -> tuple[Array, Array]:
        """The scales, as a column, and the bytes of the elements."""
        edge = 4 * -(-count // self.block)
        return data[:edge].view(np.float32).reshape(-1, 1), data[edge:]

    def _times(self, levels: Array, scales: Array, out: Array) -> None:
        """`out = levels * scale of the block`, computed in the same way by sender and receivers."""
        rows = out.size // self.block
        whole, shape = rows * self.block, (rows, self.block)
        np.multiply(levels[:whole].reshape(shape), scales[:rows], out=out[:whole].reshape(shape))
        if whole < out.size:
            np.multiply(levels[whole : out.size], scales[rows, 0], out=out[whole:])


class Integers(_Scaled):
    """INT8 and INT4: multiples of the scale, with stochastic rounding."""

    def __init__(self, top: int, block: int) -> None:
        self.top, self.block = top, block

    def payload_bytes(self, count: int) -> int:
        return count if self.top > 7 else -(-count // 2)

    def encode_chunk(self, x: Array, out: Array, seed: int, chunk: int, decoded: Array | None) -> None:
        rows = self._blocks(x, scratch("padded"))
        levels = scratch("work")[: rows.size]
        table = levels.reshape(rows.shape)
        np.abs(rows, out=table)
        scales = table.max(axis=1, keepdims=True)
        scales /= np.float32(self.top)
        # So that the product with `top`, rounded, is still finite.
        np.minimum(scales, _LARGEST / np.float32(self.top + 1e-4), out=scales)
        scales[scales < _LEAST_SCALE] = 0
        by = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
        np.multiply(rows, by, out=table)
        levels = levels[: x.size]
        np.add(levels, rounding_noise(seed, chunk, x.size), out=levels)
        np.rint(levels, out=levels)
        edge = scales.nbytes
        out[:edge].view(np.float32)[...] = scales[:, 0]
        self._pack(levels, out[edge:])
        if decoded is not None:
            self._times(levels, scales, decoded)

    def _pack(self, levels: Array, out: Array) -> None:
        if self.top > 7:
            np.copyto(out.view(np.int8), levels, casting="unsafe")
            return
        # Two per byte: the first half of the chunk in the low bits, the second in the high bits, so that both are
        # contiguous when they are read.
        whole = scratch("nibbles", np.int8)[: levels.size]
        np.copyto(whole, levels, casting="unsafe")
        bits = whole.view(np.uint8)
        np.add(bits, 8, out=bits)
        low, high = bits[: out.size], bits[out.size :]
        out[...] = low
        np.left_shift(high, 4, out=high)
        np.bitwise_or(out[: high.size], high, out=out[: high.size])

    def decode_chunk(self, data: Array, out: Array) -> None:
        scales, packed = self._cut(data, out.size)
        levels = scratch("work")[: out.size]
        if self.top > 7:
            np.copyto(levels, packed.view(np.int8))
        else:
            half = packed.size
            nibbles = scratch("nibbles", np.int8)[: out.size].view(np.uint8)
            np.bitwise_and(packed, 15, out=nibbles[:half])
            np.right_shift(packed[: out.size - half], 4, out=nibbles[half:])
            np.copyto(levels, nibbles)
            np.subtract(levels, 8, out=levels)
        self._times(levels, scales, out)


class Signs(_Scaled):
    """ONE_BIT: the sign of each element, times the mean magnitude of its block."""

    block = 512

    def payload_bytes(self, count: int) -> int:
        return -(-count // 8)

    def encode_chunk(self, x: Array, out: Array, seed: int, chunk: int, decoded: Array | None) -> None:
        rows = self._blocks(x, scratch("padded"))
        table = scratch("work")[: rows.size].reshape(rows.shape)
        np.abs(rows, out=table)
        # Divided first, so that the sum of large magnitudes stays finite.
        table /= np.float32(self.block)
        scales = table.sum(axis=1, keepdims=True)
        if x.size % self.block:
            scales[-1] *= np.float32(self.block / (x.size % self.block))
        scales[scales < _LEAST_SCALE] = 0
        edge = scales.nbytes
        out[:edge].view(np.float32)[...] = scales[:, 0]
        above = scratch("nibbles", np.int8)[: x.size].view(np.bool_)
        np.greater_equal(x, 0, out=above)
        out[edge:] = np.packbits(above)
        if decoded is not None:
            self.decode_chunk(out, decoded)

    def decode_chunk(self, data: Array, out: Array) -> None:
        scales, packed = self._cut(data, out.size)
        levels = scratch("work")[: out.size]
        np.copyto(levels, np.unpackbits(packed, count=out.size))
        np.add(levels, levels, out=levels)
        np.subtract(levels, 1, out=levels)
        self._times(levels, scales, out)


_CODECS: Final[dict[QuantizationType, ChunkCodec]] = {
    QuantizationType.FP32: Whole(),
    QuantizationType.FP16: Half(),
    QuantizationType.BF16: Brain(),
    QuantizationType.INT8: Integers(127, 512),
    QuantizationType.INT4: Integers(7, 128),
    QuantizationType.ONE_BIT: Signs(),
}
codec_of: Final = _CODECS.__getitem__
"""The codec for a type."""
