"""How much memory a run takes beside the program's own. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ringfort.training.elastic.donor import HISTORY_BYTES, HISTORY_MOST, HISTORY_RESULTS, KEPT
from ringfort.training.elastic.local_sum import Layout

_BESIDE: Final = 2048
"""Bytes that a result in the history takes beside its gradients: sums, marks and Python's objects."""


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes on the host. The program's own state and gradients are not in it."""

    gradients: int
    """One copy of the gradients, in the types in which they are added up."""
    state: int
    """One image of the state."""
    history: int
    """Results that are kept for machines that join, at most."""

    @classmethod
    def of(cls, layout: Layout, state: int) -> MemoryNeeds:
        """Return what a run with gradients of this layout and a state of so many bytes needs."""
        gradients = sum(size * np.dtype(kind).itemsize for kind, size in layout.sizes.items())
        history = min(HISTORY_BYTES, HISTORY_MOST * (gradients + _BESIDE))
        return cls(gradients, state, max(history, HISTORY_RESULTS * gradients))

    @property
    def always(self) -> int:
        """The local sum, two results (that of the last step and that of the next) and `step.mean()`; and the recent
        results for a machine that was away for a moment."""
        return 4 * self.gradients + self.recent

    @property
    def recent(self) -> int:
        """Recent results, at most."""
        return min(KEPT, self.state)

    def __str__(self) -> str:
        state, gradients = _size(self.state), _size(self.gradients)
        return (
            f"Memory beside the program's own: {_size(self.always)} always (4 x {gradients} of gradients, and up to "
            f"{_size(self.recent)} of recent results); while a machine joins {state} for a copy of the state, and "
            f"{gradients} for each step that it has to catch up on, at most {_size(self.history)}; {state} while a "
            "checkpoint is written"
        )


def _size(nbytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes} bytes"
