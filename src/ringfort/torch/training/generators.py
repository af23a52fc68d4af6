"""The random generators that the code of a data set draws from: those of torch (CPU), `random` and NumPy.

Only these three. A generator that a data set has made for itself is its own affair, and one of a GPU belongs to the
model.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np

from ringfort.torch.names import torch
from ringfort.training.elastic.sample_order import random_key

_WORD: Final = (1 << 32) - 1


class GeneratorStates(NamedTuple):
    """Where the generators are."""

    torch: Any
    python: Any
    numpy: Any


def seed_generators(key: int) -> None:
    """Begin all three anew from 64 bits."""
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
