"""One process with torch in it for all tests here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec

import pytest

from tests.torch.zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    with closing(Zygote()) as process:
        yield process
