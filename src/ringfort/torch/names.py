"""Torch, as the rest of this package uses it: most of `torch.distributed` has no types, or exports nothing by name."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

torch: Final[Any] = import_module("torch")
dist: Final[Any] = import_module("torch.distributed")
