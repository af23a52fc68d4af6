"""`ResultHistory`: the latest sealed results of a run, for those who missed some. Bounded in bytes and number. Pure."""

from __future__ import annotations

from collections import deque
from math import inf

from msgspec import Struct

from ringfort.training.elastic.protocol import Mark, Result
from ringfort.training.elastic.sample_order import Array


class Kept(Struct, frozen=True):
    """A sealed result. Its arrays are the run's, which reduces into other memory as long as this has them."""

    before: Mark
    result: Result
    digest: int
    after: Mark
    """The mark of a member that has applied it."""
    sums: tuple[float, ...] = ()
    is_finite: bool = True

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays of the result, by name."""
        return {name: array.reshape(-1) for name, array in self.result.payload.items()}

    @property
    def nbytes(self) -> int:
        """The bytes of the arrays."""
        return sum([array.nbytes for array in self.result.payload.values()])


class ResultHistory:
    """An unbroken sequence of results: one that does not follow the last begins another."""

    def __init__(self) -> None:
        self._kept: deque[Kept] = deque()
        self.nbytes = 0
        """The bytes of all results."""

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, kept: Kept) -> None:
        """Add the latest result."""
        if self._kept and self._kept[-1].after != kept.before:
            self.clear()
        self._kept.append(kept)
        self.nbytes += kept.nbytes

    def trim(self, limit: int, most: int, *, least: int = 0, until: float = inf) -> None:
        """Drop the oldest results until there are at most `limit` bytes, or `least` results, and `most` results. Those
        that follow step `until` stay."""
        while (self.nbytes > limit and len(self._kept) > least) or len(self._kept) > most:
            if self._kept[0].before.step >= until:
                return
            self.nbytes -= self._kept.popleft().nbytes

    def clear(self) -> None:
        """Drop all results."""
        self._kept.clear()
        self.nbytes = 0

    def following(self, mark: Mark) -> tuple[Kept, int] | None:
        """Return the result that follows `mark`, and how many there are beyond it; None if it is not there."""
        if not self._kept:
            return None
        place = mark.step - self._kept[0].before.step
        if not 0 <= place < len(self._kept) or self._kept[place].before != mark:
            return None
        return self._kept[place], len(self._kept) - place - 1

    def nbytes_after(self, mark: Mark) -> int:
        """Return the bytes of the results that follow `mark`, as far as they are there."""
        found = self.following(mark)
        if found is None:
            return 0
        return sum(self._kept[-place].nbytes for place in range(1, found[1] + 2))
