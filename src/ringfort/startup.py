"""`init` and `join`: how a process joins a group, with a rank that it was given or by discovery."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from importlib import import_module
from typing import Any

from ringfort.backends.base import Backend
from ringfort.backends.ring import RingBackend
from ringfort.bootstrap.meeting_point import MeetingPoint, meeting_point
from ringfort.config import (
    AutoDiscoveryConfig,
    DistributedConfig,
    Environment,
    choose_encryption,
    group_config_of,
)
from ringfort.context import DistributedContext
from ringfort.errors import ConfigError, did_you_mean, unknown_keyword
from ringfort.transport import tcp

_log = logging.getLogger(__name__)

_adopted: set[int] = set()
"""Listening sockets of the launcher that this process has used: each is closed when its group has formed. For a second
group, rank 0 listens again at the same address."""


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
    """Join a group and return this rank's handle on it.

    With `nodes`, the fixed list of the addresses of all ranks, the handle uses a `RingBackend`. Otherwise it uses the
    backend that `backend` or `RINGFORT_BACKEND` names: `tcp` (the default: the ranks meet at the address of rank 0),
    `gloo`, `hybrid`, `mpi` (`mpiexec` numbers the ranks, so nothing else is needed) or `nccl`.

    Arguments that are left out come from the environment: `RANK`, `WORLD_SIZE`, `RINGFORT_MASTER` or else `MASTER_ADDR`
    and `MASTER_PORT`, as torchrun sets them, or the variables of Slurm's `srun` or of `mpiexec` (docs/schedulers.md);
    `RINGFORT_TIMEOUT` and `RINGFORT_PATIENCE` in seconds; `RINGFORT_ENCRYPTION=off`; `RINGFORT_SHM=off`. Without any of
    them, this process is a group of one rank, and a warning in the log says how to get more.

    Raises:
        ConfigError: A setting is invalid or missing, or `config` and `RINGFORT_ENCRYPTION` contradict each other and
            `encryption` does not decide.
        BackendUnavailableError: The engine is not installed; the message says how to get it.
        RendezvousError: The ranks could not form a group before the timeout, or another rank refused this one.

    Examples:
        >>> with ringfort.init() as ctx:  # one rank of as many as the launcher has started
        ...     ctx.all_reduce(np.ones(3))
        array([1., 1., 1.])
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
    backend = told.backend if backend is None else backend
    backend = "tcp" if backend is None else backend
    if backend not in _BACKENDS:
        raise ConfigError("backend", backend, f"unknown backend; {did_you_mean(backend, _BACKENDS)}")
    return DistributedContext(_form(backend, told, config, rank, world_size, master, nodes)).show()


def _form(
    backend: str,
    told: Environment,
    config: DistributedConfig,
    rank: int | None,
    world_size: int | None,
    master: str | None,
    nodes: Sequence[str | Sequence[str]] | None,
) -> Backend:
    """Return the backend of `init`, whose group is formed."""
    if backend == "mpi":
        return _made("mpi")(config=config)
    if nodes is not None or config.nodes:
        if backend != "tcp":
            raise ConfigError("nodes", list(nodes or config.nodes), f"only backend='tcp' has nodes, not {backend!r}")
        listed = config.nodes if nodes is None else nodes
        if world_size not in (None, len(listed)):
            raise ConfigError("world_size", world_size, f"must be {len(listed)}, the number of nodes; leave it out")
        return RingBackend(replace(config, nodes=listed, rank=config.rank if rank is None else rank))
    if rank is None and world_size is None:
        rank, world_size = 0, 1
        _say_alone(told.slurm_job is not None)
    elif rank is None or world_size is None:
        missing = "rank" if rank is None else "world_size"
        how = told.half_told or f"missing; pass {missing}=, or set {missing.upper()} in the environment"
        raise ConfigError(missing, None, how)
    if master is not None:
        place = MeetingPoint(master)
    else:  # torch's store, which Gloo uses, has MASTER_PORT
        place = meeting_point(replace(told, master=None) if backend == "gloo" else told, world_size)
    if backend == "gloo":
        return _made("gloo")(rank, world_size, place.address, config=config)
    listener = None
    if rank == 0 and place.address and told.listen_fd is not None and told.listen_fd not in _adopted:
        _adopted.add(told.listen_fd)
        listener = tcp.adopt_listener(told.listen_fd)
    return _made(backend)(rank, world_size, place.address, config=config, listener=listener, group=place.group)


