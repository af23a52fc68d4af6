"""Digests of arrays, by which members compare results and states. Pure.

Arrays are digested block by block, and the digests of all blocks add up to that of the whole: so members can share the
work however many there are, and compare a sample of the blocks in every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from math import isfinite
from typing import Final

import numpy as np

from ringfort.training.elastic.sample_order import Array, mix_array, random_key
from ringfort.transport.locks import Condition

_COLUMNS: Final = 509
"""Words of a row: a block is added up row by row, in the L1 cache. No power of two: what is sent in pieces of such a
size, and arrives in another order, is not in the same columns."""
_BLOCK: Final = 65 * 8 * _COLUMNS
"""Bytes of a block: it stays in the L2 cache while it is looked at twice. Gradients of 256 KiB are in one."""
_TURNS: Final = 16
"""Turns within which each block is in a sample. A sample of 64 MiB takes 0.3 ms of one core."""
_FEWEST: Final = 2
"""Blocks of a sample at least, so that small gradients are in it whole: theirs and that of the sums."""
_AT_ONCE: Final = 4
"""Blocks that one of several threads takes at a time."""
_LOOKS: Final = 2
"""Blocks that are looked at for changes by the program."""
_SMALL: Final = 1 << 12
"""Bytes up to which blake2b takes less time than the calls of NumPy."""
_TINY: Final = 16
"""Elements up to which Python's own numbers take less time than the calls of NumPy: the sums of every step."""
_WEIGHTS: Final = mix_array(np.arange(_COLUMNS, dtype=np.uint64)) | np.uint64(1)
_HALF: Final = np.uint64(32)

Arrays = Mapping[str, Array]
Known = dict[int, int]
"""The digests of blocks, without their weights."""


def digest_share(arrays: Arrays, me: int, size: int) -> int:
    """Return the digest of the blocks that are the share of rank `me` of `size`. The digests of all shares add up to
    that of the whole, modulo 2**64, however many members share it. It finds damage; it is no proof against forgery."""
    blocks = _table(arrays)
    return _digest(arrays, blocks, _share(blocks, me, size))


def inspect_share(arrays: Arrays, me: int, size: int, known: Known | None = None) -> tuple[int, bool]:
    """Return `digest_share` of arrays of floats, and whether the share has no infinity and no NaN. What was found of
    each block is added to `known`."""
    blocks = _table(arrays)
    return _inspected(arrays, blocks, _share(blocks, me, size), {} if known is None else known)


def _inspected(arrays: Arrays, blocks: Sequence[_Block], numbers: Iterable[int], known: Known) -> tuple[int, bool]:
    """Return the digest of some blocks, and whether they have no infinity and no NaN."""
    total, is_finite = 0, True
    for number in numbers:
        kind, begin, end, weight = blocks[number]
        block = arrays[kind][begin:end]
        known[number] = digest = _block_digest(block)
        total += weight * digest
        is_finite = is_finite and _is_finite(block)
    return total % 2**64, is_finite


class Inspection:
    """Looks at the share of one member while the arrays come, from the end of each to its beginning. Several threads
    may help."""

    def __init__(self, arrays: Arrays, me: int, size: int) -> None:
        self._blocks = _table(arrays)
        self._missing = list(_share(self._blocks, me, size))
        """The numbers of the blocks that are not there yet."""
        self._ready: list[int] = []
        """Those that nobody looks at yet."""
        self._busy = 0
        """Threads that look at some."""
        self._total, self._is_finite = 0, True
        self.known: Known = {}
        """What was found of each block."""
        self._lock = Condition()

    def complete(self, arrays: Arrays, kind: str, begin: int) -> None:
        """The array `kind` is there from `begin` on: look at that."""
        with self._lock:
            missing = self._missing
            self._ready += [one for one in missing if self._blocks[one][0] == kind and self._blocks[one][1] >= begin]
            ready = set(self._ready)
            self._missing = [one for one in missing if one not in ready]
        self._look(arrays)

    def finish(self, arrays: Arrays) -> tuple[int, bool]:
        """All arrays are there. Return the digest of the share, and whether that has no infinity and no NaN."""
        with self._lock:
            self._ready += self._missing
            self._missing = []
        while True:
            self._look(arrays)
            with self._lock:
                if not self._busy and not self._ready:
                    return self._total % 2**64, self._is_finite
                self._lock.wait_for(lambda: not self._busy)

    def _look(self, arrays: Arrays) -> None:
        """Look at what is ready, a few blocks at a time: another thread takes the others."""
        while True:
            with self._lock:
                numbers, self._ready = self._ready[:_AT_ONCE], self._ready[_AT_ONCE:]
                self._busy += bool(numbers)
            if not numbers:
                return
            found, known = None, Known()
            try:
                found = _inspected(arrays, self._blocks, numbers, known)
            finally:
                with self._lock:
                    self._busy -= 1
                    if found is None:  # this thread was interrupted
                        self._ready += numbers
                    else:
                        self._total += found[0]
                        self._is_finite = self._is_finite and found[1]
                        self.known |= known
                    self._lock.notify_all()


def digest_sample(arrays: Arrays, turn: int, known: Known | None = None) -> int:
    """Return the digest of some blocks: others at each turn, and each block within 16 consecutive turns. Blocks that
    are `known` are not read again, and those that are read are added."""
    blocks = _table(arrays)
    count = len(blocks)
    size = min(count, max(_FEWEST, -(-count // _TURNS)))
    return _digest(arrays, blocks, [(turn * size + place) % count for place in range(size)], known)


def has_changed(arrays: Arrays, known: Known) -> bool:
    """Return whether some of the `known` blocks are not any more what they were. Looks at a few of them."""
    blocks = _table(arrays)
    for number, digest in islice(reversed(known.items()), _LOOKS):  # those of the sample, which are others each time
        kind, begin, end, _ = blocks[number]
        if _block_digest(arrays[kind][begin:end]) != digest:
            return True
    return False


def _digest(arrays: Arrays, blocks: Sequence[_Block], numbers: Iterable[int], known: Known | None = None) -> int:
    known, total = {} if known is None else known, 0
    for number in numbers:
        kind, begin, end, weight = blocks[number]
        digest = known.get(number)
        if digest is None:
            known[number] = digest = _block_digest(arrays[kind][begin:end])
        total += weight * digest
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
    if block.nbytes > _SMALL:
        # One infinity or NaN makes the sum one. A sum of large numbers may become infinite too: only then it is looked
        # at in detail.
        with np.errstate(over="ignore", invalid="ignore"):
            if isfinite(np.add.reduce(block)):
                return True
    elif block.size <= _TINY:
        return all(map(isfinite, block.tolist()))
    return bool(np.logical_and.reduce(np.isfinite(block)))
