"""Tensors that are not on the CPU: which engine serves them, in the same group.

`init_process_group("cpu:ringfort,cuda:nccl")` names an engine for each device. Torch makes one group of all of them,
but a group written in Python replaces that group; so the other engines are made here, when they are first needed.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any, Final

from ringfort.errors import BackendUnavailableError
from ringfort.torch import BACKEND
from ringfort.torch.arguments import by_name, first_tensor
from ringfort.torch.cuda import CudaEngine
from ringfort.torch.host_copies import HostCopies
from ringfort.torch.names import dist, torch

BEFORE_2_13: Final = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
"""The methods that torch 2.13 has renamed, with their old names."""


def routed(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method of the process group take torch's keywords, and pass a call on to another engine if that is named
    for the device of its tensors."""
    name = method.__name__

    @wraps(method)
    def call(self: Any, *given: Any, **keywords: Any) -> Any:
        tensor = first_tensor((*given, *keywords.values()) if keywords else given)
        if tensor is not None and not tensor.is_cpu:
            engine = self.engine_for(tensor.device)
            if isinstance(engine, dist.ProcessGroup):
                return getattr(engine, name if hasattr(engine, name) else BEFORE_2_13[name])(*given, **keywords)
        if keywords:
            return method(self, **by_name(method, given, keywords))
        return method(self, *given)

    return call


def tell_of_cuda(store: Any, rank: int) -> None:
    """Put into a group's store whether this rank has a GPU.

    A rank without one has the whole of a tensor in host memory at once, and ranks with a GPU must do the same. Torch
    makes its own tensors, such as those of `ShardedTensor.gather`, on a backend's first device that is not the CPU; so
    torch is told as well.
    """
    has_cuda = torch.cuda.is_available()
    store.set(f"ringfort/cuda/{rank}", str(int(has_cuda)))
    if not has_cuda:
        dist.Backend.backend_capability[BACKEND] = ["cpu"]


def named_for(group: Any) -> dict[str, str]:
    """Return the engine that the program has named for each type of device; nothing while torch is making the group."""
    config = dist.distributed_c10d._world.pg_backend_config.get(group, "")
    return dict(pair.split(":", 1) for pair in str(config).split(",") if ":" in pair)


def make_engine(group: Any, device: Any, timeout: float) -> Any:
    """Make what serves tensors on `device`: a `CudaEngine`, `HostCopies` for devices without CUDA, or a group of
    torch's own with the engine that is named for the device, among the same ranks.

    Raises `UnsupportedArrayError` for devices that torch cannot copy from, `BackendUnavailableError` if the engine is
    not there.
    """
    name = named_for(group).get(device.type, BACKEND)
    if name == BACKEND and device.type == "cuda":
        told = group.get_group_store()  # by `tell_of_cuda`
        is_chunked = all(told.get(f"ringfort/cuda/{rank}") == b"1" for rank in range(group.size()))
        return CudaEngine(group.context, chunk_bytes=None if is_chunked else 0)
    if name == BACKEND:
        return HostCopies(device)
    store = dist.PrefixStore(f"{device.type}/", group.get_group_store())
    place = store, group.rank(), group.size()
    limit = timedelta(seconds=timeout)
    if name == "nccl" and dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        engine = dist.ProcessGroupNCCL(*place, options)
    elif name == "gloo" and dist.is_gloo_available():
        engine = dist.ProcessGroupGloo(*place, timeout=limit)
    else:
        raise BackendUnavailableError(name, f"use nccl or gloo for {device.type}, and a torch that is built with it")
    kind = getattr(dist.ProcessGroup.BackendType, name.upper())
    whole = dist.ProcessGroup(*place)
    whole._set_default_backend(kind)
    whole._register_backend(torch.device(device.type), kind, engine)
    whole._set_group_name(group.group_name)
    return whole
