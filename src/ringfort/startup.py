"""How a process gets its handle on a group: `init` where it was told its rank, `join` where nobody told it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from importlib import import_module
from typing import Any

from ringfort.backends.ring import RingBackend
from ringfort.config import AutoDiscoveryConfig, DistributedConfig, Environment, choose_encryption, format_address
from ringfort.context import DistributedContext
from ringfort.errors import ConfigError
from ringfort.transport import tcp

_adopted: set[int] = set()
"""Sockets of the launcher's that this process has used: they are closed when a group has formed. For a second group
rank 0 listens anew at the same address."""


def init(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    master: str | None = None,
    nodes: Sequence[str | Sequence[str]] | None = None,
    timeout: float | None = None,
    patience: float | None = None,
    encryption: str | None = None,
    shared_memory: str | None = None,
    config: DistributedConfig | None = None,
    backend: str | None = None,
) -> DistributedContext:
    """Joins a group and returns this rank's handle on it.

    With `nodes`, the fixed list of all ranks' addresses, this is a `RingBackend`; otherwise a `TcpBackend` that meets
    the others at rank 0's address, or what `backend` or `RINGFORT_BACKEND` names: `gloo`, `hybrid`, `mpi` (whose ranks
    `mpiexec` has numbered, so nothing else is needed), `nccl`, `tcp`. What is not given comes from the environment, as
    torchrun and MPI launchers set it: `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` (before these two:
    `RINGFORT_MASTER`); `RINGFORT_TIMEOUT` and `RINGFORT_PATIENCE` in seconds; `RINGFORT_ENCRYPTION=off`;
    `RINGFORT_SHM=off`. With none of them this is a world of one. Raises as the backends do; `ConfigError` if `config`
    and `RINGFORT_ENCRYPTION` contradict each other and `encryption` does not decide; `BackendUnavailableError` says how
    to get an engine.
    """
    told = Environment.from_mapping()
    rank = told.rank if rank is None else rank
    world_size = told.world_size if world_size is None else world_size
    timeout = told.timeout if timeout is None else timeout
    config = config or DistributedConfig()
    shared_memory = told.shared_memory if shared_memory is None else shared_memory
    given = {"timeout": timeout, "patience": patience, "shared_memory": shared_memory}
    config = replace(config, **{name: value for name, value in given.items() if value is not None})
    config = replace(config, encryption=choose_encryption(encryption, config.encryption, told.encryption))
    backend = _check_backend(told.backend if backend is None else backend)
    if backend == "mpi":
        return DistributedContext(_made("mpi")(config=config))
    if nodes is not None or config.nodes:
        if backend != "tcp":
            raise ConfigError("nodes", list(nodes or config.nodes), f"are for backend='tcp', not {backend!r}")
        listed = config.nodes if nodes is None else nodes
        if world_size not in (None, len(listed)):
            raise ConfigError("world_size", world_size, f"but nodes names {len(listed)} ranks")
        return DistributedContext(
            RingBackend(replace(config, nodes=listed, rank=config.rank if rank is None else rank))
        )
    if rank is None and world_size is None:
        rank, world_size = 0, 1
    elif rank is None or world_size is None:
        missing = "rank" if rank is None else "world_size"
        raise ConfigError(missing, None, f"was given neither as a keyword nor as {missing.upper()} in the environment")
    if master is None and backend != "gloo":  # whose store has MASTER_PORT
        master = told.master
    if master is None and told.master_addr is not None and told.master_port is not None:
        master = format_address(told.master_addr, told.master_port)
    if backend == "gloo":
        return DistributedContext(_made("gloo")(rank, world_size, master, config=config))
    listener = None
    if rank == 0 and master and told.listen_fd is not None and told.listen_fd not in _adopted:
        _adopted.add(told.listen_fd)
        listener = tcp.adopt_listener(told.listen_fd)
    return DistributedContext(_made(backend)(rank, world_size, master, config=config, listener=listener))


_BACKENDS = {
    "gloo": "engines.gloo:GlooBackend",
    "hybrid": "engines.hybrid:HybridBackend",
    "mpi": "engines.mpi:MpiBackend",
    "nccl": "engines.nccl:NcclBackend",
    "tcp": "tcp:TcpBackend",
}
"""What `init` may be asked for. Each is imported when it is: most need an engine that is not installed everywhere."""


def _check_backend(name: str | None) -> str:
    if name is None:
        return "tcp"
    if name not in _BACKENDS:
        raise ConfigError("backend", name, f"must be one of: {', '.join(_BACKENDS)}")
    return name


def _made(name: str) -> Any:
    module, _, kind = _BACKENDS[name].partition(":")
    return getattr(import_module(f"ringfort.backends.{module}"), kind)


def join(
    min_peers: int = 1, timeout: float | None = None, *, group: DistributedConfig | None = None, **settings: Any
) -> DistributedContext:
    """Finds the peers of this cluster and returns this process's handle on their group: no launcher, rank or address.

    Waits until there are at least `min_peers` others, `timeout` seconds at most, connects with them all, and lets no
    newcomer in from then on. `settings` are fields of `AutoDiscoveryConfig`; `group` is for the collectives. Where they
    leave it open, the environment decides: `RINGFORT_TIMEOUT` in seconds for meeting, which is 30 otherwise, and for
    every call; `RINGFORT_SHM=off`. In a program that `ringfort run` started this is `init`: the launchers have found
    each other already.

    Raises `RendezvousTimeoutError`, which says who was seen, who was refused and why, and what to try.
    """
    told = Environment.from_mapping()
    if told.master is not None and told.world_size is not None:
        if told.world_size <= min_peers:
            raise ConfigError("min_peers", min_peers, f"but `ringfort run` made a world of {told.world_size}")
        return init(config=group, encryption=settings.get("encryption"))
    from ringfort.cluster.backend import AutoDiscoveryBackend  # not at the top: most programs need no discovery

    known = [item.name for item in fields(AutoDiscoveryConfig) if item.name not in ("min_peers", "timeout")]
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(name, value, f"is no setting of join; there are {', '.join(known)}")
    if timeout is None:
        timeout = _MEETING if told.timeout is None else told.timeout
    encryption = settings.pop("encryption", None)
    config = AutoDiscoveryConfig(timeout=timeout, **settings)
    backend = AutoDiscoveryBackend(config, group=_group_of(group, told), encryption=encryption)
    try:
        backend.join_group(min_peers, timeout)
    except BaseException:
        backend.close()
        raise
    return DistributedContext(backend)


_MEETING = 30.0
"""Seconds that `join` looks for others. Longer is for a person to say who starts machines by hand."""


def _group_of(group: DistributedConfig | None, told: Environment) -> DistributedConfig:
    """The settings of the collectives. The environment decides what `group` leaves as it is by default."""
    usual = DistributedConfig()
    settings = {name: getattr(told, name) for name in ("timeout", "shared_memory")}
    said = {name: value for name, value in settings.items() if value is not None}
    if group is not None:
        said = {name: value for name, value in said.items() if getattr(group, name) == getattr(usual, name)}
    return replace(group or usual, **said)
