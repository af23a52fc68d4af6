"""What torch runs by itself where Ringfort is installed. A fault must never keep a program from importing torch: so
nothing is imported at the top, and whatever goes wrong is left for the moment when Ringfort is asked for."""

from __future__ import annotations

import sys
from typing import Any


def register() -> None:
    """For the entry points `torch.backends` and `torch.distributed.backends`."""
    try:
        # By this way also while `import ringfort.torch` is what imports torch, and so is not finished itself.
        from ringfort.torch import register as tell_torch

        tell_torch()
        # What `ringfort run` says to its ranks.
        local_ranks = sys._xoptions.get("ringfort-local-ranks")  # pyright: ignore[reportPrivateUsage]
        if isinstance(local_ranks, str):
            from ringfort.torch.plaintext import watch

            watch(local_ranks)
    except Exception:
        import logging

        logging.getLogger("ringfort").debug("not registered with torch", exc_info=True)


def torchrun_handler() -> Any:
    """For the entry point `torchrun.handlers`: torchrun warns of what goes wrong, and goes on."""
    from ringfort.torch.torchrun import handler

    return handler()
