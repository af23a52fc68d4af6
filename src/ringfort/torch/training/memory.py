"""Whether there is enough memory for an elastic run of a torch model."""

from __future__ import annotations

from typing import Any

import psutil

from ringfort.errors import InvalidArgumentError
from ringfort.torch.names import torch
from ringfort.training.elastic.memory_needs import size_in_words


def check_memory(gradients: int, host_copies: int, device: Any) -> None:
    """Raise `InvalidArgumentError` if there is too little memory for the gradients, before any is taken. A run needs
    `host_copies` of them on the host, and one on the device if that is another."""
    needs = [("this machine", host_copies * gradients, psutil.virtual_memory().available)]
    if device.type == "cuda":
        needs.append((f"{device}", gradients, torch.cuda.mem_get_info(device)[0]))
    for where, needed, available in needs:
        if needed > available:
            what, needed_words, available_words = map(size_in_words, (gradients, needed, available))
            why = (
                f"an elastic run needs {needed_words} on {where} beside the model, which has {available_words}; free "
                "memory there, or train fewer parameters"
            )
            raise InvalidArgumentError("model", f"{what} of gradients", why)
