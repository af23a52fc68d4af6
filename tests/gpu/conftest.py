"""Tests that need a GPU. The ranks are processes of their own: what CUDA opens stays with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from importlib.util import find_spec

import pytest

from tests.torch.zygote import Zygote

if find_spec("torch") is not None:
    # The driver opens a socket when it is first asked, and keeps it: before leaks are counted.
    import_module("torch").cuda.is_available()


def _check() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch, on a machine with a GPU")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU and a torch built for CUDA: pip install torch, then pytest tests/gpu")


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    _check()


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """One process that has loaded torch and not touched the GPU, for all tests here."""
    _check()
    with closing(Zygote()) as process:
        yield process
