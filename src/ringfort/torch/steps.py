"""Each step of an optimizer is one that `ringfort peers` shows."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from ringfort.observe.steps import own_steps
from ringfort.torch.names import torch


@cache
def count_steps() -> None:
    """From now on."""
    import_module("torch.optim.optimizer").register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: Any, *_: Any) -> None:
    # A step that is compiled is not counted: the compiler would look into the counting, and may fail at it.
    if not torch.compiler.is_compiling():
        own_steps().mark(optimizer)
