"""A join code as a person typed it: taking it apart, and saying where it is likely wrong. Pure.

Nothing here mends a code. A guess that is right tells where to look; a guess that was acted on could join the wrong
cluster. A message shows at most one group of the code: 20 of the secret's 256 bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from string import ascii_lowercase, digits
from typing import NamedTuple

from ringfort.identity.base32 import ALPHABET, VALUES, effect, residue

PREFIX = "ringfort"
VERSION = 1
GROUP = 4
SYMBOLS = 60
"""Of a code after its name: version, the name's length, 52 for the secret, 6 for the checksum. Fifteen groups."""
MAX_NAME = 32
NAME = re.compile(rf"(?=.{{1,{MAX_NAME}}}\Z)[a-z0-9]+(-[a-z0-9]+)*\Z")
"""Safe as a file name, in a shell and in a discovery record; and its length fits one symbol."""

_NAME_LETTERS = ascii_lowercase + digits + "-"
# Spaces and everything that a word processor or a phone makes of a hyphen.
_SEPARATORS = re.compile(r"[\s\-_\u00ad\u2010-\u2015\u2212\ufe58\ufe63\uff0d]+")


class Fault(NamedTuple):
    """What is wrong, and in which group if that is known."""

    why: str
    group: int | None = None


def normalise(text: str) -> str | None:
    """What follows the prefix, in small letters and with single dashes; None if the prefix is not there."""
    text = _SEPARATORS.sub("-", text.strip().lower()).strip("-")
    return text[len(PREFIX) :].strip("-") if text.startswith(PREFIX) else None


def split(rest: str, count: int = SYMBOLS) -> tuple[str, str]:
    """The name, and the last `count` letters without their dashes (fewer if there are fewer)."""
    at = len(rest)
    while count and at:
        at -= 1
        count -= rest[at] != "-"
    return rest[:at].strip("-"), rest[at:].replace("-", "")


def explain(rest: str) -> Fault:
    """The likeliest fault of a code that does not check."""
    name, letters = split(rest)
    # What the checksum confirms comes before what can only be counted.
    for look in (_slip_in_letters, _slip_in_name, _wrong_length, _strange_letter, _missing_groups, _strange_letters):
        faults = list(look(rest, name, letters))
        if len(faults) == 1:
            return faults[0]
    if not NAME.match(name):
        return Fault(f"it is too long, or its name {name[:MAX_NAME]!r} is none: a-z, 0-9 and single dashes")
    return Fault("more than one letter is wrong; compare it with the original group by group")


def _slip_in_letters(rest: str, name: str, letters: str) -> Iterator[Fault]:
    """One wrong letter, or two neighbours swapped, in a code of the right length."""
    wrong = _residue(name, letters)
    if wrong is None:
        return
    symbols = [VALUES[letter] for letter in letters]
    for place, symbol in enumerate(symbols):
        changes = effect(SYMBOLS - 1 - place)
        if wrong in changes:
            yield _did_you_mean(letters, _put(letters, place, ALPHABET[symbol ^ changes.index(wrong)]), place)
    for place, (first, second) in enumerate(pairwise(symbols)):
        change = first ^ second
        if change and effect(SYMBOLS - 1 - place)[change] ^ effect(SYMBOLS - 2 - place)[change] == wrong:
            yield _swapped(letters, place)


def _slip_in_name(rest: str, name: str, letters: str) -> Iterator[Fault]:
    """One letter of the name wrong, missing or too many, or two neighbours swapped."""
    places = range(len(name))
    candidates = {
        *(_put(name, place, letter) for place in places for letter in _NAME_LETTERS),
        *(_insert(name, place, letter) for place in range(len(name) + 1) for letter in _NAME_LETTERS),
        *(_put(name, place, "") for place in places),
        *(_swap(name, place) for place in places[:-1]),
    }
    # The code knows how long its name is; without that, a hundred times as many would have to be tried.
    length = VALUES.get(letters[1], -1) + 1 if len(letters) == SYMBOLS else 0
    for candidate in sorted(candidates):
        if len(candidate) == length and _residue(candidate, letters) == 0:
            yield Fault(f"the name {name!r}: did you mean {candidate!r}?")


