"""`init_method="ringfort://"`: the processes of a cluster find each other, agree on ranks, and share a store; nobody
types an address."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final
from urllib.parse import parse_qsl, urlparse

from ringfort.cluster.backend import AutoDiscoveryBackend
from ringfort.config import AutoDiscoveryConfig, DistributedConfig, Environment
from ringfort.errors import ConfigError
from ringfort.torch.cluster_store import ClusterStore
from ringfort.torch.names import dist
from ringfort.torch.tensors import to_seconds
from ringfort.transport.finalisers import WeakKeys

PATIENCE: Final = 30.0
"""Seconds that peers are looked for unless the program says otherwise. Torch's own half hour is too long for a person
who has forgotten to start the other machine."""
_KNOWN: Final = ("world_size", "rank", "min_peers", "timeout")


class MeetingStore(ClusterStore):
    """The store of those who met, and their links: the default process group takes them over."""

    def __init__(self, backend: AutoDiscoveryBackend, keeper: str, label: str) -> None:
        super().__init__(backend.node, keeper, label)
        self._backend: AutoDiscoveryBackend | None = backend

    def take_backend(self) -> AutoDiscoveryBackend | None:
        """The links, once."""
        backend, self._backend = self._backend, None
        return backend


_stores: Final[WeakKeys[AutoDiscoveryBackend, MeetingStore]] = WeakKeys()
"""Torch keeps only the C++ half of a store: without a place here the other half would be collected. It lives as long as
the links that were made with it, which it holds itself until a process group takes them."""


def meet(url: str, timeout: timedelta | None = None, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """What torch calls for `ringfort://`. The query may have `world_size` (all there are to be), or `min_peers` (others
    there are to be at least), and `timeout` in seconds. Under a launcher it is what that has said: `env://`.

    Raises `ConfigError`, and `RendezvousTimeoutError` that says who was seen, who was refused and why.
    """
    told = Environment.from_mapping()
    if told.rank is not None and told.world_size is not None and (told.master or told.master_addr):
        yield from dist.rendezvous("env://", **({} if timeout is None else {"timeout": timeout}))
        return
    wanted = _query(url)
    if wanted.get("rank", -1) >= 0:
        raise ConfigError("rank", int(wanted["rank"]), "ringfort:// gives the ranks; leave it out")
    world_size = int(wanted.get("world_size", -1))
    others = world_size - 1 if world_size > 0 else int(wanted.get("min_peers", 1))
    seconds = wanted.get("timeout") or _patience(timeout)
    backend = AutoDiscoveryBackend(
        AutoDiscoveryConfig(
            min_peers=others,
            max_peers=world_size - 1 if world_size > 0 else None,
            timeout=seconds,
        ),
        group=DistributedConfig(timeout=group_seconds(timeout), shared_memory=told.shared_memory or "on"),  # pyright: ignore[reportArgumentType]
    )
    try:
        backend.join_group(others, seconds)
        assert backend.epoch is not None
        store = MeetingStore(backend, backend.epoch.peers[0], f"/{backend.epoch.key}")
    except BaseException:
        backend.close()
        raise
    _stores[backend] = store
    yield store, backend.rank, backend.world_size


def forget(backend: object) -> None:
    """The group over `backend` has ended, and so does its store."""
    if isinstance(backend, AutoDiscoveryBackend):
        store = _stores.get(backend)
        if store is not None:
            del _stores[backend]
            store.close()


def links_of(store: Any) -> AutoDiscoveryBackend | None:
    """The links that were made with `store`, which torch has wrapped, if it is one of ours and they are not in use."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.take_backend() if isinstance(store, MeetingStore) else None


def group_seconds(timeout: timedelta | None) -> float:
    """What bounds the calls of a group: torch's timeout or, where the program leaves that half hour as it is, the
    environment's."""
    told = Environment.from_mapping().timeout
    is_default = timeout in (None, dist.distributed_c10d.default_pg_timeout)
    return told if is_default and told is not None else to_seconds(timeout)


def _patience(timeout: timedelta | None) -> float:
    return PATIENCE if timeout in (None, dist.distributed_c10d.default_pg_timeout) else to_seconds(timeout)


def _query(url: str) -> dict[str, float]:
    parts = urlparse(url)
    if parts.netloc or parts.path.strip("/"):
        raise ConfigError("init_method", url, "has no address; write ringfort:// alone, or ringfort://?world_size=2")
    found: dict[str, float] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in _KNOWN:
            raise ConfigError("init_method", url, f"{name!r} is none of {', '.join(_KNOWN)}")
        try:
            found[name] = float(value) if name == "timeout" else int(value)
        except ValueError as exc:
            raise ConfigError("init_method", url, f"{name}={value!r} is no number") from exc
    return found
