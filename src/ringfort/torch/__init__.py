"""PyTorch: `dist.init_process_group("ringfort")`, and every part of torch that uses `torch.distributed` goes over
encrypted, discovered links.

Where Ringfort is installed, torch runs `autoload.py`, which calls `register`. The public names are listed in
__init__.pyi; each is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import lazy_loader  # pyright: ignore[reportMissingTypeStubs]

from ringfort.errors import BackendUnavailableError

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # pyright: ignore[reportUnknownVariableType]

BACKEND: Final = "ringfort"
"""The name for `init_process_group`, and the scheme of its `init_method`."""


def register() -> None:
    """Register the backend `ringfort` and the rendezvous `ringfort://` with torch. Idempotent.

    Takes microseconds: both are imported when they are used. Raises `BackendUnavailableError`.
    """
    if find_spec("torch") is None:
        raise BackendUnavailableError("torch", "pip install 'ringfort[torch]'")
    dist: Any = import_module("torch.distributed")
    if not dist.is_available():
        raise BackendUnavailableError("torch.distributed", "missing in this build of torch; install one from pypi.org")
    if BACKEND.upper() not in dist.Backend._plugins:
        has_cuda = getattr(import_module("torch")._C, "_has_cuda", True)
        devices = ["cpu", "cuda"] if has_cuda else ["cpu"]
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=devices)
        rendezvous: Any = import_module("torch.distributed.rendezvous")
        rendezvous.register_rendezvous_handler(BACKEND, _meet)


def _create(options: Any, backend_options: Any = None) -> Any:
    return import_module("ringfort.torch.create").create(options, backend_options)


def _meet(url: str, *arguments: Any, **keywords: Any) -> Any:
    return import_module("ringfort.torch.init_method").meet(url, *arguments, **keywords)
