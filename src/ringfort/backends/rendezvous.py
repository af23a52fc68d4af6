"""How ranks that know one address become a full mesh.

Rank 0 keeps the door. The others knock with backoff, say who they are, and wait; when all are there each is told where
the others listen. Then every rank connects to those below it and accepts those above it, says so to rank 0, and starts
when rank 0 says that all are ready: so either every rank has a whole mesh or every rank gets an error.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
import time
from collections.abc import Iterable
from contextlib import suppress

from ringfort.config import format_address
from ringfort.errors import (
    DistributedError,
    NoConnectionError,
    ProtocolError,
    RefusedError,
    RendezvousTimeoutError,
)
from ringfort.transport import tcp
from ringfort.transport.door import Arrival, Door, hear, say
from ringfort.transport.greeting import Join, Meet, Ready, Refused, Welcome

Sockets = dict[int, socket.socket]


def host_group(listener: socket.socket, world_size: int, timeout: float) -> Sockets:
    """Rank 0's part: a socket to every other rank. Closes `listener`."""
    deadline = time.monotonic() + timeout
    door = Door(listener)
    seated: dict[int, tuple[socket.socket, Join]] = {}
    try:
        while len(seated) < world_size - 1:
            arrivals, stirred = door.wait(deadline)
            for sock in stirred:  # whoever speaks or ends before the welcome has given up: the seat is free again
                rank = next(rank for rank, (other, _) in seated.items() if other is sock)
                door.forget(sock)
                sock.close()
                del seated[rank]
            for arrival in arrivals:
                _seat(door, arrival, world_size, seated)
            if time.monotonic() >= deadline and len(seated) < world_size - 1:
                raise _incomplete("waiting for all ranks to come", timeout, range(1, world_size), seated, door)
        for sock, _ in seated.values():
            door.forget(sock)
    except BaseException as exc:
        _dismiss((sock for sock, _ in seated.values()), exc)
        raise
    finally:
        door.close()
    sockets = {rank: sock for rank, (sock, _) in seated.items()}
    addresses = [("", 0), *((seated[rank][1].host, seated[rank][1].port) for rank in range(1, world_size))]
    _start(sockets, Welcome(secrets.token_bytes(16), addresses), deadline)
    return sockets


def _seat(door: Door, arrival: Arrival, world_size: int, seated: dict[int, tuple[socket.socket, Join]]) -> None:
    said = arrival.said
    if not isinstance(said, Join):
        door.refuse(arrival, "group", "this is rank 0 of a group that forms; join it with MASTER_ADDR and MASTER_PORT")
    elif said.world_size != world_size:
        door.refuse(
            arrival,
            "world_size",
            f"rank {said.rank} was started with world size {said.world_size}, rank 0 with {world_size}",
        )
    elif not 1 <= said.rank < world_size:
        taken = "rank 0 is this process" if said.rank == 0 else f"ranks are 0 to {world_size - 1}"
        door.refuse(arrival, "rank_taken" if said.rank == 0 else "rank_range", f"rank {said.rank} cannot join: {taken}")
    elif said.rank in seated:
        other = format_address(*seated[said.rank][0].getpeername()[:2])
        door.refuse(
            arrival, "rank_taken", f"rank {said.rank} is taken by {other}; give every process a rank of its own"
        )
    else:
        seated[said.rank] = (arrival.sock, said)
        door.watch(arrival.sock)


def _start(sockets: Sockets, welcome: Welcome, deadline: float) -> None:
    """Tells all where the others are, waits until each has its links, and lets them start."""
    try:
        for sock in sockets.values():
            say(sock, welcome, deadline)
        for rank, sock in sockets.items():
            if not isinstance(hear(sock, f"rank {rank}", deadline), Ready):
                raise ProtocolError(f"rank {rank} did not say that it is ready", peer=rank)
        for sock in sockets.values():
            say(sock, Ready(), deadline)
    except BaseException as exc:
        _dismiss(sockets.values(), exc)
        raise


def _dismiss(sockets: Iterable[socket.socket], exc: BaseException) -> None:
    """Tells those who wait that the group will not be, and why."""
    reason = str(exc) if isinstance(exc, DistributedError) else f"rank 0 stopped ({type(exc).__name__})"
    for sock in sockets:
        with suppress(DistributedError):  # that one has gone; the others still have to be told
            say(sock, Refused("failed", reason), time.monotonic() + 1)
        sock.close()


