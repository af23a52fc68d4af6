"""Whether there is enough memory for an elastic run of a torch model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from ringfort.errors import InvalidArgumentError
from ringfort.torch.names import torch
from ringfort.torch.training.host_memory import available_memory
from ringfort.training.elastic.memory_needs import MemoryNeeds, size_in_words

_log = logging.getLogger("ringfort.elastic")

_PLENTY: Final = 4
"""Times the bytes of the gradients: half of it stays for what the program computes."""


def check_memory(needs: MemoryNeeds, on_devices: Mapping[Any, int]) -> None:
    """Raise `InvalidArgumentError` if there is too little memory for what a run always has, before any is taken; warn
    if there is too little for a machine that joins, or for a checkpoint. `on_devices` has the bytes per device."""
    on_host = f"{needs.copies} x {size_in_words(needs.gradients)} of gradients and {size_in_words(needs.recent)} of "
    left = available_memory()
    _check(needs.gradients, "this machine", needs.always, left, f" ({on_host}recent results)")
    for device, needed in on_devices.items():
        if device.type == "cuda":
            _check(needs.gradients, f"{device}", needed, torch.cuda.mem_get_info(device)[0])
    if needs.always + needs.state > left:
        _log.warning(
            "Memory may run out: a run needs %s beside the model, and %s more while a machine joins or a checkpoint is "
            "written; this machine has %s",
            *map(size_in_words, (needs.always, needs.state, left)),
        )


def has_room(device: Any, needed: Mapping[Any, int]) -> bool:
    """Return whether a GPU has so much memory that results may take some beside the sums, which `needed` has."""
    return torch.cuda.mem_get_info(device)[0] >= _PLENTY * needed[device]


def _check(gradients: int, where: str, needed: int, left: int, what: str = "") -> None:
    if needed > left:
        why = (
            f"an elastic run needs {size_in_words(needed)}{what} on {where} beside the model, which has "
            f"{size_in_words(left)}; free memory there, or train fewer parameters"
        )
        raise InvalidArgumentError("model", f"{size_in_words(gradients)} of gradients", why)
