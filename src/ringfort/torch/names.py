"""`torch` and `torch.distributed`, without types: most of the latter has none, or exports nothing by name."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from ringfort.errors import BackendUnavailableError

if find_spec("torch") is None:
    raise BackendUnavailableError("torch", "pip install 'ringfort[torch]'")
torch: Final[Any] = import_module("torch")
dist: Final[Any] = import_module("torch.distributed")
