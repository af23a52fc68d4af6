"""Crockford's base 32, with the checksum of Bech32m (BIP 350). Pure.

The alphabet leaves out I, L, O and U, which people confuse with others, and reads the first three as 1, 1 and 0. The
checksum is a BCH code over these 32 symbols with a distance of at least 4 up to 1023 symbols, and of 5 up to 89. So one
wrong symbol is not only noticed but located: no other valid code is as near.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, reduce

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
VALUES = {letter: value for value, letter in enumerate(ALPHABET)} | {"o": 0, "i": 1, "l": 1}
BITS = 5
CHECKSUM_SYMBOLS = 6

_TARGET = 0x2BC830A3  # BIP 350
_GENERATOR = (0x3B6A57B2, 0x26508E6D, 0x1EA119FA, 0x3D4233DD, 0x2A1462B3)  # BIP 173
_FEEDBACK = [
    reduce(int.__xor__, (term for bit, term in enumerate(_GENERATOR) if top >> bit & 1), 0) for top in range(32)
]


def to_symbols(data: bytes) -> list[int]:
    """Split the bits of `data` into symbols of five bits; the last one is padded with zeros."""
    count = -(-len(data) * 8 // BITS)
    number = int.from_bytes(data, "big") << (count * BITS - len(data) * 8)
    return [number >> BITS * (count - 1 - index) & 31 for index in range(count)]


def from_symbols(symbols: Sequence[int]) -> bytes:
    """Undo `to_symbols`. Raises `ValueError` if the padding is not zero."""
    number = 0
    for symbol in symbols:
        number = number << BITS | symbol
    size, spare = divmod(len(symbols) * BITS, 8)
    if number & ((1 << spare) - 1):
        raise ValueError("The padding of the last symbol is not zero")
    return (number >> spare).to_bytes(size, "big")


def to_text(symbols: Iterable[int]) -> str:
    """Write `symbols` as letters."""
    return "".join(ALPHABET[symbol] for symbol in symbols)


def grouped(text: str, size: int = 4) -> str:
    """Split `text` into groups, which are easier to read and type."""
    return "-".join(text[start : start + size] for start in range(0, len(text), size))


def checksum(name: str, symbols: Sequence[int]) -> list[int]:
    """The six checksum symbols for `name` and `symbols`."""
    value = residue(name, [*symbols, *[0] * CHECKSUM_SYMBOLS])
    return [value >> BITS * (CHECKSUM_SYMBOLS - 1 - index) & 31 for index in range(CHECKSUM_SYMBOLS)]


def residue(name: str, symbols: Sequence[int]) -> int:
    """0 if `symbols` end with their checksum. Otherwise it depends only on the error, and so locates it."""
    value = 1
    for symbol in (*expand(name), *symbols):
        value = _times_x(value) ^ symbol
    return value ^ _TARGET


def expand(name: str) -> list[int]:
    """An ASCII name as symbols: the high bits of each character, a zero, the low bits of each (BIP 173)."""
    codes = name.encode("ascii")
    return [*(code >> BITS for code in codes), 0, *(code & 31 for code in codes)]


@cache
def effect(places_from_end: int) -> tuple[int, ...]:
    """The residue that each error (the exclusive or of the wrong and the right symbol) at one place causes."""
    if places_from_end == 0:
        return tuple(range(32))
    return tuple(map(_times_x, effect(places_from_end - 1)))


def _times_x(value: int) -> int:
    return (value & 0x1FFFFFF) << BITS ^ _FEEDBACK[value >> 25]
