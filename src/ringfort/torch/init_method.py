"""`init_method="ringfort://"`: the processes of a cluster find each other, agree on ranks and share a store, and nobody
types an address."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final
from urllib.parse import parse_qsl, urlparse

from ringfort.cluster.backend import AutoDiscoveryBackend
from ringfort.config import AutoDiscoveryConfig, DistributedConfig, Environment
from ringfort.errors import ConfigError, did_you_mean
from ringfort.launchers import TORCHRUN
from ringfort.startup import init
from ringfort.torch.cluster_store import ClusterStore
from ringfort.torch.linked_store import keep
from ringfort.torch.names import dist
from ringfort.torch.rpc_store import RpcStore
from ringfort.torch.tensors import to_seconds

JOIN_TIMEOUT: Final = 30.0
"""Seconds to look for peers by default. Torch's own half hour is too long for a person who has forgotten to start the
other machine."""
_QUERY: Final = ("world_size", "rank", "min_peers", "timeout")


def meet(url: str, timeout: timedelta | None = None, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield store, rank and world size, for torch's `init_method="ringfort://"`.

    The query may have `world_size` (how many processes exactly) or `min_peers` (how many others at least), and
    `timeout` in seconds. Under torchrun and `ringfort run`, `ringfort://` means `env://`; under `srun` and `mpiexec`,
    the ranks are theirs and the store is ours. Raises `ConfigError`, and `RendezvousTimeoutError` that says which peers
    were seen, and which were refused and why.
    """
    told = Environment.from_mapping()
    if told.half_told:
        raise ConfigError("init_method", url, told.half_told)
    if told.launcher == TORCHRUN.name and (told.master or told.master_addr):
        yield from dist.rendezvous("env://", **({} if timeout is None else {"timeout": timeout}))
        return
    if told.launcher not in ("", TORCHRUN.name):
        yield _with_ranks_of_launcher(timeout)
        return
    query = _parse_query(url)
    if query.get("rank", -1) >= 0:
        raise ConfigError("rank", int(query["rank"]), "ringfort:// chooses the ranks; leave rank out")
    world_size = int(query.get("world_size", -1))
    others = world_size - 1 if world_size > 0 else int(query.get("min_peers", 1))
    seconds = query.get("timeout") or (JOIN_TIMEOUT if _is_default(timeout) else to_seconds(timeout))
    backend = AutoDiscoveryBackend(
        AutoDiscoveryConfig(min_peers=others, max_peers=others if world_size > 0 else None, timeout=seconds),
        group=DistributedConfig(timeout=group_seconds(timeout), shared_memory=told.shared_memory or "on"),  # pyright: ignore[reportArgumentType]
    )
    try:
        backend.join_group(others, seconds)
        assert backend.epoch is not None
        store = ClusterStore(backend.node, backend.epoch.peers[0], f"/{backend.epoch.key}")
    except BaseException:
        backend.close()
        raise
    keep(store, backend)
    yield store, backend.rank, backend.world_size


def _with_ranks_of_launcher(timeout: timedelta | None) -> tuple[Any, int, int]:
    """Return a store over the links of all ranks that the launcher has started, and this process's place."""
    context = init(backend="tcp", timeout=group_seconds(timeout))
    store = RpcStore(context)
    keep(store, context.backend)
    return store, context.rank, context.world_size


def group_seconds(timeout: timedelta | None) -> float:
    """Return the timeout of a group's calls: torch's or, where the program leaves that at its default, the
    environment's."""
    told = Environment.from_mapping().timeout
    return told if _is_default(timeout) and told is not None else to_seconds(timeout)


def _is_default(timeout: timedelta | None) -> bool:
    return timeout in (None, dist.distributed_c10d.default_pg_timeout)


def _parse_query(url: str) -> dict[str, float]:
    parts = urlparse(url)
    if parts.netloc or parts.path.strip("/"):
        why = "must not have an address; write ringfort:// alone, or ringfort://?world_size=2"
        raise ConfigError("init_method", url, why)
    found: dict[str, float] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in _QUERY:
            raise ConfigError("init_method", url, f"unknown keyword {name!r}; {did_you_mean(name, _QUERY)}")
        try:
            found[name] = float(value) if name == "timeout" else int(value)
        except ValueError as exc:
            raise ConfigError("init_method", url, f"{name}={value!r} must be a number") from exc
    return found
