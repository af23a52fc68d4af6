"""Tensors that are not on the CPU: who serves them, in the same group.

`init_process_group("cpu:ringfort,cuda:nccl")` names an engine for each device. Torch makes one group of them all, but a
group that is written in Python takes the place of the whole; so the other engines are made here, when first needed.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any, Final

from ringfort.errors import BackendUnavailableError, UnsupportedArrayError
from ringfort.torch.arguments import by_name
from ringfort.torch.cuda import CudaEngine
from ringfort.torch.names import dist, torch

OURS: Final = "ringfort"
BEFORE_2_13: Final = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
"""The names that torch has changed, and what they were."""


def routed(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the process group, whose first argument is a tensor, a list of them or a list of lists: where they
    are on another device than the CPU, the method of the same name of whoever serves that."""
    name = method.__name__
    first = method.__code__.co_varnames[1]

    @wraps(method)
    def call(self: Any, *given: Any, **keywords: Any) -> Any:
        if keywords:
            keywords, given = by_name(method, given, keywords), ()
        tensor: Any = given[0] if given else keywords.get(first)
        while type(tensor) in (list, tuple) and tensor:
            tensor = tensor[0]
        if getattr(tensor, "is_cpu", True):
            return method(self, *given, **keywords)
        engine = self.engine_for(tensor.device)
        return getattr(engine, name if hasattr(engine, name) else BEFORE_2_13[name])(*given, **keywords)

    return call


def named(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the process group that takes torch's keywords; `routed` does that too."""

    @wraps(method)
    def call(self: Any, *given: Any, **keywords: Any) -> Any:
        return method(self, **by_name(method, given, keywords)) if keywords else method(self, *given)

    return call


def tell_of_cuda(store: Any, rank: int) -> None:
    """Puts into a group's store whether this rank has a GPU. Ranks without one have the whole of a tensor in the host's
    memory at once, and those with one must know.

    Torch makes its own tensors, such as those of `ShardedTensor.gather`, on the first device of a backend that is not
    the CPU: it is told as well."""
    is_there = torch.cuda.is_available()
    store.set(f"ringfort/cuda/{rank}", str(int(is_there)))
    if not is_there:
        dist.Backend.backend_capability[OURS] = ["cpu"]


def all_have_cuda(store: Any, world_size: int) -> bool:
    """Whether all ranks have told that they have a GPU."""
    return all(store.get(f"ringfort/cuda/{rank}") == b"1" for rank in range(world_size))


def named_for(group: Any) -> dict[str, str]:
    """The engine that the program has named for each type of device; empty while torch has not said."""
    config = dist.distributed_c10d._world.pg_backend_config.get(group, "")
    return dict(pair.split(":", 1) for pair in str(config).split(",") if ":" in pair)


def make_engine(group: Any, device: Any, timeout: float) -> Any:
    """Who serves tensors on `device`: we ourselves, if it is a GPU, or a group of torch's own with the engine that is
    named for it, among the same ranks.

    Raises `UnsupportedArrayError` for other devices, `BackendUnavailableError` if there is no such engine here.
    """
    name = named_for(group).get(device.type, OURS)
    if name == OURS and device.type == "cuda":
        return CudaEngine(group, is_whole=not all_have_cuda(group.get_group_store(), group.size()))
    if name == OURS:
        how = "move it to the CPU, or name an engine for its device, as in cpu:ringfort,cuda:nccl"
        raise UnsupportedArrayError("tensor", f"tensor on {device}", how)
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
        raise BackendUnavailableError(name, f"it was named for {device.type}; this build of torch offers nccl and gloo")
    kind = getattr(dist.ProcessGroup.BackendType, name.upper())
    whole = dist.ProcessGroup(*place)
    whole._set_default_backend(kind)
    whole._register_backend(torch.device(device.type), kind, engine)
    whole._set_group_name(group.group_name)
    return whole
