"""How ranks meet at a store of torch's: who is on which machine, and where each of them listens."""

from __future__ import annotations

import socket
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib import import_module
from typing import Any, NamedTuple

from ringfort.config import Environment, parse_address
from ringfort.errors import ConfigError, RendezvousError, RendezvousTimeoutError
from ringfort.transport.machine import Machine

_LOOPBACK = "127.0.0.1"
_ANY_PORT = 9
"""A UDP socket that is connected to it sends nothing: it only tells which way the packets would take."""


class Place(NamedTuple):
    """A rank that wants to meet the others."""

    rank: int
    world_size: int
    machine: Machine
    timeout: float


class Found(NamedTuple):
    """What it knows when all have come."""

    store: Any
    """For this group alone."""
    machines: dict[int, Machine]
    listen: dict[str, str]
    """Where to listen, as Gloo wants to be told."""


def open_store(place: Place, master: str | None, store: Any) -> Any:
    """`store`, or that at `master`, which rank 0 opens unless torchrun has. Raises `RendezvousError`."""
    rank = place.rank
    if store is not None:
        return store
    if master is None:
        raise ConfigError("master", None, "say where rank 0 is, as host:port, or set MASTER_ADDR and MASTER_PORT")
    host, port = parse_address(master, "master")
    address = f"[{host}]" if ":" in host else host
    url = f"tcp://{address}:{port}?rank={rank}&world_size={place.world_size}"
    dist = import_module("torch.distributed")
    try:
        return next(iter(dist.rendezvous(url, timeout=timedelta(seconds=place.timeout))))[0]
    except (RuntimeError, ValueError) as exc:
        raise RendezvousError(f"no store of torch's at {master}: {_first_line(exc)}", peer=master) from exc


@contextmanager
def meet_at_store(place: Place, store: Any, interface: str | None) -> Generator[Found, None, None]:
    """Waits for all ranks. Leaves the block when all of them do: until then rank 0's store has to stay.

    Raises `RendezvousTimeoutError` with who is missing.
    """
    c10d = import_module("torch._C._distributed_c10d")
    deadline = time.monotonic() + place.timeout
    # Every rank makes its groups in the same order, so they count alike: no group finds what another has left.
    number = store.add(f"ringfort/groups/{place.rank}", 1)
    own = c10d.PrefixStore(f"ringfort/{number}", store)
    host = getattr(store, "host", None) or _host_of(store)
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
        who = f"rank {', '.join(map(str, missing))} has not come" if missing else _first_line(exc)
        raise RendezvousTimeoutError("meeting at torch's store", place.timeout, missing=missing, state=who) from exc


def _where_to_listen(
    place: Place, addresses: list[str], machines: dict[int, Machine], interface: str | None
) -> dict[str, str]:
    """Never what the host name happens to resolve to, which is what Gloo would take."""
    interface = interface or Environment.from_mapping().gloo_interface
    if interface:
        return {"interface": interface}
    if len({machine.id for machine in machines.values()}) == 1:
        return {"hostname": _LOOPBACK}
    if place.rank == 0:
        # The way to itself may be loopback (Debian's 127.0.1.1): the way to another is one that others can take.
        others = [where for rank, where in enumerate(addresses) if machines[rank].id != place.machine.id and where]
        addresses[0] = _address_towards(others[0]) if others else ""
    if not addresses[place.rank]:
        raise ConfigError(
            "interface", interface, "the ranks are on several machines; name the network interface that joins them"
        )
    return {"hostname": addresses[place.rank]}


def _address_towards(host: str) -> str:
    """The address of this machine from which packets to `host` would leave; nothing if it is unknown."""
    for family, kind, _, _, address in _resolved(host):
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return ""


def _resolved(host: str) -> list[Any]:
    try:
        return socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return []


def _host_of(store: Any) -> str | None:
    """The host of a TCPStore that something was put in front of."""
    inner = getattr(store, "underlying_store", None)
    return None if inner is None else getattr(inner, "host", None) or _host_of(inner)


def _first_line(exc: Exception) -> str:
    return str(exc).strip().partition("\n")[0] or type(exc).__name__
