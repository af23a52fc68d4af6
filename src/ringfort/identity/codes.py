"""Join codes: a cluster's name and secret in a form that people read out, type and photograph. Pure.

    ringfort-default-16k7-qf3m-2x9r-...        ringfort · name · fifteen groups of four

After the name: one symbol of version, one for the length of the name, 52 for the secret's 256 bits and 6 for a checksum
that covers the name too. Capitals do not matter, nor do spaces and dashes outside the name; O, I and L are read as 0, 1
and 1.
"""

from __future__ import annotations

from typing import Final

from ringfort.errors import InvalidArgumentError, InvalidKeyError, JoinCodeError
from ringfort.identity import typed
from ringfort.identity.base32 import (
    CHECKSUM_SYMBOLS,
    VALUES,
    checksum,
    from_symbols,
    grouped,
    residue,
    to_symbols,
    to_text,
)

SECRET_BYTES: Final = 32

_MAX_TEXT = 1024
"""Characters. A code has at most 116; what is much longer is something else, pasted by mistake."""


def check_name(name: str) -> str:
    """`name` if a cluster may be called so; raises `InvalidArgumentError`."""
    if not typed.NAME.match(name):
        raise InvalidArgumentError(
            "cluster", name, f"a name has 1 to {typed.MAX_NAME} of a-z, 0-9 and single dashes between them"
        )
    return name


def encode(name: str, secret: bytes) -> str:
    """The join code. Raises `InvalidArgumentError` for a name, `InvalidKeyError` for a secret that is none."""
    check_name(name)
    if len(secret) != SECRET_BYTES:
        raise InvalidKeyError("secret", f"must have {SECRET_BYTES} bytes, and has {len(secret)}")
    symbols = [typed.VERSION, len(name) - 1, *to_symbols(secret)]
    return f"{typed.PREFIX}-{name}-{grouped(to_text([*symbols, *checksum(name, symbols)]), typed.GROUP)}"


def decode(text: str, *, source: str = "join code") -> tuple[str, bytes]:
    """The name and the secret. Raises `JoinCodeError` that begins with `source` and says where the error likely is."""
    rest = typed.normalise(text) if len(text) <= _MAX_TEXT else None
    if rest is None:
        raise JoinCodeError(f"a join code begins with {typed.PREFIX}-", name=source)
    name, letters = typed.split(rest)
    symbols = [VALUES[letter] for letter in letters if letter in VALUES]
    if len(symbols) != typed.SYMBOLS or not typed.NAME.match(name) or residue(name, symbols):
        why, group = typed.explain(rest)
        raise JoinCodeError(why, name=source, group=group)
    if symbols[:2] != [typed.VERSION, len(name) - 1]:
        raise JoinCodeError("it was made by another version of ringfort; install the same on both", name=source)
    try:
        return name, from_symbols(symbols[2:-CHECKSUM_SYMBOLS])
    except ValueError:
        raise JoinCodeError("it was not made by ringfort", name=source) from None
