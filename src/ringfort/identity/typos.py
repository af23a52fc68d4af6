"""Parse a join code as a person typed it, and find the likely typo. Pure.

No code is corrected automatically: a wrong guess could join the wrong cluster. A message shows at most one group of the
code, which is 20 of the 256 bits of the secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from string import ascii_lowercase, digits
from typing import NamedTuple

from ringfort.identity.base32 import ALPHABET, VALUES, effect, residue

PREFIX = "ringfort"
VERSION = 1
GROUP = 4
SYMBOLS = 60
"""Symbols after the name: version, length of the name, 52 for the secret, 6 for the checksum. Fifteen groups."""
MAX_NAME = 32
NAME = re.compile(rf"(?=.{{1,{MAX_NAME}}}\Z)[a-z0-9]+(-[a-z0-9]+)*\Z")
"""Safe as a file name, in a shell and in a discovery record; its length fits in one symbol."""

_NAME_LETTERS = ascii_lowercase + digits + "-"
# Spaces, and everything that word processors and phones turn a hyphen into.
_SEPARATORS = re.compile(r"[\s\-_\u00ad\u2010-\u2015\u2212\ufe58\ufe63\uff0d]+")


class Fault(NamedTuple):
    """What is wrong, and in which group, if that is known."""

    why: str
    group: int | None = None


def normalise(text: str) -> str | None:
    """What follows the prefix, in lower case and with single dashes; None if there is no prefix."""
    text = _SEPARATORS.sub("-", text.strip().lower()).strip("-")
    return text[len(PREFIX) :].strip("-") if text.startswith(PREFIX) else None


def split(rest: str, count: int = SYMBOLS) -> tuple[str, str]:
    """The name, and the last `count` letters without their dashes (or fewer, if there are not so many)."""
    at = len(rest)
    while count and at:
        at -= 1
        count -= rest[at] != "-"
    return rest[:at].strip("-"), rest[at:].replace("-", "")


def explain(rest: str) -> Fault:
    """Return the most likely fault of a code whose checksum is wrong."""
    name, letters = split(rest)
    # Faults that the checksum confirms come before those that can only be counted.
    for look in (_slip_in_letters, _slip_in_name, _wrong_length, _missing_groups, _strange_letters):
        faults = list(look(rest, name, letters))
        if len(faults) == 1:
            return faults[0]
    if not NAME.match(name):
        return Fault(f"it is too long, or its name {name[:MAX_NAME]!r} is invalid: a-z, 0-9 and single dashes")
    return Fault("more than one letter is wrong; compare it with the original group by group")


def _slip_in_letters(rest: str, name: str, letters: str) -> Iterator[Fault]:
    """One letter is wrong, or two neighbours are swapped, in a code of the right length."""
    for place in range(len(letters)):
        typed, group = _group(letters, place)
        right = _solve(name, letters[:place], letters[place + 1 :])
        if right is not None:
            yield Fault(f"group {group}, {typed!r}: did you mean {_group(right, place)[0]!r}?", group)
        swapped = _swap(letters, place)
        if swapped != letters and _residue(name, swapped) == 0:
            if (place + 1) % GROUP:
                right = _group(swapped, place)[0]
                yield Fault(f"group {group}, {typed!r}: two are swapped; did you mean {right!r}?", group)
            else:
                where = f"the last letter of group {group} and the first of group {group + 1}"
                yield Fault(f"{where}, {letters[place]!r} and {letters[place + 1]!r}, are swapped", group)


def _slip_in_name(rest: str, name: str, letters: str) -> Iterator[Fault]:
    """One letter of the name is wrong, missing or extra, or two neighbours are swapped."""
    candidates = {_swap(name, place) for place in range(len(name))}
    for place in range(len(name) + 1):
        candidates |= {name[:place] + letter + name[place:] for letter in _NAME_LETTERS}
        candidates |= {name[:place] + letter + name[place + 1 :] for letter in ("", *_NAME_LETTERS)}
    # The code contains the length of its name; without it, a hundred times as many would have to be tried.
    length = VALUES.get(letters[1], -1) + 1 if len(letters) == SYMBOLS else 0
    for candidate in sorted(candidates):
        if len(candidate) == length and _residue(candidate, letters) == 0:
            yield Fault(f"the name {name!r}: did you mean {candidate!r}?")


def _wrong_length(rest: str, name: str, letters: str) -> Iterator[Fault]:
    """One letter is missing or extra, or one group is extra. The first match: in a run of equal letters all match."""
    name, letters = split(rest, SYMBOLS - 1)
    for place in range(SYMBOLS):
        right = _solve(name, letters[:place], letters[place:])
        if right is not None:
            meant, group = _group(right, place)
            yield Fault(f"group {group}: a letter is missing; did you mean {meant!r}?", group)
            return
    for extra, what in ((1, "a letter"), (GROUP, "a whole group")):
        name, letters = split(rest, SYMBOLS + extra)
        for place in range(0, len(letters), extra):
            if _residue(name, letters[:place] + letters[place + extra :]) == 0:
                group = place // GROUP + 1
                yield Fault(f"group {group}: remove {what}: {letters[place : place + extra]!r}", group)
                return


def _missing_groups(rest: str, name: str, letters: str) -> Iterator[Fault]:
    """Whole groups are missing. The first group has the version and the length of the name, so the name is known."""
    for count in range(SYMBOLS // GROUP - 1, 0, -1):
        shorter, found = split(rest, count * GROUP)
        if NAME.match(shorter) and [VALUES.get(letter) for letter in found[:2]] == [VERSION, len(shorter) - 1]:
            yield Fault(
                f"it has {count} groups of four after the name {shorter!r}; a whole code has {SYMBOLS // GROUP}"
            )
            return
    if not name or len(letters) < SYMBOLS:
        yield Fault(f"it is too short: a whole code has a name and then {SYMBOLS // GROUP} groups of four")


def _strange_letters(rest: str, name: str, letters: str) -> Iterator[Fault]:
    """Letters that no code contains."""
    strange = [place for place, letter in enumerate(letters) if letter not in VALUES]
    if strange:
        groups = sorted({place // GROUP + 1 for place in strange})
        found = " ".join(sorted({ascii(letters[place]) for place in strange}))
        where = f"group{'s' if len(groups) > 1 else ''} {', '.join(map(str, groups))}"
        yield Fault(f"{where}: {found}: a code has only digits and letters, but no u", groups[0])


def _residue(name: str, letters: str) -> int | None:
    """0 for a valid code; None if it cannot be one."""
    if len(letters) != SYMBOLS or not NAME.match(name) or any(letter not in VALUES for letter in letters):
        return None
    return residue(name, [VALUES[letter] for letter in letters])


def _solve(name: str, before: str, after: str) -> str | None:
    """The code with the one letter between `before` and `after` that the checksum asks for; None if there is none."""
    wrong, effects = _residue(name, f"{before}{ALPHABET[0]}{after}"), effect(len(after))
    return f"{before}{ALPHABET[effects.index(wrong)]}{after}" if wrong in effects else None


def _group(letters: str, place: int) -> tuple[str, int]:
    """The group that has this place, and its number."""
    start = place - place % GROUP
    return letters[start : start + GROUP], start // GROUP + 1


def _swap(text: str, place: int) -> str:
    """`text` with the letter at `place` and the next one swapped."""
    return text[:place] + text[place : place + 2][::-1] + text[place + 2 :]
