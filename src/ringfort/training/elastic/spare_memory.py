"""`SpareMemory`: large arrays that are used again as soon as nobody holds them."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from ringfort.training.elastic.sample_order import Array

_SMALL: Final = 1 << 16
"""Bytes up to which new memory costs less than a look at what is there."""
_LOOKS: Final = 8
"""Arrays that are looked at: the one that was handed out first is the first to be free, except while some are sent."""


def _taken_from(arrays: deque[Array], most: int) -> Iterator[tuple[Array, int]]:
    """Take up to `most` arrays from the deque. Yield each with the number of references to it."""
    for _ in range(min(most, len(arrays))):
        array = arrays.popleft()
        yield array, sys.getrefcount(array)


def _unused() -> int:
    """Return the references to an array that nobody else has, by the same loop: versions of Python count differently.
    Not once for all, and of three the least: what looks at the variables of a function, such as a debugger, may hold
    them too. So this may be too small, but never too large."""
    return min(count for _, count in _taken_from(deque([np.empty(0) for _ in range(3)]), 3))


class SpareMemory:
    """Hands out memory. The system would have to clear each page of new memory: 64 MiB take 5 ms.

    Whoever may still read an array holds a reference to it or to a view of it: a result that is held, kept for others
    or being sent, and a program that has kept a mean. So nobody has to be asked, and nobody can be forgotten.
    """

    def __init__(self, allocate: Callable[[int, str], Array] = np.empty, *, keeps_all: bool = False) -> None:
        """`allocate` returns new memory for so many elements of a type. With `keeps_all`, memory that is not needed any
        more is only given back by `trim`."""
        self._allocate = allocate
        self._keeps_all = keeps_all
        self._arrays: deque[Array] = deque()

    def take(self, kind: str, size: int) -> Array:
        """Return an array with any content, which nobody else has."""
        found = self._allocate(size, kind) if size * np.dtype(kind).itemsize <= _SMALL else None
        if found is not None:
            return found
        unused = _unused()
        for array, references in _taken_from(self._arrays, _LOOKS):
            if references > unused:
                self._arrays.append(array)
            elif found is None and array.size == size and array.dtype == kind:
                found = array  # other unused ones are given back: there are more than needed
            elif self._keeps_all:
                self._arrays.append(array)
        if found is None:
            found = self._allocate(size, kind)
        self._arrays.append(found)
        return found

    def trim(self) -> None:
        """Give back what nobody holds."""
        unused = _unused()
        for array, references in _taken_from(self._arrays, len(self._arrays)):
            if references > unused:
                self._arrays.append(array)
