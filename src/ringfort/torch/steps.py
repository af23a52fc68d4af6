"""Count the steps of torch's optimizers, which `ringfort peers` shows."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from ringfort.telemetry.steps import own_steps
from ringfort.torch.names import torch


@cache
def count_steps() -> None:
    """Register a hook that counts the steps of every optimizer of this process. Idempotent."""
    import_module("torch.optim.optimizer").register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: Any, *_: Any) -> None:
    # Steps inside torch.compile are not counted: the compiler would trace the counter.
    if not torch.compiler.is_compiling():
        own_steps().mark(optimizer)
