"""`Share`: which samples of a micro-batch a local rank computes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ringfort.training.elastic.sample_order import random_key


@dataclass(frozen=True)
class Share:
    """The share of one of the local ranks that compute each micro-batch together. With one rank, all of it."""

    rank: int = 0
    ranks: int = 1

    def samples(self, count: int) -> int:
        """Return how many of `count` samples count at this rank: perhaps none, if there are fewer than ranks."""
        begin, end = self._ends(count)
        return end - begin

    def loaded(self, count: int) -> slice:
        """Return which of `count` samples this rank loads. A rank without a sample loads the first, with weight 0: all
        ranks must compute, because they gather each other's parameters."""
        begin, end = self._ends(count)
        return slice(begin, end) if begin < end else slice(0, 1)

    def key(self, key: int) -> int:
        """Return the random key of this rank for a micro-batch with that key."""
        return random_key(key, self.rank) if self.rank else key

    def _ends(self, count: int) -> tuple[int, int]:
        return count * self.rank // self.ranks, count * (self.rank + 1) // self.ranks
