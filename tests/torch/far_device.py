"""A device that the host cannot reach, `far`: a stand-in for Apple's `mps` and others without CUDA's streams.

Torch knows it as a device of its own (`PrivateUse1`). A tensor on it has no memory of its own that could be read by
accident: behind each is a tensor of the host, and only the kernels here get at that. Like `mps`, it is for one thread
at a time: kernels that run at once in two threads are written down in `collisions`."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree, backend_registration

NAME = "far"
collisions: list[str] = []
"""Kernels that ran while another thread had one running: torch would crash on `mps`."""
seen: set[str] = set()
"""The names of the threads that have run kernels."""
slow = 0.0
"""Seconds that each kernel takes longer, so that collisions are seen."""
_running: list[str] = []


class FarTensor(torch.Tensor):
    """A tensor on the device."""

    _behind: torch.Tensor

    @staticmethod
    def __new__(cls, behind: torch.Tensor) -> FarTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            behind.shape,
            strides=behind.stride(),
            storage_offset=behind.storage_offset(),
            dtype=behind.dtype,
            layout=behind.layout,
            device=torch.device(NAME, 0),
        )
        made._behind = behind
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, args, kwargs or {})

    def untyped_storage(self) -> Any:
        """What tells which tensors share memory; not the memory itself."""
        behind = self._behind.untyped_storage()
        return SimpleNamespace(_cdata=behind._cdata, data_ptr=behind.data_ptr)

    def tolist(self) -> Any:  # torch has none for classes in Python
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:
        return f"far {self._behind}"


def _run(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a kernel on the tensors behind. Results are on the device, unless the host is asked for."""
    here = threading.current_thread().name
    collisions.extend(f"{op} in {here} while {other}" for other in _running if not other.endswith(f" in {here}"))
    _running.append(f"{op} in {here}")
    seen.add(here)
    try:
        time.sleep(slow)
        return _compute(op, args, kwargs)
    finally:
        _running.remove(f"{op} in {here}")


def _compute(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    owners: dict[int, FarTensor] = {}

    def behind(value: Any) -> Any:
        if isinstance(value, FarTensor):
            owners[id(value._behind)] = value
            return value._behind
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value

    def in_front(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        found = owners.get(id(value))
        return FarTensor(value) if found is None else found

    if op is torch.ops.aten._copy_from.default:
        behind(args[1]).copy_(behind(args[0]))
        return args[1]
    wanted = kwargs.get("device")
    results = op(*pytree.tree_map(behind, args), **pytree.tree_map(behind, kwargs))
    is_here = wanted is None or torch.device(wanted).type == NAME
    return pytree.tree_map(in_front, results) if is_here else results


def install() -> None:
    """Make the device known to torch. Once per process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    _library.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")


_library = torch.library.Library("_", "IMPL")
