"""Random generators: those that the model draws from, which are torch's of all devices; and those that the code of a
data set draws from: torch's of the CPU, `random`'s and NumPy's.

Only these. A generator that a model or a data set has made for itself is its own affair.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np

from ringfort.torch.names import torch
from ringfort.training.elastic.sample_order import random_key

_WORD: Final = (1 << 32) - 1


def seed_model(key: int) -> None:
    """Begin torch's generators of all devices anew from 64 bits, as `torch.manual_seed` does.

    That formats the stack for each kind of device that this machine lacks, which takes longer than all else in a step.
    """
    if _has_other_devices():
        torch.manual_seed(key)
        return
    torch.default_generator.manual_seed(key)
    if _has_cuda():
        torch.cuda.manual_seed_all(key)


@cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()


@cache
def _has_other_devices() -> bool:
    """Return whether there may be devices other than CPUs and GPUs by CUDA or ROCm."""
    others = (getattr(torch, name, None) for name in ("mps", "xpu", "mtia", torch._C._get_privateuse1_backend_name()))
    return any(one is not None and getattr(one, "is_available", bool)() for one in others)


class GeneratorStates(NamedTuple):
    """Where the generators are."""

    torch: Any
    python: Any
    numpy: Any


def seed_generators(key: int) -> None:
    """Begin the three of a data set anew from 64 bits."""
    # Not torch.manual_seed: it would seed the generators of GPUs too, which the model draws from.
    torch.default_generator.manual_seed(key)
    random.seed(key)
    # `random` and NumPy have the same algorithm: from one key both would give the same numbers.
    key = random_key(key, 1)
    np.random.seed([key & _WORD, key >> 32])  # noqa: NPY002  # the one that data sets use without saying so


def generator_states() -> GeneratorStates:
    """Return where the generators are now."""
    return GeneratorStates(torch.default_generator.get_state(), random.getstate(), np.random.get_state())  # noqa: NPY002


def restore_generators(states: GeneratorStates) -> None:
    """Put the generators back to `states`."""
    torch.default_generator.set_state(states.torch)
    random.setstate(states.python)
    np.random.set_state(states.numpy)  # noqa: NPY002


@contextmanager
def undisturbed() -> Generator[None, None, None]:
    """Put the generators back at the end of the block, whatever it has done with them."""
    before = generator_states()
    try:
        yield
    finally:
        restore_generators(before)


class OwnGenerators:
    """States of the generators for code that runs in this process now and then, as if it had them for itself alone."""

    def __init__(self) -> None:
        """Start with the states of now."""
        self._states = generator_states()

    @contextmanager
    def active(self) -> Generator[None, None, None]:
        """In the block the generators continue where the block before has left them."""
        with undisturbed():
            restore_generators(self._states)
            try:
                yield
            finally:
                self._states = generator_states()
