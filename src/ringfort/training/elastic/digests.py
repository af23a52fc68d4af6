"""Digests of arrays, by which members compare results and states. Pure.

Arrays are digested block by block, and the digests of all blocks add up to that of the whole: so members can share the
work however many there are, and compare a sample of the blocks in every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from math import isfinite
from threading import Lock
from typing import Final

import numpy as np

from ringfort.training.elastic.sample_order import Array, mix_array, random_key

_COLUMNS: Final = 509
"""Words of a row: a block is added up row by row, in the L1 cache. No power of two: what is sent in pieces of such a
size, and arrives in another order, is not in the same columns."""
_BLOCK: Final = 65 * 8 * _COLUMNS
"""Bytes of a block: it stays in the L2 cache while it is looked at twice. Gradients of 256 KiB are in one."""
_TURNS: Final = 16
"""Turns within which each block is in a sample. A sample of 64 MiB takes 0.3 ms of one core."""
_FEWEST: Final = 2
"""Blocks of a sample at least, so that small gradients are in it whole: theirs and that of the sums."""
_SMALL: Final = 1 << 12
"""Bytes up to which blake2b takes less time than the calls of NumPy."""
_WEIGHTS: Final = mix_array(np.arange(_COLUMNS, dtype=np.uint64)) | np.uint64(1)
_HALF: Final = np.uint64(32)

Arrays = Mapping[str, Array]


def digest_share(arrays: Arrays, me: int, size: int) -> int:
    """Return the digest of the blocks that are the share of rank `me` of `size`. The digests of all shares add up to
    that of the whole, modulo 2**64, however many members share it. It finds damage; it is no proof against forgery."""
    blocks = _table(arrays)
    return _digest(arrays, blocks, _share(blocks, me, size))


def inspect_share(arrays: Arrays, me: int, size: int) -> tuple[int, bool]:
    """Return `digest_share` of arrays of floats, and whether the share has no infinity and no NaN."""
    blocks = _table(arrays)
    return _inspected(arrays, blocks, _share(blocks, me, size))


def _inspected(arrays: Arrays, blocks: Sequence[_Block], numbers: Iterable[int]) -> tuple[int, bool]:
    """Return the digest of some blocks, and whether they have no infinity and no NaN."""
    total, is_finite = 0, True
    with np.errstate(over="ignore", invalid="ignore"):
        for number in numbers:
            kind, begin, end, weight = blocks[number]
            block = arrays[kind][begin:end]
            total += weight * _block_digest(block)
            is_finite = is_finite and _is_finite(block)
    return total % 2**64, is_finite


class Inspection:
    """Looks at the share of one member while the arrays come: from the end of each to its beginning. For any thread."""

    def __init__(self, arrays: Arrays, me: int, size: int) -> None:
        self._blocks = _table(arrays)
        self._left = list(_share(self._blocks, me, size))
        """The numbers of the blocks that were not looked at."""
        self._total, self._is_finite = 0, True
        self._lock = Lock()

    def complete(self, arrays: Arrays, kind: str, begin: int) -> None:
        """The array `kind` is there from `begin` on."""
        with self._lock:
            blocks = self._blocks
            self._look(arrays, [one for one in self._left if blocks[one][0] == kind and blocks[one][1] >= begin])

    def finish(self, arrays: Arrays) -> tuple[int, bool]:
        """All arrays are there. Return the digest of the share, and whether that has no infinity and no NaN."""
        with self._lock:
            self._look(arrays, self._left)
            return self._total % 2**64, self._is_finite

    def _look(self, arrays: Arrays, numbers: Sequence[int]) -> None:
        total, is_finite = _inspected(arrays, self._blocks, numbers)
        self._total += total
        self._is_finite = self._is_finite and is_finite
        done = set(numbers)
        self._left = [number for number in self._left if number not in done]


def digest_sample(arrays: Arrays, turn: int) -> int:
    """Return the digest of some blocks: others at each turn, and each block within 16 consecutive turns."""
    blocks = _table(arrays)
    count = len(blocks)
    size = min(count, max(_FEWEST, -(-count // _TURNS)))
    return _digest(arrays, blocks, [(turn * size + place) % count for place in range(size)])


def _digest(arrays: Arrays, blocks: Sequence[_Block], numbers: Iterable[int]) -> int:
    total = 0
    for number in numbers:
        kind, begin, end, weight = blocks[number]
        total += weight * _block_digest(arrays[kind][begin:end])
    return total % 2**64


_Block = tuple[str, int, int, int]
"""Its array, begin, end and weight: an odd number, so that two blocks cannot change places."""


def _table(arrays: Arrays) -> Sequence[_Block]:
    """Return all blocks, in the order of the arrays' names."""
    return _blocks_of(tuple([(kind, array.size, array.itemsize) for kind, array in arrays.items()]))


@lru_cache(64)
def _blocks_of(sizes: tuple[tuple[str, int, int], ...]) -> Sequence[_Block]:
    blocks = [
        (kind, begin, min(begin + _BLOCK // itemsize, size))
        for kind, size, itemsize in sorted(sizes)
        for begin in range(0, size, _BLOCK // itemsize)
    ]
    return [(*block, random_key(number) | 1) for number, block in enumerate(blocks)]


def _share(blocks: Sequence[_Block], me: int, size: int) -> range:
    """Return the numbers of the blocks of this member. They are spread over all arrays, because those may come one
    part after the other."""
    return range(me, len(blocks), size)


def _block_digest(block: Array) -> int:
    """Return a number that a change of one word of eight bytes always changes, and a change of several almost always:
    unless both are in one column of 509, two flipped bits never cancel each other. (16 MiB on one core: 0.7 ms; with a
    weight for each word 2.3 ms, crc32 8.1 ms.)"""
    if block.nbytes <= _SMALL:
        return int.from_bytes(blake2b(block, digest_size=8).digest(), "little")
    data = block.view(np.uint8)
    whole = data.size // (8 * _COLUMNS) * (8 * _COLUMNS)
    columns = np.add.reduce(data[:whole].view(np.uint64).reshape(-1, _COLUMNS), axis=0)
    if whole < data.size:
        rest = np.zeros(8 * _COLUMNS, np.uint8)
        rest[: data.size - whole] = data[whole:]
        columns += rest.view(np.uint64)
    # The upper half of a sum is added to the lower: otherwise two flipped signs cancel each other modulo 2**64.
    columns ^= columns >> _HALF
    columns *= _WEIGHTS
    return int(np.add.reduce(columns))


def _is_finite(block: Array) -> bool:
    # One infinity or NaN makes the sum one. A sum of large numbers may become infinite too: only then it is looked at
    # in detail.
    return isfinite(np.add.reduce(block)) or bool(np.isfinite(block).all())
