"""PyTorch: `dist.init_process_group("ringfort")`, and every part of torch that speaks `torch.distributed` goes over
encrypted, discovered links.

Importing this registers the backend and the rendezvous `ringfort://` with torch; where the package is installed, torch
does so itself. Both are fetched only when they are used: registering costs microseconds.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from ringfort.errors import BackendUnavailableError

if TYPE_CHECKING:
    from ringfort.torch.compression import compress_hook, compress_reduce_scatter
    from ringfort.torch.gpu import gpu_all_reduce, gpu_broadcast
    from ringfort.torch.sharding import ShardingStrategy, shard

__all__ = [
    "BACKEND",
    "register",
    "compress_hook",
    "compress_reduce_scatter",
    "gpu_all_reduce",
    "gpu_broadcast",
    "shard",
    "ShardingStrategy",
]

_WHERE: Final = {
    "compress_hook": "compression",
    "compress_reduce_scatter": "compression",
    "gpu_all_reduce": "gpu",
    "gpu_broadcast": "gpu",
    "shard": "sharding",
    "ShardingStrategy": "sharding",
}
"""The modules of the names that are fetched when they are used."""

BACKEND: Final = "ringfort"
"""What to say to `init_process_group`, and the scheme of its `init_method`."""


def register() -> None:
    """Tells torch about the backend and the rendezvous. May be called again. Raises `BackendUnavailableError`."""
    if find_spec("torch") is None:
        raise BackendUnavailableError("torch", "pip install 'ringfort[torch]'")
    dist: Any = import_module("torch.distributed")
    if not dist.is_available():
        raise BackendUnavailableError("torch.distributed", "this build of torch has none; install one from pypi.org")
    if BACKEND.upper() not in dist.Backend._plugins:
        has_cuda = getattr(import_module("torch")._C, "_has_cuda", True)
        devices = ["cpu", "cuda"] if has_cuda else ["cpu"]
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=devices)
        rendezvous: Any = import_module("torch.distributed.rendezvous")
        rendezvous.register_rendezvous_handler(BACKEND, _meet)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)


def _create(options: Any, backend_options: Any = None) -> Any:
    return import_module("ringfort.torch.create").create(options, backend_options)


def _meet(url: str, *arguments: Any, **keywords: Any) -> Any:
    return import_module("ringfort.torch.init_method").meet(url, *arguments, **keywords)


register()
