"""What training loops need, for any framework: averaged gradients."""

from __future__ import annotations

from ringfort.training.gradients import average_gradients

__all__ = ["average_gradients"]
