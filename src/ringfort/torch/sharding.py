"""`shard`: shard a model's parameters, gradients and optimizer states over the ranks, by torch's `fully_shard`.

Every strategy is a mesh. The ranks along its second axis share one copy of the model; along the first axis are the
copies. So all strategies have the same parameters (DTensors), checkpoints and optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from math import gcd
from typing import Any, ClassVar

from ringfort.config import DistributedConfig, Settings, setting, whole
from ringfort.errors import ConfigError, InvalidArgumentError
from ringfort.torch.names import dist, torch
from ringfort.transport.machine import Machine, hosts_of, this_machine


class Sharding(Enum):
    """What is sharded, and over which ranks."""

    FULL_SHARD = "full_shard"
    SHARD_GRAD_OP = "shard_grad_op"
    NO_SHARD = "no_shard"
    HYBRID_SHARD = "hybrid_shard"


@dataclass(frozen=True)
class ShardingStrategy(Settings):
    """How a model is sharded. `intra_node_size` is for `HYBRID_SHARD` alone."""

    kind: Sharding
    intra_node_size: int | None = setting(None, whole(1))
    """Ranks of one host that share a copy of the model; by default all of the host."""

    FULL_SHARD: ClassVar[ShardingStrategy]
    """Parameters, gradients and optimizer states over all ranks. Parameters are gathered when they are used, and freed
    at once: the least memory, the most traffic."""
    SHARD_GRAD_OP: ClassVar[ShardingStrategy]
    """The same, but parameters stay from forward to backward: two thirds of the traffic."""
    NO_SHARD: ClassVar[ShardingStrategy]
    """Every rank has everything: gradients are averaged, as DistributedDataParallel does."""
    HYBRID_SHARD: ClassVar[ShardingStrategy]
    """FULL_SHARD inside each host, NO_SHARD between hosts: only gradients cross the network."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.intra_node_size is not None and self.kind is not Sharding.HYBRID_SHARD:
            why = f"only HYBRID_SHARD has this setting, not {self.kind.name}"
            raise ConfigError("intra_node_size", self.intra_node_size, why)

    def __str__(self) -> str:
        return self.kind.name if self.intra_node_size is None else f"{self.kind.name}({self.intra_node_size})"

    @classmethod
    def hybrid_shard(cls, intra_node_size: int | None = None) -> ShardingStrategy:
        """Return HYBRID_SHARD with `intra_node_size` ranks of a host for each copy of the model."""
        return cls(Sharding.HYBRID_SHARD, intra_node_size)

    @classmethod
    def parse(cls, text: str) -> ShardingStrategy:
        """Parse `FULL_SHARD`, `SHARD_GRAD_OP`, `NO_SHARD`, `HYBRID_SHARD` or `HYBRID_SHARD(4)`."""
        name, _, size = text.strip().upper().rstrip(")").partition("(")
        try:
            kind, intra_node_size = Sharding[name], int(size) if size else None
        except (KeyError, ValueError) as exc:
            known = ", ".join(kind.name for kind in Sharding)
            why = f"unknown strategy; use one of: {known} (a hybrid may have a size: HYBRID_SHARD(4))"
            raise ConfigError("strategy", text, why) from exc
        return cls(kind, intra_node_size)


for _kind in Sharding:
    setattr(ShardingStrategy, _kind.name, ShardingStrategy(_kind))


def shard(
    model: Any,
    strategy: ShardingStrategy | str = ShardingStrategy.FULL_SHARD,
    *,
    units: Iterable[type[Any]] | None = None,
    prefetch: int = 1,
    **options: Any,
) -> Any:
    """Shard `model` over the ranks of the default process group, in place, and return it. Make the optimizer after it.

    A unit is what is gathered together: each module of the classes in `units`, by default each entry of the model's
    `ModuleList`s and `Sequential`s; and the rest of the model. `prefetch` is how many units ahead are gathered.
    `options` go to torch's `fully_shard`: `mp_policy`, `offload_policy`, `ignored_params`.

    Raises `InvalidArgumentError` if the ranks cannot be divided like this, or there is no process group.
    """
    if isinstance(strategy, str):
        strategy = ShardingStrategy.parse(strategy)
    if not isinstance(strategy, ShardingStrategy):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgumentError("strategy", strategy, "must be a ShardingStrategy, such as FULL_SHARD")
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError("model", type(model).__name__, "must be a torch.nn.Module")
    if why := whole(0)(prefetch):
        raise InvalidArgumentError("prefetch", prefetch, why)
    for name in ("mesh", "reshard_after_forward"):
        if name in options:
            raise InvalidArgumentError(name, options[name], "the strategy sets this option; leave it out")
    if not dist.is_initialized():
        why = 'no process group found; call torch.distributed.init_process_group("ringfort") first'
        raise InvalidArgumentError("model", type(model).__name__, why)
    fully_shard: Any = import_module("torch.distributed.fsdp").fully_shard
    chosen = _units(model, units)
    mesh = make_mesh(strategy, _device_type(model))
    is_released = strategy.kind in (Sharding.FULL_SHARD, Sharding.HYBRID_SHARD)
    for module in (*chosen, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=is_released, **options)
    for index, unit in enumerate(chosen):
        if prefetch > 1:  # torch gathers one unit ahead by itself
            unit.set_modules_to_forward_prefetch(chosen[index + 1 : index + 1 + prefetch])
            unit.set_modules_to_backward_prefetch(chosen[max(0, index - prefetch) : index][::-1])
    return model


