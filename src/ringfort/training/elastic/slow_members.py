"""`SlowMembers`: finds the member without which the run would be faster. Pure.

A slow member is dealt less (dealing.py), and that is enough as long as it does something useful while the others do
their share. A member that is slower than that makes all others wait in every step. It leaves, follows the run as a
learner, for which nobody waits, and comes back when it is fast enough (practice.py).

All members have the same tokens, so all find the same one. Integers only, as in dealing.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ringfort.training.elastic.protocol import Token

TOO_SLOW: Final = 2
"""A member is too slow in a step if a step in which it computes a single micro-batch takes so many times as long as one
that the others do without it. It comes back at 1, so that it does not go in and out."""
GRACE: Final = 20_000_000
"""Microseconds for which a member may be too slow: other work on the machine often ends sooner."""
STEPS: Final = 5
"""Steps in a row in which it must be too slow: fewer say little about its speed."""


@dataclass(frozen=True)
class Slow:
    """A member that has been too slow for too long."""

    rank: int
    needs: int
    """Microseconds of a step in which it computes one micro-batch."""
    others: int
    """Microseconds of a step of the others without it."""

    def __str__(self) -> str:
        return f"a step with it takes at least {self.needs / 1e6:.3g} s, one without it {self.others / 1e6:.3g} s"


class SlowMembers:
    """Judges the members of one epoch at every sealed step."""

    def __init__(self, microbatch: int, size: int, fewest: int) -> None:
        """The epoch has `size` members, and the run needs `fewest`."""
        self._microbatch = microbatch
        self._is_judging = size > max(fewest, 1)
        self._since: dict[int, tuple[int, int]] = {}
        """By rank: the microseconds and steps for which a member has been too slow without a break."""

    def sealed(self, samples: int, tokens: Sequence[Token]) -> Slow | None:
        """Take the tokens of a step with so many samples. Return the member that leaves now, the slowest if there are
        several."""
        if not self._is_judging:
            return None
        found = self._too_slow(samples, tokens)
        before, self._since = self._since, {}
        for slow in found:
            spent, steps = before.get(slow.rank, (0, 0))
            self._since[slow.rank] = (spent + tokens[0].period, steps + 1)
        due = [slow for slow in found if self._is_due(*self._since[slow.rank])]
        return max(due, key=lambda slow: (slow.needs, slow.rank), default=None)

    def _is_due(self, spent: int, steps: int) -> bool:
        return spent >= GRACE and steps >= STEPS

    def _too_slow(self, samples: int, tokens: Sequence[Token]) -> list[Slow]:
        speed = sum(token.speed for token in tokens)
        *_, second, first = sorted(token.overhead for token in tokens)
        # What is left of a step when the last member is done: communication.
        common = max(0, tokens[0].period - max(self._busy(token, len(token.covered)) for token in tokens))
        found = list[Slow]()
        for rank, token in enumerate(tokens):
            if not token.speed or speed == token.speed:
                continue  # unknown: nobody was dealt anything yet
            overhead = second if token.overhead == first else first
            others = common + overhead + samples * 1_000_000 // (speed - token.speed)
            needs = common + self._busy(token, 1)
            if needs > TOO_SLOW * others:
                found.append(Slow(rank, needs, others))
        return found

    def _busy(self, token: Token, parts: int) -> int:
        """The microseconds that a member's program needs for a step with so many micro-batches."""
        return token.overhead + (parts * self._microbatch * 1_000_000 // token.speed if token.speed else 0)