def join_group(rank: int, world_size: int, host: str, port: int, timeout: float) -> Sockets:
    """The part of every other rank: a socket to each of the others."""
    deadline = time.monotonic() + timeout
    try:
        master = tcp.connect([(host, port)], deadline)
    except NoConnectionError as exc:
        raise RendezvousTimeoutError(f"looking for rank 0: {exc}", timeout, missing=[0]) from exc
    sockets: Sockets = {0: master}
    try:
        door = Door(tcp.listen(_listening_host(host, master.getsockname()[0]), 0))
    except BaseException:
        master.close()
        raise
    try:
        name = f"rank 0 at {format_address(host, port)}"
        say(master, Join(rank, world_size, master.getsockname()[0], door.address[1]), deadline)
        welcome = hear(master, name, deadline)
        if not isinstance(welcome, Welcome) or len(welcome.addresses) != world_size:
            raise ProtocolError(f"{name} answered something else than a welcome", peer=0)
        meet = Meet(rank, world_size, welcome.token)
        for lower in range(1, rank):
            sockets[lower] = _knock(lower, [_reachable(welcome.addresses[lower], master)], meet, timeout, deadline)
        accept_higher(door, rank, meet, sockets, timeout, deadline)
        say(master, Ready(), deadline)
        hear(master, name, deadline)
    except BaseException as exc:
        if 0 in sockets and isinstance(exc, DistributedError) and not isinstance(exc, RefusedError):
            _dismiss([master], exc)
        for sock in sockets.values():
            sock.close()
        if isinstance(exc, NoConnectionError) and time.monotonic() >= deadline:
            raise RendezvousTimeoutError(f"rank {rank} waiting for all ranks to come: {exc}", timeout) from exc
        raise
    finally:
        door.close()
    return sockets


def knock_lower(
    nodes: list[list[tuple[str, int]]], meet: Meet, sockets: Sockets, timeout: float, deadline: float
) -> None:
    """Connects to every rank below, at addresses that were known beforehand."""
    for lower in range(meet.rank):
        sockets[lower] = _knock(lower, nodes[lower], meet, timeout, deadline)


def _knock(rank: int, addresses: list[tuple[str, int]], meet: Meet, timeout: float, deadline: float) -> socket.socket:
    try:
        sock = tcp.connect(addresses, deadline)
    except NoConnectionError as exc:
        raise RendezvousTimeoutError(
            f"rank {meet.rank} looking for rank {rank}: {exc}", timeout, missing=[rank]
        ) from exc
    try:
        say(sock, meet, deadline)
        answer = hear(sock, f"rank {rank}", deadline)
        if not isinstance(answer, Ready):
            raise ProtocolError(f"rank {rank} answered a greeting with something else", peer=rank)
    except BaseException:
        sock.close()
        raise
    return sock


def accept_higher(door: Door, rank: int, ours: Meet, sockets: Sockets, timeout: float, deadline: float) -> None:
    """Lets in every rank above. Those already in are watched: one that dies before all are there is expected again."""
    higher = range(rank + 1, ours.world_size)
    while any(other not in sockets for other in higher):
        arrivals, stirred = door.wait(deadline)
        for sock in stirred:
            door.forget(sock)
            if _is_ended(sock):  # else it has begun to work, which is no business of ours
                sock.close()
                del sockets[next(other for other in higher if sockets.get(other) is sock)]
        for arrival in arrivals:
            refusal = _why_not(arrival.said, ours, sockets, higher)
            if refusal:
                door.refuse(arrival, *refusal)
                continue
            assert isinstance(arrival.said, Meet)
            say(arrival.sock, Ready(), deadline)
            sockets[arrival.said.rank] = arrival.sock
            arrival.sock.setblocking(False)
            door.watch(arrival.sock)
        if time.monotonic() >= deadline and any(other not in sockets for other in higher):
            raise _incomplete(f"rank {rank} waiting for higher ranks", timeout, higher, sockets, door)


def _is_ended(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _why_not(said: object, ours: Meet, sockets: Sockets, higher: range) -> tuple[str, str] | None:
    if not isinstance(said, Meet):
        return "group", f"this is rank {ours.rank}; a new group is joined at rank 0"
    if said.world_size != ours.world_size:
        return "world_size", f"rank {said.rank} knows {said.world_size} ranks, rank {ours.rank} {ours.world_size}"
    if not secrets.compare_digest(said.token, ours.token):
        return "group", f"rank {said.rank} belongs to another group, or was given another list of nodes"
    if said.rank not in higher:
        return "rank_range", f"rank {said.rank} does not connect to rank {ours.rank}: check that each rank is used once"
    if said.rank in sockets:
        return "rank_taken", f"rank {said.rank} is taken; give every process a rank of its own"
    return None


def _incomplete(
    what: str, timeout: float, wanted: Iterable[int], have: Iterable[int], door: Door
) -> RendezvousTimeoutError:
    present = set(have)
    missing = [rank for rank in wanted if rank not in present]
    state = f"missing: rank {', '.join(map(str, missing))}. Start them with the same address and world size"
    if door.turned_away:
        state += f". Turned away: {'; '.join(door.turned_away)}"
    return RendezvousTimeoutError(what, timeout, missing=missing, state=state)


def is_loopback(host: str) -> bool:
    """Whether `host` is an address that only this machine has."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def _listening_host(master: str, local: str) -> str:
    """Where a rank listens: on the interface that leads to rank 0. If that is loopback only because a host name is so
    resolved on its own machine (Debian's 127.0.1.1), ranks elsewhere come in through another: listen on all."""
    return "" if is_loopback(local) and not is_loopback(master) else local


def _reachable(address: tuple[str, int], master: socket.socket) -> tuple[str, int]:
    """Another rank's address as seen from here. Loopback means rank 0's machine, which we know how to reach; a
    link-local address needs the name of our own interface."""
    host, port = address
    mine = master.getsockname()
    if is_loopback(host) and not is_loopback(mine[0]):
        host = master.getpeername()[0]
    if host.lower().startswith("fe80:") and "%" not in host and len(mine) == 4:
        host = f"{host}%{mine[3]}"
    return host, port
