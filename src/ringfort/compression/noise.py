"""Cheap random numbers: a table of uniform noise that is read from a random offset, and hashes of numbers.

Stochastic rounding needs one random number per element, and drawing them costs more than the rest of a codec. The table
holds each of `CHUNK` evenly spaced numbers once, so an element that reads it at a random offset gets an exactly uniform
number; only elements that are a whole table apart may get the same one.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np

from ringfort.transport.reducer import Array

CHUNK: Final = 32768
"""Elements that a codec works on at a time, 128 KiB as float32: with noise and result they stay in the L2 cache."""

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
