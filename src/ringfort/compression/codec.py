"""`Codec`: encodes a flat float32 array as bytes and back, chunk by chunk; and the random numbers that codecs need.
Pure."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from functools import cache
from typing import Final

import numpy as np

from ringfort.errors import ProtocolError
from ringfort.transport.reducer import Array

CHUNK: Final = 32768
"""Elements that a codec works on at a time, 128 KiB as float32: with noise and result they stay in the L2 cache."""


class Codec(ABC):
    """Encodes elements as bytes. The number of bytes depends only on the number of elements, so a receiver knows it."""

    @abstractmethod
    def nbytes(self, count: int) -> int:
        """How many bytes `count` elements take."""

    @abstractmethod
    def encode(self, values: Array, out: Array, seed: int, *, keep_error: bool = False) -> None:
        """Encode finite float32s into `out`, of `nbytes(values.size)` bytes. With `keep_error`, `values` becomes the
        error: itself less what `decode` returns. `seed` is for random choices."""

    @abstractmethod
    def decode(self, data: Array, out: Array, *, add: bool = False) -> None:
        """Decode the elements into `out`, or add them to it. Raises `ProtocolError` for invalid bytes."""

    def check_size(self, data: Array, count: int) -> None:
        """Raise `ProtocolError` unless `data` has the size of `count` elements."""
        if data.size != self.nbytes(count):
            raise ProtocolError(
                f"Invalid compressed data: {data.size} bytes, but {count} elements take {self.nbytes(count)}"
            )


class ChunkCodec(Codec):
    """A codec that encodes each chunk by itself."""

    @abstractmethod
    def chunk_bytes(self, count: int) -> int:
        """How many bytes a chunk of `count` elements takes, 1 to CHUNK."""

    @abstractmethod
    def encode_chunk(self, x: Array, out: Array, seed: int, chunk: int, decoded: Array | None) -> None:
        """Encode one chunk; if `decoded` is given, also write there what decoding it returns."""

    @abstractmethod
    def decode_chunk(self, data: Array, out: Array) -> None:
        """Decode one chunk into `out`."""

    def nbytes(self, count: int) -> int:
        whole, rest = divmod(count, CHUNK)
        return whole * self.chunk_bytes(CHUNK) + (self.chunk_bytes(rest) if rest else 0)

    def encode(self, values: Array, out: Array, seed: int, *, keep_error: bool = False) -> None:
        size, room = self.chunk_bytes(CHUNK), scratch("decoded")
        with np.errstate(all="ignore"):
            for chunk, start in enumerate(range(0, values.size, CHUNK)):
                x = values[start : start + CHUNK]
                decoded = room[: x.size] if keep_error else None
                self.encode_chunk(x, out[chunk * size : (chunk + 1) * size], seed, chunk, decoded)
                if decoded is not None:
                    np.subtract(x, decoded, out=x)

    def decode(self, data: Array, out: Array, *, add: bool = False) -> None:
        self.check_size(data, out.size)
        size, room = self.chunk_bytes(CHUNK), scratch("decoded")
        with np.errstate(all="ignore"):
            for chunk, start in enumerate(range(0, out.size, CHUNK)):
                into = out[start : start + CHUNK]
                part = data[chunk * size : (chunk + 1) * size]
                if add:
                    self.decode_chunk(part, room[: into.size])
                    np.add(into, room[: into.size], out=into)
                else:
                    self.decode_chunk(part, into)


_scratch = threading.local()


def scratch(name: str, dtype: type[np.generic] = np.float32) -> Array:
    """Scratch memory for one chunk, which stays in the cache: one array per name and thread."""
    if not hasattr(_scratch, name):
        setattr(_scratch, name, np.empty(CHUNK, dtype))
    return getattr(_scratch, name)


# --- random numbers ---------------------------------------------------------------------------------------------------
#
# Stochastic rounding needs one random number per element, and drawing them costs more than the rest of a codec. So they
# are read from a table, at a random offset. The table holds each of `CHUNK` evenly spaced numbers once, so an element
# gets an exactly uniform number; only elements that are a whole table apart may get the same one.

_WORD: Final = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Hash `numbers` to 64 bits (the finaliser of splitmix64, one round per number)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & _WORD)) * 0xBF58476D1CE4E5B9 & _WORD
        state ^= state >> 27
        state = state * 0x94D049BB133111EB & _WORD
        state ^= state >> 31
    return state


def rounding_noise(seed: int, chunk: int, count: int) -> Array:
    """`count` numbers from -0.5 to 0.5, for chunk number `chunk` of an array. A read-only view."""
    start = mix(seed, chunk) % CHUNK
    return _table()[start : start + count]


@cache
def _table() -> Array:
    even = ((np.arange(CHUNK, dtype=np.float32) + np.float32(0.5)) / np.float32(CHUNK)) - np.float32(0.5)
    once = np.random.default_rng(20240229).permutation(even)
    table = np.concatenate([once, once])
    table.flags.writeable = False
    return table
