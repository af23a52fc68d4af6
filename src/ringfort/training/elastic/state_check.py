"""What it means that members have different states after one step: who is damaged, who has drifted. Pure.

All members apply the same results to the same state. Machines of one *class* also round alike, so their states have the
same bits; if not, one of them is damaged, or the program changes its state by something else than the results. Machines
of different classes may round differently: their states drift apart, and nothing is wrong with that.

So members compare digests of their states now and then (`protocol.COMPARE_EVERY`). Those that differ take the state of
the first class's majority, damaged or drifted. If the first class has no majority, nobody knows which state is right.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any, Final, cast

import msgspec
import numpy as np

from ringfort.training.elastic.digests import digest_share
from ringfort.training.elastic.protocol import minority
from ringfort.training.elastic.sample_order import Array
from ringfort.training.elastic.state_tree import StateTree

UNKNOWN: Final = -1
"""The origin of a state that was copied: its donor may be of any class."""
_NAMED: Final = 3
"""Leaves that a message names."""


@cache
def own_class() -> str:
    """Return the class of this machine for programs that use NumPy, and torch if that is imported. A class that is too
    small is harmless; one that is too large takes rounding for damage."""
    config = cast("dict[str, Any]", np.show_config(mode="dicts"))  # pyright: ignore[reportUnknownMemberType]
    simd = config.get("SIMD Extensions", {})
    parts = [platform.system(), platform.machine(), f"NumPy {np.__version__}", *simd.get("found", ())]
    torch = sys.modules.get("torch")
    return " ".join([*parts, *([] if torch is None else [f"torch {torch.__version__}"])])


@dataclass(frozen=True)
class Word:
    """What a member says of its state."""

    kind: int
    """A digest of the class of its machine."""
    origin: int
    """The step after which its state was last set to that of all others; `UNKNOWN` for a copy. States of one class and
    origin have the same bits."""
    digest: int

    def packed(self) -> Array:
        """Return the word as an array."""
        return np.array([self.kind, self.origin - UNKNOWN, self.digest], np.uint64)

    @staticmethod
    def unpacked(row: Array) -> Word:
        """Return the word in `row`."""
        kind, origin, digest = (int(value) for value in row)
        return Word(kind, origin + UNKNOWN, digest)


@dataclass(frozen=True)
class Verdict:
    """What the words of all members mean. Every member finds the same."""

    root: int
    """A member of the first class whose state counts."""
    damaged: tuple[int, ...] = ()
    """Members whose state is not that of the majority of their class."""
    drifted: tuple[int, ...] = ()
    """Members of other classes, or with a copy, whose state is not that of `root`."""
    has_majority: bool = True
    """Otherwise no state of the first class has a majority, and its members are `damaged`."""

    @property
    def is_same(self) -> bool:
        """Whether all members have the same state."""
        return not self.damaged and not self.drifted


def judge(words: Sequence[Word]) -> Verdict:
    """Return what `words`, in the order of the ranks, mean."""
    groups: dict[tuple[int, int, int], list[int]] = {}
    for rank, word in enumerate(words):
        # Copies may be of different donors: each is compared with the first class alone.
        groups.setdefault((word.kind, word.origin, rank if word.origin == UNKNOWN else UNKNOWN), []).append(rank)
    # Not one that was away when the others took one state, nor a copy; then the largest.
    first = max(groups, key=lambda key: (key[1], len(groups[key]), -groups[key][0]))
    odd = minority([words[rank].digest for rank in groups[first]])
    if odd is None:
        return Verdict(groups[first][0], tuple(groups[first]), has_majority=False)
    root = next(rank for place, rank in enumerate(groups[first]) if place not in odd)
    damaged = list[int]()
    for ranks in groups.values():
        damaged += [ranks[place] for place in minority([words[rank].digest for rank in ranks]) or ()]
    drifted = [r for r, word in enumerate(words) if word.digest != words[root].digest and r not in damaged]
    return Verdict(root, tuple(sorted(damaged)), tuple(drifted))


class Leaves(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of one member leaf by leaf: told only when states differ."""

    kind: str
    """The class of its machine."""
    digests: dict[str, int]
    """By the path of the leaf, sorted: dicts of one program may have another order elsewhere."""

    @property
    def word(self) -> tuple[int, int]:
        """The digests of the class and of the whole state."""
        return _number(self.kind.encode()), _number(repr(self.digests).encode())

    def differences(self, other: Leaves) -> str:
        """Return in words the leaves in which two states differ; empty if they are equal."""
        paths = self.digests | other.digests
        found = [path for path in paths if self.digests.get(path) != other.digests.get(path)]
        return ", ".join(found[:_NAMED]) + (f" and {len(found) - _NAMED} more" if len(found) > _NAMED else "")


def leaves_of(kind: str, state: StateTree) -> Leaves:
    """Return the digests of all leaves of a state."""
    digests = dict[str, int]()
    for path, leaf in state.leaves():
        is_array = isinstance(leaf, np.ndarray)
        digests[path] = digest_share({"": leaf}, 0, 1) if is_array else _number(repr(leaf).encode())
    return Leaves(kind, dict(sorted(digests.items())))


def _number(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