def _wrong_length(rest: str, name: str, letters: str) -> Iterator[Fault]:
    """One letter missing, one too many, or one group too many. The first that checks: in a run all places are alike."""
    name, letters = split(rest, SYMBOLS - 1)
    for place in range(SYMBOLS):
        changes = effect(SYMBOLS - 1 - place)
        wrong = _residue(name, _insert(letters, place, ALPHABET[0]))
        if wrong in changes:
            right = _insert(letters, place, ALPHABET[changes.index(wrong)])
            group = _group_of(place)
            yield Fault(f"group {group}: a letter is missing; did you mean {_group(right, group)!r}?", group)
            return
    for extra, what in ((1, "a letter"), (GROUP, "a whole group")):
        name, letters = split(rest, SYMBOLS + extra)
        for place in range(0, len(letters), extra):
            if _residue(name, letters[:place] + letters[place + extra :]) == 0:
                group = _group_of(place)
                yield Fault(f"group {group}: {what} is too many: {letters[place : place + extra]!r}", group)
                return


def _strange_letter(rest: str, name: str, letters: str) -> Iterator[Fault]:
    """One letter that no code has; the checksum tells what belongs there."""
    strange = _strange(letters)
    if len(strange) == 1:
        rights = (_put(letters, strange[0], letter) for letter in ALPHABET)
        yield from (_did_you_mean(letters, right, strange[0]) for right in rights if _residue(name, right) == 0)


def _missing_groups(rest: str, name: str, letters: str) -> Iterator[Fault]:
    """Whole groups missing: the first has the version and the length of the name, and so tells where the name ends."""
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
    """Letters that no code has."""
    strange = _strange(letters)
    if strange:
        groups = sorted({_group_of(place) for place in strange})
        found = " ".join(sorted({ascii(letters[place]) for place in strange}))
        where = f"group{'s' if len(groups) > 1 else ''} {', '.join(map(str, groups))}"
        yield Fault(f"{where}: {found}: a code has only digits and letters, and no u", groups[0])


def _strange(letters: str) -> list[int]:
    return [place for place, letter in enumerate(letters) if letter not in VALUES]


def _residue(name: str, letters: str) -> int | None:
    """0 for a code that checks; None for what cannot be one."""
    if len(letters) != SYMBOLS or not NAME.match(name) or any(letter not in VALUES for letter in letters):
        return None
    return residue(name, [VALUES[letter] for letter in letters])


def _did_you_mean(typed: str, right: str, place: int) -> Fault:
    group = _group_of(place)
    return Fault(f"group {group}, {_group(typed, group)!r}: did you mean {_group(right, group)!r}?", group)


def _swapped(letters: str, place: int) -> Fault:
    group = _group_of(place)
    if _group_of(place + 1) == group:
        right = _group(_swap(letters, place), group)
        return Fault(f"group {group}, {_group(letters, group)!r}: two are swapped; did you mean {right!r}?", group)
    return Fault(
        f"the last letter of group {group} and the first of group {group + 1}, "
        f"{letters[place]!r} and {letters[place + 1]!r}, are swapped",
        group,
    )


def _group_of(place: int) -> int:
    return place // GROUP + 1


def _group(letters: str, group: int) -> str:
    return letters[(group - 1) * GROUP : group * GROUP]


def _put(text: str, place: int, letter: str) -> str:
    return text[:place] + letter + text[place + 1 :]


def _insert(text: str, place: int, letter: str) -> str:
    return text[:place] + letter + text[place:]


def _swap(text: str, place: int) -> str:
    return text[:place] + text[place + 1] + text[place] + text[place + 2 :]