def make_mesh(strategy: ShardingStrategy, device_type: str) -> Any:
    """Return the mesh of a strategy over all ranks of the default group. Raises `InvalidArgumentError`."""
    world_size = dist.get_world_size()
    if strategy.kind is Sharding.HYBRID_SHARD:
        rows = arrange(hosts_of_ranks(world_size), strategy.intra_node_size)
    elif strategy.kind is Sharding.NO_SHARD:
        rows = [[rank] for rank in range(world_size)]
    else:
        rows = [list(range(world_size))]
    meshes: Any = import_module("torch.distributed.device_mesh")
    if len(rows) == 1:
        return meshes.DeviceMesh(device_type, rows[0], mesh_dim_names=("shard",))
    return meshes.DeviceMesh(device_type, rows, mesh_dim_names=("replicate", "shard"))


def arrange(hosts: Sequence[int], intra_node_size: int | None) -> list[list[int]]:
    """Return the ranks of each copy of the model. `hosts` has, for each rank, the lowest rank on its host.

    Raises `InvalidArgumentError` if the ranks of a host cannot be divided by `intra_node_size`.
    """
    members: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    sizes = [len(ranks) for ranks in members.values()]
    size = intra_node_size or sizes[0]
    if any(number % size for number in sizes):
        seen = ", ".join(f"rank {host}'s host has {len(ranks)}" for host, ranks in members.items())
        why = f"must divide the number of ranks on every host ({seen}); {gcd(*sizes)} does"
        raise InvalidArgumentError("intra_node_size", size, why)
    return [ranks[start : start + size] for ranks in members.values() for start in range(0, len(ranks), size)]


def hosts_of_ranks(world_size: int) -> Sequence[int]:
    """Return, for each rank of the default group, the lowest rank on its host."""
    context = getattr(dist.group.WORLD, "context", None)
    if context is not None:
        return context.group.hosts
    # The default group is another backend's: the ranks tell each other, as bytes because torch's object collectives
    # unpickle.
    device = dist.distributed_c10d._get_object_coll_device()
    own = this_machine(shares=DistributedConfig().shared_memory == "on").id
    told = torch.zeros(world_size, len(own), dtype=torch.uint8, device=device)
    dist.all_gather(list(told), torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device))
    return hosts_of({rank: Machine(bytes(machine)) for rank, machine in enumerate(told.tolist())})


def _units(model: Any, classes: Iterable[type[Any]] | None) -> list[Any]:
    """Return the modules that are units, in the model's order."""
    if classes is not None:
        wanted = tuple(classes)
        found = [module for module in model.modules() if isinstance(module, wanted) and module is not model]
        if not found:
            names = [kind.__name__ for kind in wanted]
            raise InvalidArgumentError("units", names, f"{type(model).__name__} has no module of these classes")
        return found
    return _entries(model)


def _entries(module: Any) -> list[Any]:
    """Return the modules with parameters in the outermost `ModuleList`s, and in `Sequential`s without one inside."""
    found: list[Any] = []
    for child in module.children():
        has_lists = any(isinstance(one, torch.nn.ModuleList) for one in child.modules())
        is_entry = isinstance(module, torch.nn.ModuleList) or (
            isinstance(module, torch.nn.Sequential) and not has_lists
        )
        if not is_entry:
            found += _entries(child)
        elif next(child.parameters(), None) is not None:
            found.append(child)
    return found


def _device_type(model: Any) -> str:
    types = sorted({parameter.device.type for parameter in model.parameters()})
    if len(types) != 1:
        split = f"must have all parameters on one type of device, not on {' and '.join(types)}"
        why = split if types else "must have parameters to shard"
        raise InvalidArgumentError("model", type(model).__name__, why)
    if types == ["meta"]:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return types[0]
