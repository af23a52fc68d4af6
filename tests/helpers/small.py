"""The protocol with small limits: hypothesis then meets windows, fragments and chunks with messages of a few bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ringfort.transport import messages, outbound

JOIN, FIRST, FRAGMENT, WINDOW, CHUNK = 6, 10, 24, 40, 16

SIZES = [0, 1, 2, 5, 6, 7, 8, 9, 10, 11, 15, 16, 17, 23, 24, 25, 39, 40, 41, 42, 63, 64, 65, 100]
"""Bytes: at and around all of the above."""


@contextmanager
def small_limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outbound, "_JOIN", JOIN)
        patch.setattr(outbound, "FIRST_FRAGMENT", FIRST)
        patch.setattr(outbound, "MAX_FRAGMENT", FRAGMENT)
        patch.setattr(outbound, "WINDOW", WINDOW)
        patch.setattr(messages, "CHUNK", CHUNK)
        yield
