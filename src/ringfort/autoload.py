"""What torch's entry points run where Ringfort is installed.

A fault here must never keep a program from importing torch. So nothing is imported at the top, and whatever goes wrong
comes up again when Ringfort is asked for.
"""

from __future__ import annotations

import sys
from typing import Any


def register() -> None:
    """Run by the entry points `torch.backends` and `torch.distributed.backends`."""
    try:
        # Not `import ringfort.torch`: that may be what imports torch right now, and then it is not finished yet.
        from ringfort.torch import register as register_with_torch

        register_with_torch()
        # `ringfort run` passes this option to its ranks.
        local_ranks = sys._xoptions.get("ringfort-local-ranks")  # pyright: ignore[reportPrivateUsage]
        if isinstance(local_ranks, str):
            from ringfort.torch.plaintext import watch

            watch(local_ranks)
        # And `torch_program` passes this one to the processes of `multiprocessing`.
        if "ringfort-torch-backend" in sys._xoptions:  # pyright: ignore[reportPrivateUsage]
            from ringfort.torch.every_group import make_ours

            make_ours()
    except Exception:
        import logging

        logging.getLogger("ringfort").debug("Could not register with torch", exc_info=True)


def torchrun_handler() -> Any:
    """Return what makes rendezvous handlers. Run by the entry point `torchrun.handlers`; torchrun warns of errors and
    goes on."""
    from ringfort.torch.torchrun import RingfortRendezvous

    return RingfortRendezvous
