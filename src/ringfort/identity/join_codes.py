"""Join codes: the name and secret of a cluster in a form that people can read out, type and photograph. Pure.

    ringfort-default-16k7-qf3m-2x9r-...        ringfort · name · fifteen groups of four

After the name: one symbol for the version, one for the length of the name, 52 for the 256 bits of the secret and 6 for
a checksum that covers the name too. Case is ignored, as are spaces and dashes outside the name; O, I and L are read as
0, 1 and 1.
"""

from __future__ import annotations

from typing import Final

from ringfort.errors import InvalidArgumentError, JoinCodeError
from ringfort.identity import base32, typos

SECRET_BYTES: Final = 32

_MAX_TEXT = 1024
"""Characters. A code has at most 116; a much longer text was pasted by mistake."""


def check_name(name: str) -> str:
    """Return `name` if it is a valid name of a cluster. Raises `InvalidArgumentError`."""
    if not typos.NAME.match(name):
        raise InvalidArgumentError(
            "cluster", name, f"must have 1 to {typos.MAX_NAME} characters: a-z, 0-9 and single dashes between them"
        )
    return name


def encode(name: str, secret: bytes) -> str:
    """Return the join code of a valid name and secret (`NetworkNamespace` checks both)."""
    symbols = [typos.VERSION, len(name) - 1, *base32.to_symbols(secret)]
    text = base32.to_text([*symbols, *base32.checksum(name, symbols)])
    return f"{typos.PREFIX}-{name}-{base32.grouped(text, typos.GROUP)}"


def decode(text: str, *, source: str = "join code") -> tuple[str, bytes]:
    """Return the name and the secret. Raises a `JoinCodeError` that begins with `source` and says where the likely
    error is."""
    rest = typos.normalise(text) if len(text) <= _MAX_TEXT else None
    if rest is None:
        raise JoinCodeError(f"must begin with {typos.PREFIX}-", name=source)
    name, letters = typos.split(rest)
    symbols = [base32.VALUES[letter] for letter in letters if letter in base32.VALUES]
    if len(symbols) != typos.SYMBOLS or not typos.NAME.match(name) or base32.residue(name, symbols):
        why, group = typos.explain(rest)
        raise JoinCodeError(why, name=source, group=group)
    if symbols[:2] != [typos.VERSION, len(name) - 1]:
        raise JoinCodeError(
            "made by another version of ringfort; install the same version on both machines", name=source
        )
    try:
        return name, base32.from_symbols(symbols[2 : -base32.CHECKSUM_SYMBOLS])
    except ValueError:
        raise JoinCodeError("not made by ringfort", name=source) from None
