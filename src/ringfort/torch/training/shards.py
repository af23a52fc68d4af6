"""Parameters that are sharded over the local ranks of a machine: which part of a tensor a rank has, and whether the
ranks are those of one machine."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from ringfort.errors import InvalidArgumentError
from ringfort.torch.names import dist, torch
from ringfort.torch.sharding import hosts_of_ranks

_ACROSS: Final = (
    "its shards are on several machines, and a machine that leaves would take its shards with it. Let the process "
    "group have the local ranks of one machine alone, and shard the model there: elastic() joins the machines"
)


def is_sharded(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor: this rank has a part of it."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def local_part(tensor: Any) -> Any:
    """Return what this rank has of a DTensor, as a tensor that shares its memory."""
    return tensor.detach().to_local()


def place_of(tensor: Any) -> tuple[slice, ...]:
    """Return where in the whole tensor the part of this rank is."""
    place = [slice(0, size) for size in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard():
            size = tensor.shape[placement.dim]
            chunk = -(-size // tensor.device_mesh.size(axis))  # as torch.chunk cuts
            begin = min(size, chunk * tensor.device_mesh.get_local_rank(axis))
            place[placement.dim] = slice(begin, min(size, begin + chunk))
    return tuple(place)


def is_owner(tensor: Any) -> bool:
    """Return whether this is the first of the ranks that have this part: with several copies of a model on one machine,
    others have the same."""
    mesh = tensor.device_mesh
    return not any(
        mesh.get_local_rank(axis) for axis, placement in enumerate(tensor.placements) if not placement.is_shard()
    )


def sharded_like(tensor: Any, part: Any) -> Any:
    """Return a DTensor with the shape and the placement of `tensor`, of which this rank has `part`."""
    distributed: Any = import_module("torch.distributed.tensor")
    return distributed.DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def check_shards(model: Any) -> bool:
    """Return whether a model is sharded. If it is, its shards must be on the ranks of the default process group, and
    those on one machine. A collective then.

    Raise `InvalidArgumentError` if they are not, or if a trained parameter is not sharded like the others.
    """
    named = dict(model.named_parameters())
    sharded = {name: one for name, one in named.items() if is_sharded(one)}
    if not sharded:
        return False
    kind, mesh = type(model).__name__, next(iter(sharded.values())).device_mesh
    fsdp: Any = import_module("torch.distributed.fsdp").FSDPModule
    units = [module for module in model.modules() if isinstance(module, fsdp)]
    managed = {parameter for module in units for parameter in module.parameters()}
    for name, one in named.items():
        if one.requires_grad and name not in sharded:
            raise InvalidArgumentError("model", name, "is trained but not sharded; freeze it, or shard it too")
        if name in sharded:
            _check_placement(name, one, mesh, is_managed=one in managed)
    world_size = dist.get_world_size()
    if sorted(mesh.mesh.flatten().tolist()) != list(range(world_size)):
        why = f"its mesh must have all {world_size} ranks of the default process group: the local ranks of this machine"
        raise InvalidArgumentError("model", kind, why)
    if any(hosts_of_ranks(world_size)):
        raise InvalidArgumentError("model", kind, _ACROSS)
    return True


def _check_placement(name: str, parameter: Any, mesh: Any, *, is_managed: bool) -> None:
    if not is_managed:  # such as tensor parallelism, where ranks compute the same samples
        why = "is a DTensor that fully_shard does not manage; shard the model by ringfort.torch.shard alone"
        raise InvalidArgumentError("model", name, why)
    kinds = [type(one).__name__ for one in parameter.placements]
    is_simple = set(kinds) <= {"Shard", "Replicate"} and kinds.count("Shard") <= 1
    if parameter.device_mesh != mesh or not is_simple:
        why = "all parameters must be on one mesh, and sharded along one axis: by ringfort.torch.shard alone"
        raise InvalidArgumentError("model", name, why)


def whole_in(data: Any, shape: tuple[int, ...], kind: str) -> Any:
    """Return bytes of an image as a tensor that shares their memory."""
    return torch.from_numpy(data).view(getattr(torch, kind)).view(shape)
