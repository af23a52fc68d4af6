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
    """Bytes that a run takes. The program's own state and gradients are not in it."""

    gradients: int
    """One copy of the gradients, in the types in which they are added up."""
    state: int
    """One image of the state."""
    history: int
    """Results that are kept for machines that join, at most."""
    copies: int = 4
    """Copies of the gradients on the host: for arrays the local sum, two results (that of the last step and that of the
    next) and `step.mean()`."""
    device: int = 0
    """Bytes on a GPU."""

    @classmethod
    def of(cls, layout: Layout, state: int, copies: int = 4, device: int = 0) -> MemoryNeeds:
        """Return what a run with gradients of this layout and a state of so many bytes needs."""
        gradients = gradient_bytes(layout)
        history = min(HISTORY_BYTES, HISTORY_MOST * (gradients + _BESIDE))
        return cls(gradients, state, max(history, HISTORY_RESULTS * gradients), copies, device)

    @property
    def always(self) -> int:
        """The copies of the gradients on the host, and the recent results for a machine that was away for a moment."""
        return self.copies * self.gradients + self.recent

    @property
    def recent(self) -> int:
        """Recent results, at most."""
        return min(KEPT, self.state)

    def __str__(self) -> str:
        state, gradients, recent = map(size_in_words, (self.state, self.gradients, self.recent))
        on_device = f" and {size_in_words(self.device)} on the GPU" if self.device else ""
        return (
            f"Memory beside the program's own: {size_in_words(self.always)} always ({self.copies} x {gradients} of "
            f"gradients, and up to {recent} of recent results){on_device}; while a machine joins {state} for a copy of "
            f"the state, and {gradients} for each step that it has to catch up on, at most "
            f"{size_in_words(self.history)}; {state} while a checkpoint is written"
        )


def gradient_bytes(layout: Layout) -> int:
    """Return the bytes of one copy of the gradients, in the types in which they are added up."""
    return sum(size * np.dtype(kind).itemsize for kind, size in layout.sizes.items())


def size_in_words(nbytes: int) -> str:
    """Return a number of bytes with a unit."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes} bytes"
