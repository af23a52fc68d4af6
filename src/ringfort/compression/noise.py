"""Cheap random numbers: a table of uniform noise that is read from another place each time, and numbers out of numbers.

Stochastic rounding wants as many random numbers as there are elements, and drawing those costs more than all else that
a codec does. The table holds each of `CHUNK` evenly spaced numbers once, so an element that meets it at a random place
meets a uniform number, exactly; only elements that are a table apart may meet the same one.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np

from ringfort.transport.reducer import Array

CHUNK: Final = 32768
"""Elements that a codec has in hand at a time, 128 KiB as float32: with noise and result it stays in the L2 cache."""

_WORD: Final = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """64 bits that look random and depend on every one of `numbers` (splitmix64's finish, one round for each)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & _WORD)) * 0xBF58476D1CE4E5B9 & _WORD
        state ^= state >> 27
        state = state * 0x94D049BB133111EB & _WORD
        state ^= state >> 31
    return state


def rounding_noise(seed: int, chunk: int, count: int) -> Array:
    """`count` numbers from -0.5 to 0.5, for chunk number `chunk` of an array. A view: not to be written to."""
    start = mix(seed, chunk) % CHUNK
    return _table()[start : start + count]


@cache
def _table() -> Array:
    even = ((np.arange(CHUNK, dtype=np.float32) + np.float32(0.5)) / np.float32(CHUNK)) - np.float32(0.5)
    once = np.random.default_rng(20240229).permutation(even)
    table = np.concatenate([once, once])
    table.flags.writeable = False
    return table
