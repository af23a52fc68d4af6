"""`KeepingUp`: whether a learner gets nearer to the run that it follows, or has to be waited for. Pure.

Results may be sealed faster than a learner can fetch and apply them, for example if steps are short and gradients are
large. It would never arrive: members rest until it has caught up, for a bounded time.
"""

from __future__ import annotations

from collections import deque
from typing import Final

_LOOKS: Final = 4
"""Results within which a learner should have come nearer."""
MOST_REST: Final = 10.0
"""Seconds for which members rest for one learner at most: it may be on a network that is slower than theirs."""


class KeepingUp:
    """One learner on its way."""

    def __init__(self) -> None:
        self._behind: deque[int] = deque(maxlen=_LOOKS + 1)

    def fetched(self, behind: int) -> None:
        """It was sent a result, beyond which there are so many."""
        self._behind.append(behind)

    def needs_rest(self, results: int, image: int) -> bool:
        """Return whether members should rest. `results` are the bytes that were sealed since the image that it fetches
        was made, of `image` bytes; 0 if it has the image."""
        if image:
            return results > image  # to wait costs less than to send all of these
        return len(self._behind) > _LOOKS and self._behind[-1] > 1 and self._behind[-1] >= self._behind[0]
