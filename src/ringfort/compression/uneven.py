"""How much of a compressed reduction each rank owns, by the speed of its link.

The owner of a part receives it from all others, and sends the sum to all others. So of n ranks, one that owns the share
w of the array sends 1 - w while parts are added up, and (n-1) w while sums are handed out: with a slow uplink, the
fewer it owns, the sooner it is done. Moshpit SGD and hivemind solve that as a linear program, which has a closed form:

    x = max(1 / slowest b, (2n - 2) / sum b),    w_i in proportion to x b_i - 1

for ranks that send b_i bytes a second. It changes nothing for two ranks. The two halves of a reduction come one after
the other here, so it helps ranks whose links send more slowly than they receive, as home uplinks do; one that receives
as slowly waits longer for the sums than it saves. What both halves take is compared, and equal shares stay unless
others are clearly faster.

All arithmetic is of whole numbers: a rank whose Python rounds in another way must not cut elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Final

from ringfort.backends.group import Group
from ringfort.collectives import algorithms
from ringfort.collectives.algorithms import Span
from ringfort.collectives.steps import gather_rows
from ringfort.transport.messages import Envelope

PAYS: Final = Fraction(4, 5)
"""Unequal shares must take less than this part of the time of equal ones: links are measured roughly."""


@dataclass(frozen=True)
class Shares:
    """What each rank owns, relative to the others. Empty: all own the same."""

    weights: tuple[int, ...] = ()

    def split(self, count: int, parts: int) -> list[Span]:
        """Return the span of each of so many ranks in an array of `count` elements."""
        if not self.weights:
            return algorithms.split(count, parts)
        total = sum(self.weights)
        return list(pairwise(count * edge // total for edge in accumulate(self.weights, initial=0)))


def shares(sends: Sequence[int], receives: Sequence[int]) -> Shares:
    """Return what each rank should own. `sends` and `receives` are the bytes a second of each one's link; 0 if unknown.
    Pure."""
    n = len(sends)
    if n < 3 or not all(sends) or not all(receives):
        return Shares()
    slowest, times = min(sends), 2 * n - 2
    # With links of n times the speed, others are never what all wait for; how much faster they are is mostly noise.
    capped = [min(one, n * slowest) for one in sends]
    total = sum(capped)
    is_slow = total >= times * slowest
    weights = tuple(one - slowest if is_slow else times * one - total for one in capped)
    found = [Fraction(weight, sum(weights)) for weight in weights]
    is_worth_it = _seconds(found, sends, receives) < PAYS * _seconds([Fraction(1, n)] * n, sends, receives)
    return Shares(weights) if is_worth_it else Shares()


def _seconds(owned: Sequence[Fraction], sends: Sequence[int], receives: Sequence[int]) -> Fraction:
    """Return what a reduction of one byte takes: first all send what others own, then all send what they own."""
    others = len(owned) - 1
    links = list(zip(owned, sends, receives, strict=True))
    adding = max(max((1 - w) / out, others * w / into) for w, out, into in links)
    handing_out = max(max(others * w / out, (1 - w) / into) for w, out, into in links)
    return adding + handing_out


def shares_of(group: Group, envelope: Envelope) -> Shares:
    """Return the shares of a group's ranks. The first call is a part of the collective of `envelope`: each rank tells
    the others how fast its links are. A link is taken to be as fast as the fastest message that it sent, or received,
    was: what is slower is the other end's."""
    if group.world_size < 3 or not group.is_measured:
        return _EQUAL

    def told() -> Shares:
        own = [group.speeds_out.get(peer, 0.0) for peer in range(group.world_size)]
        table = gather_rows(group, own, envelope)
        return shares([int(one) for one in table.max(axis=1)], [int(one) for one in table.max(axis=0)])

    return group.part(Shares, told)


_EQUAL: Final = Shares()
