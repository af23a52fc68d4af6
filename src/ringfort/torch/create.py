"""How a process group gets its links: the default group forms a mesh through torch's store, and its sub-groups use the
same links."""

from __future__ import annotations

import json
import socket
import time
from datetime import timedelta
from typing import Any, Final

from ringfort.backends.base import Backend
from ringfort.backends.sub import SubBackend
from ringfort.backends.tcp import TcpBackend
from ringfort.bootstrap.addresses import is_loopback
from ringfort.bootstrap.terms import machine_for
from ringfort.bootstrap.torch_store import host_of_store
from ringfort.cluster.discovery.interfaces import Choice, choose, reachable
from ringfort.cluster.discovery.system import list_interfaces
from ringfort.config import DistributedConfig, Environment, format_address
from ringfort.context import DistributedContext
from ringfort.errors import InvalidArgumentError, RendezvousError, RendezvousTimeoutError
from ringfort.torch.devices import tell_of_cuda
from ringfort.torch.hooks import keep_recorder_off
from ringfort.torch.init_method import group_seconds
from ringfort.torch.linked_store import links_of
from ringfort.torch.names import dist, torch
from ringfort.torch.process_group import RingfortProcessGroup
from ringfort.transport import tcp

_PLACE: Final = "ringfort/place"
"""The key under which rank 0 publishes where it listens."""
_LOOPBACK: Final = "127.0.0.1"


def create(options: Any, backend_options: Any = None) -> RingfortProcessGroup:
    """Create a process group. torch calls this at every member of a Ringfort group. Raises as `TcpBackend`.

    `backend_options` belong to another engine that is named beside Ringfort for another device: Ringfort has none.
    """
    if not isinstance(backend_options, torch._C._distributed_c10d.Backend.Options | None):
        why = "must be None; set environment variables such as RINGFORT_SHM instead (see docs/torch.md)"
        raise InvalidArgumentError("pg_options", backend_options, why)
    config = _config(options)
    keep_recorder_off(RingfortProcessGroup)
    tell_of_cuda(options.store, options.group_rank)
    members = tuple(options.global_ranks_in_group)
    world = dist.group.WORLD
    links: Backend | None = None if members else links_of(options.store)
    if links is None and members and isinstance(world, RingfortProcessGroup):
        links = SubBackend(world.context.backend, members, is_ordered=True, label=str(options.group_id))
    links = links or form(options.store, options.group_rank, options.group_size, config)
    context = DistributedContext(links)
    if not members:
        context.show()
    return RingfortProcessGroup(options.store, context, config.timeout)


def form(store: Any, rank: int, world_size: int, config: DistributedConfig) -> TcpBackend:
    """Return a mesh of all ranks that use the same `store`."""
    if world_size == 1:
        return TcpBackend(0, 1, config=config)
    if rank == 0:
        listener = tcp.listen_everywhere()
        store.set(_PLACE, _place(listener, config))
        return TcpBackend(0, world_size, config=config, listener=listener)
    return TcpBackend(rank, world_size, _ways_to(store, config), config=config)


def _config(options: Any) -> DistributedConfig:
    told = Environment.from_mapping()
    settings: dict[str, Any] = {"encryption": told.encryption, "shared_memory": told.shared_memory or "on"}
    return DistributedConfig(timeout=group_seconds(options.timeout), **settings)


def _place(listener: socket.socket, config: DistributedConfig) -> str:
    """Return what rank 0 publishes: its machine, and all its addresses, the best first. Link-local ones come last and
    without their scope, which has a meaning on this machine only."""
    found = _interfaces(strict=True).addresses
    hosts = [host.partition("%")[0] for host in sorted(found, key=lambda host: "%" in host)]
    port = listener.getsockname()[1]
    return json.dumps({"machine": machine_for(config).id.hex(), "hosts": hosts, "port": port})


def _interfaces(*, strict: bool) -> Choice:
    return choose(list_interfaces(), Environment.from_mapping().interfaces, strict=strict)


def _ways_to(store: Any, config: DistributedConfig) -> list[str]:
    """Return rank 0's addresses as seen from here, the likeliest first. On its own machine that is loopback only if all
    ranks must be there, because the store is at loopback: a rank listens where it found rank 0."""
    until = time.monotonic() + config.timeout
    try:
        store.wait([_PLACE], timedelta(seconds=config.timeout))  # `get` would wait for as long as the store was told
    except RuntimeError as exc:  # stores have no common type for a timeout
        if time.monotonic() < until:
            raise
        how = "rank 0 has not published its address; start it with the same store and world size"
        raise RendezvousTimeoutError("waiting for rank 0", config.timeout, missing=[0], state=how) from exc
    place = store.get(_PLACE)
    try:
        said = json.loads(place)
        hosts, port, machine = [str(host) for host in said["hosts"]], int(said["port"]), str(said["machine"])
    except (ValueError, KeyError, TypeError) as exc:
        raise RendezvousError(f"Malformed address record for rank 0 in the store: {place[:200]!r}") from exc
    # The store is usually at rank 0, and its host then an address that is known to work.
    ways = [way for way in (host_of_store(store), *reachable(hosts, _interfaces(strict=False))) if way]
    if machine == machine_for(config).id.hex():
        elsewhere = [way for way in ways if not is_loopback(way)]
        ways = [_LOOPBACK] if len(elsewhere) < len(ways) else [*elsewhere, _LOOPBACK]
    return [format_address(way, port) for way in dict.fromkeys(ways)]
