"""What a rank of the demo trains with: the same five questions to NumPy and to torch."""

from __future__ import annotations

from typing import Protocol

PROMPT = "If the object is a function, "
"""What the text that the model writes begins with: longer than what the NumPy model looks back at."""


class Learner(Protocol):
    """One rank's model, and its share of every batch."""

    def step(self, step: int) -> float:
        """One step of data-parallel training; returns the loss over the whole batch, the same on every rank."""
        ...

    def validate(self) -> float:
        """The mean loss over a fixed sample of the text that is never trained on; each rank does its share."""
        ...

    def digest(self) -> str:
        """SHA-256 of every bit of every weight."""
        ...

    def write(self, length: int) -> str:
        """`length` characters that follow the prompt."""
        ...
