"""`Codec`: float32 elements in a row to bytes and back, a chunk at a time. Pure."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

import numpy as np

from ringfort.compression.noise import CHUNK
from ringfort.errors import ProtocolError
from ringfort.transport.reducer import Array


class Codec(ABC):
    """How elements become bytes. How many bytes depends on the number of elements alone, so a receiver knows it."""

    @abstractmethod
    def nbytes(self, count: int) -> int:
        """Bytes that `count` elements become."""

    @abstractmethod
    def encode(self, values: Array, out: Array, seed: int, *, keep_error: bool = False) -> None:
        """Writes finite float32s into `out`, of `nbytes(values.size)` bytes. With `keep_error`, `values` becomes what
        the receiver will lack: itself less what `decode` makes of the bytes. `seed` decides what is left to chance."""

    @abstractmethod
    def decode(self, data: Array, out: Array, *, add: bool = False) -> None:
        """Writes the elements into `out`, or adds them to it. Raises `ProtocolError` for bytes that are none."""

    def check_size(self, data: Array, count: int) -> None:
        """Raises `ProtocolError` unless `data` has the bytes of `count` elements."""
        if data.size != self.nbytes(count):
            raise ProtocolError(
                f"{data.size} bytes of compressed data, where {count} elements take {self.nbytes(count)}"
            )


class ChunkCodec(Codec):
    """A codec whose chunks know nothing of each other."""

    @abstractmethod
    def chunk_bytes(self, count: int) -> int:
        """Bytes of a chunk of `count` elements, 1 to CHUNK."""

    @abstractmethod
    def encode_chunk(self, x: Array, out: Array, seed: int, chunk: int, decoded: Array | None) -> None:
        """Writes one chunk; where `decoded` is given, also what the receiver will make of it."""

    @abstractmethod
    def decode_chunk(self, data: Array, out: Array) -> None:
        """Reads one chunk into `out`."""

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


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.rooms: dict[str, Array] = {}


_scratch = _Scratch()


def scratch(name: str, dtype: type[np.generic] = np.float32) -> Array:
    """Room for a chunk that stays warm in the cache: one of each name in a thread."""
    room = _scratch.rooms.get(name)
    if room is None:
        room = _scratch.rooms[name] = np.empty(CHUNK, dtype)
    return room
