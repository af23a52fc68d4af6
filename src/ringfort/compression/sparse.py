"""The codecs that send `k` of `n` elements: the largest (`TopK`) or a random sample (`RandomK`). Pure.

The other elements are decoded as zero. Another codec encodes the `k` values.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import Final

import numpy as np

from ringfort.compression.codec import CHUNK, ChunkCodec, Codec, mix, scratch
from ringfort.errors import InvalidArgumentError, ProtocolError
from ringfort.transport.reducer import Array

BLOCK: Final = 65536
"""Elements per block: an index within a block fits in 2 bytes. Each block says how many indices it has."""

_SAMPLE: Final = 16384
"""Elements that the threshold is estimated from. For the top 1% some 160 are above it: the error is about 10%."""
_MARGIN: Final = 1.25
"""The estimate aims at this many times `k`: too many candidates cost little, too few another pass."""


# --- selection -------------------------------------------------------------------------------------------------------


def largest(values: Array, k: int, seed: int = 0) -> Array:
    """Return the sorted indices of the `k` elements with the largest magnitudes; the first of equal ones.

    Raises `InvalidArgumentError` if `k` is below 1 (unless there are no elements) or above their number.
    """
    n = values.size
    if not min(1, n) <= k <= n:
        raise InvalidArgumentError("k", k, f"must be from 1 to {n}, the number of elements")
    if k == n:
        return np.arange(n)
    if n <= 2 * _SAMPLE:
        return _exactly(np.abs(values), np.arange(n), k)
    sample = np.abs(values[np.random.default_rng(mix(seed, n)).integers(0, n, _SAMPLE)])
    aim = k / n * _MARGIN
    while aim < 0.5:
        place = _SAMPLE - max(1, int(aim * _SAMPLE))
        threshold = np.partition(sample, place)[place]
        if threshold == 0:
            break
        found = _at_least(values, threshold)
        if found.size >= k:
            return _exactly(np.abs(values[found]), found, k)
        aim *= 2
    return _exactly(np.abs(values), np.arange(n), k)


def _at_least(values: Array, threshold: Array) -> Array:
    """The indices of all elements of at least this magnitude, in one pass, chunk by chunk."""
    room, above = scratch("work"), scratch("nibbles", np.int8).view(np.bool_)
    places: list[Array] = []
    for start in range(0, values.size, CHUNK):
        x = values[start : start + CHUNK]
        np.abs(x, out=room[: x.size])
        np.greater_equal(room[: x.size], threshold, out=above[: x.size])
        found = np.flatnonzero(above[: x.size])
        found += start
        places.append(found)
    return np.concatenate(places)


def _exactly(sizes: Array, places: Array, k: int) -> Array:
    """The `k` of `places` whose magnitudes in `sizes` are largest."""
    if k == places.size:
        return places
    least = np.partition(sizes, sizes.size - k)[sizes.size - k]
    above = sizes > least
    equal = np.flatnonzero(sizes == least)[: k - int(np.count_nonzero(above))]
    above[equal] = True
    return places[above]


@lru_cache(maxsize=8)
def _strata(n: int, k: int) -> tuple[Array, Array]:
    edges = np.arange(k + 1, dtype=np.int64) * n // max(k, 1)
    return edges[:-1], np.diff(edges)


def drawn(n: int, k: int, seed: int) -> tuple[Array, Array]:
    """Return `k` sorted random indices below `n`, and for each the number of elements it was drawn from.

    One index is drawn from each of `k` equal stretches. So an element is drawn with a probability of 1 in the length of
    its stretch, and multiplied by that length it is correct on average. The same `seed` gives the same indices on any
    machine.
    """
    starts, lengths = _strata(n, k)
    random = np.random.Generator(np.random.PCG64(seed)).random(k)
    return starts + (random * lengths).astype(np.int64), lengths


# --- encoding ---------------------------------------------------------------------------------------------------------


class _Sparse(Codec):
    """Sends `k` elements; `values` encodes them."""

    def __init__(self, k: int, values: ChunkCodec) -> None:
        self.k, self._values = k, values

    def _decode_at(self, places: Array, data: Array, out: Array, *, add: bool) -> None:
        """Decode the values into these places of `out`; the other elements are 0."""
        kept = np.empty(self.k, np.float32)
        self._values.decode(data, kept)
        if add:
            out[places] += kept
        else:
            out.fill(0)
            out[places] = kept


class TopK(_Sparse):
    """The `k` largest elements: the number of indices in each block of 65536, the indices, and the values."""

    def nbytes(self, count: int) -> int:
        return 4 * -(-count // BLOCK) + 2 * self.k + self._values.nbytes(self.k)

    def encode(self, values: Array, out: Array, seed: int, *, keep_error: bool = False) -> None:
        places = largest(values, self.k, seed)
        counts, where, written = self._cut(out, values.size)
        counts[...] = np.diff(np.searchsorted(places, np.arange(counts.size + 1) * BLOCK))
        np.copyto(where, places & (BLOCK - 1), casting="unsafe")
        kept = values[places]
        self._values.encode(kept, written, seed, keep_error=keep_error)
        if keep_error:
            values[places] = kept

    def decode(self, data: Array, out: Array, *, add: bool = False) -> None:
        self.check_size(data, out.size)
        counts, where, written = self._cut(data, out.size)
        if int(counts.sum(dtype=np.uint64)) != self.k:
            raise ProtocolError(f"Invalid compressed data: {counts.sum(dtype=np.uint64)} indices for {self.k} elements")
        places = np.repeat(np.arange(counts.size, dtype=np.int64) * BLOCK, counts)
        places += where
        if self.k and places.max() >= out.size:
            raise ProtocolError(
                f"Invalid compressed data: index {places.max()} is out of range for {out.size} elements"
            )
        self._decode_at(places, written, out, add=add)

    def _cut(self, data: Array, count: int) -> tuple[Array, Array, Array]:
        first = 4 * -(-count // BLOCK)
        second = first + 2 * self.k
        return data[:first].view(np.uint32), data[first:second].view(np.uint16), data[second:]


class RandomK(_Sparse):
    """`k` random elements: the seed and the values. Without error feedback the values are scaled to be correct on
    average."""

    _LOT: Final = Struct("<QQ")

    def nbytes(self, count: int) -> int:
        return self._LOT.size + self._values.nbytes(self.k)

    def encode(self, values: Array, out: Array, seed: int, *, keep_error: bool = False) -> None:
        places, lengths = drawn(values.size, self.k, seed)
        kept = values[places]
        if not keep_error:
            kept *= lengths.astype(np.float32)
        self._LOT.pack_into(out.data, 0, seed, not keep_error)
        self._values.encode(kept, out[self._LOT.size :], mix(seed), keep_error=keep_error)
        if keep_error:
            values[places] = kept

    def decode(self, data: Array, out: Array, *, add: bool = False) -> None:
        self.check_size(data, out.size)
        seed, _ = self._LOT.unpack_from(data.data)
        places, _ = drawn(out.size, self.k, seed)
        self._decode_at(places, data[self._LOT.size :], out, add=add)
