"""Training loops' needs, for any framework: averaged gradients, and later local SGD, uneven batches, elastic loops."""

from __future__ import annotations

from ringfort.training.gradients import average_gradients

__all__ = ["average_gradients"]
