"""Ranks that have a torch store in common: through it they learn who is on which machine, and where each listens."""

from __future__ import annotations

import socket
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib import import_module
from typing import Any, NamedTuple

from ringfort.bootstrap.addresses import parse_master
from ringfort.config import Environment, format_address
from ringfort.errors import ConfigError, RendezvousError, RendezvousTimeoutError
from ringfort.transport.machine import Machine

_LOOPBACK = "127.0.0.1"
_ANY_PORT = 9
"""Connecting a UDP socket sends nothing: it only tells from which address packets would leave."""


class Place(NamedTuple):
    """A rank of a group that forms."""

    rank: int
    world_size: int
    machine: Machine
    timeout: float


class Found(NamedTuple):
    """What a rank knows once all have registered."""

    store: Any
    """Used by this group only."""
    machines: dict[int, Machine]
    listen: dict[str, str]
    """Where to listen, as Gloo's arguments."""


def open_store(place: Place, master: str | None, store: Any) -> Any:
    """Return `store`, or the one at `master`, which rank 0 opens unless torchrun has. Raises `RendezvousError`."""
    if store is not None:
        return store
    address = format_address(*parse_master(master)[0])
    url = f"tcp://{address}?rank={place.rank}&world_size={place.world_size}"
    dist = import_module("torch.distributed")
    try:
        return next(iter(dist.rendezvous(url, timeout=timedelta(seconds=place.timeout))))[0]
    except (RuntimeError, ValueError) as exc:
        raise RendezvousError(f"No torch store found at {master}: {_first_line(exc)}", peer=master) from exc


@contextmanager
def meet_at_store(place: Place, store: Any, interface: str | None) -> Generator[Found, None, None]:
    """Wait for all ranks. Rank 0 leaves the block when all others have: until then its store is needed.

    Raises `RendezvousTimeoutError` with the missing ranks.
    """
    c10d = import_module("torch._C._distributed_c10d")
    deadline = time.monotonic() + place.timeout
    # Every rank makes its groups in the same order, so the numbers agree, and no group finds the keys of another.
    number = store.add(f"ringfort/groups/{place.rank}", 1)
    own = c10d.PrefixStore(f"ringfort/{number}", store)
    host = host_of_store(store)
    address = _address_towards(host) if host else ""
    own.set(f"here/{place.rank}", f"{place.machine.id.hex()} {address}")
    said = [text.split(" ") for text in _wait_for_all(place, own, "here", deadline)]
    machines = {rank: Machine(bytes.fromhex(machine)) for rank, (machine, _) in enumerate(said)}
    yield Found(own, machines, _where_to_listen(place, [where for _, where in said], machines, interface))
    own.set(f"linked/{place.rank}", "yes")
    if place.rank == 0:
        _wait_for_all(place, own, "linked", deadline)


def _wait_for_all(place: Place, store: Any, what: str, deadline: float) -> list[str]:
    keys = [f"{what}/{rank}" for rank in range(place.world_size)]
    left = max(0.01, deadline - time.monotonic())
    try:
        store.wait(keys, timedelta(seconds=left))
        return [store.get(key).decode() for key in keys]
    except RuntimeError as exc:
        missing: list[int] = []
        with suppress(RuntimeError):  # the store itself may be gone
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        who = f"rank {', '.join(map(str, missing))} has not registered" if missing else _first_line(exc)
        raise RendezvousTimeoutError(
            "waiting for all ranks at the torch store", place.timeout, missing=missing, state=who
        ) from exc


def _where_to_listen(
    place: Place, addresses: list[str], machines: dict[int, Machine], interface: str | None
) -> dict[str, str]:
    """Return the address to listen at. Gloo would take whatever the host name resolves to."""
    interface = interface or Environment.from_mapping().gloo_interface
    if interface:
        return {"interface": interface}
    if len({machine.id for machine in machines.values()}) == 1:
        return {"hostname": _LOOPBACK}
    if place.rank == 0:
        # The path to itself may be loopback (Debian's 127.0.1.1): the path to another rank is one that others can use.
        others = [where for rank, where in enumerate(addresses) if machines[rank].id != place.machine.id and where]
        addresses[0] = _address_towards(others[0]) if others else ""
    if not addresses[place.rank]:
        raise ConfigError("interface", interface, "missing; name the network interface that connects the machines")
    return {"hostname": addresses[place.rank]}


def _address_towards(host: str) -> str:
    """Return the address of this machine from which packets to `host` would leave; empty if `host` is unknown."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return ""


def host_of_store(store: Any) -> str:
    """Return the host of a TCPStore, also behind other stores; empty for stores without one."""
    inner = getattr(store, "underlying_store", None)
    return str(getattr(store, "host", None) or ("" if inner is None else host_of_store(inner)))


def _first_line(exc: Exception) -> str:
    return str(exc).strip().partition("\n")[0] or type(exc).__name__