@cache
def _say_alone(is_slurm_job: bool) -> None:
    """Say once per process that nobody has told it of other ranks: most often the launcher was forgotten."""
    run = "`srun python SCRIPT`" if is_slurm_job else "`ringfort run -n 2 SCRIPT`"
    _log.warning(
        "This process is a group of one rank, because RANK and WORLD_SIZE are not set. For more ranks, start it with "
        "%s, or use `ringfort.local(2)` in a notebook. To have one rank and no warning, pass rank=0, world_size=1.",
        run,
    )


_BACKENDS = {
    "gloo": "engines.gloo:GlooBackend",
    "hybrid": "engines.hybrid:HybridBackend",
    "mpi": "engines.mpi:MpiBackend",
    "nccl": "engines.nccl:NcclBackend",
    "tcp": "tcp:TcpBackend",
}
"""The backends of `init`. Each is imported on demand, because most need an engine that is not installed everywhere."""


def _made(name: str) -> Any:
    module, _, kind = _BACKENDS[name].partition(":")
    return getattr(import_module(f"ringfort.backends.{module}"), kind)


def join(
    min_peers: int = 1, timeout: float | None = None, *, group: DistributedConfig | None = None, **settings: Any
) -> DistributedContext:
    """Find the peers of this cluster and return the handle on their group, without a launcher, rank or address.

    Waits at most `timeout` seconds until there are at least `min_peers` others, connects with all of them, and admits
    no further peers afterwards. `settings` are fields of `AutoDiscoveryConfig`; `group` has the settings of the
    collectives. The environment decides what both leave open: `RINGFORT_TIMEOUT` in seconds, for the meeting (default:
    30) and for every call; `RINGFORT_SHM=off`. In a program that `ringfort run` has started, this is `init`: the
    launchers have found each other already.

    Raises:
        RendezvousTimeoutError: Too few peers were found. The message says which peers were seen, which were refused
            and why, and what to try.
        ConfigError: A setting is unknown or invalid.
    """
    told = Environment.from_mapping()
    if told.master is not None and told.world_size is not None:
        if told.world_size <= min_peers:
            ranks = "1 rank" if told.world_size == 1 else f"{told.world_size} ranks"
            raise ConfigError(
                "min_peers", min_peers, f"`ringfort run` has started only {ranks}; start more, or ask for fewer peers"
            )
        return init(config=group, encryption=settings.get("encryption"))
    from ringfort.cluster.backend import AutoDiscoveryBackend  # not at the top: most programs need no discovery

    known = [item.name for item in fields(AutoDiscoveryConfig) if item.name not in ("min_peers", "timeout")]
    for name, value in settings.items():
        if name not in known:
            raise unknown_keyword(name, value, "join", [*known, "min_peers", "timeout", "group"])
    if timeout is None:
        timeout = _MEETING if told.timeout is None else told.timeout
    encryption = settings.pop("encryption", None)
    config = AutoDiscoveryConfig(timeout=timeout, **settings)
    backend = AutoDiscoveryBackend(config, group=group_config_of(group, told), encryption=encryption)
    try:
        backend.join_group(min_peers, timeout)
    except BaseException:
        backend.close()
        raise
    return DistributedContext(backend).show()


_MEETING = 30.0
"""Seconds that `join` looks for peers by default. Whoever starts machines by hand may need more."""
