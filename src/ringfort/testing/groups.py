"""Groups to run checks on, with one thread per rank: over memory, over loopback TCP, and sub-groups of either.

A group factory takes a world size and a configuration, and returns a context manager: inside, it gives the backends of
all ranks in order; at the end it closes them. Write one like these for a backend of your own.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from ringfort.backends.base import Backend
from ringfort.backends.ring import RingBackend
from ringfort.backends.simulated import SimulatedBackend
from ringfort.backends.sub import SubBackend
from ringfort.backends.tcp import TcpBackend
from ringfort.config import DistributedConfig, format_address
from ringfort.identity.credentials import Credentials
from ringfort.identity.keypair import NodeIdentity
from ringfort.identity.namespace import NetworkNamespace
from ringfort.testing.ranks import results, run_ranks

GroupFactory = Callable[[int, DistributedConfig], AbstractContextManager[Sequence[Backend]]]
"""What makes the ranks of a group, given their number and their settings, such as `simulated_group`."""
B = TypeVar("B", bound=Backend)


class _Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closable)


def simulated_group(world_size: int, config: DistributedConfig) -> AbstractContextManager[Sequence[Backend]]:
    """Return ranks over memory, to be used as a context manager: it closes them."""
    return closing_all(SimulatedBackend.create_group(world_size, config=config))


def tcp_group(
    world_size: int, config: DistributedConfig, *, host: str = "127.0.0.1"
) -> AbstractContextManager[Sequence[TcpBackend]]:
    """Return ranks over TCP that meet at rank 0, which listens at `host`. A context manager, as `simulated_group`."""

    def connect(rank: int, nodes: list[str], credentials: Credentials) -> TcpBackend:
        return TcpBackend(rank, world_size, nodes[0], config=config, credentials=credentials)

    return _together(world_size, host, connect)


def ring_group(
    world_size: int, config: DistributedConfig, *, host: str = "127.0.0.1"
) -> AbstractContextManager[Sequence[RingBackend]]:
    """Return ranks over TCP that know each other's addresses. A context manager, as `simulated_group`."""

    def connect(rank: int, nodes: list[str], credentials: Credentials) -> RingBackend:
        return RingBackend(replace(config, nodes=nodes, rank=rank), credentials=credentials)

    return _together(world_size, host, connect)


def sub_group_of(factory: GroupFactory) -> GroupFactory:
    """Return a factory of sub-groups without the first and the last rank of a group of `factory`, so that a rank's
    number in the sub-group is never its number in the parent."""

    @contextmanager
    def sub_group(world_size: int, config: DistributedConfig) -> Generator[Sequence[Backend], None, None]:
        with factory(world_size + 2, config) as parents:
            members = range(1, world_size + 1)
            yield [SubBackend(parents[member], members) for member in members]

    return sub_group


def with_settings(factory: GroupFactory, **changes: Any) -> GroupFactory:
    """The same groups, with `changes` to their `DistributedConfig`."""
    return lambda world_size, config: factory(world_size, replace(config, **changes))


def passing_credentials() -> Credentials:
    """A new identity and a new cluster, which leave nothing on disk."""
    return Credentials(NodeIdentity.ephemeral(), NetworkNamespace.generate("testing"))


@contextmanager
def reserved_addresses(number: int, host: str = "127.0.0.1") -> Generator[list[str], None, None]:
    """Addresses of free ports, reserved inside the block, for ranks that must know them beforehand.

    A socket that is bound and does not listen reserves its port, and on Linux SO_REUSEADDR still lets the rank listen
    there. Elsewhere the port was only free a moment ago.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as held:
        holders = [held.enter_context(socket.socket(family, socket.SOCK_STREAM)) for _ in range(number)]
        for holder in holders:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind((host, 0))
        addresses = [format_address(host, holder.getsockname()[1]) for holder in holders]
        if sys.platform != "linux":
            held.close()
        yield addresses


@contextmanager
def closing_all(ranks: Sequence[C]) -> Generator[Sequence[C], None, None]:
    """Close all backends or contexts at the end, at the same time: each close waits a moment for the others'."""
    try:
        yield ranks
    finally:
        results(run_ranks(ranks, lambda rank: rank.close()))


@contextmanager
def _together(
    world_size: int, host: str, connect: Callable[[int, list[str], Credentials], B]
) -> Generator[Sequence[B], None, None]:
    """The backends of all ranks, which connect at the same time. If one fails, the others are closed."""
    with reserved_addresses(world_size, host) as nodes:
        credentials = passing_credentials()
        outcomes = run_ranks(range(world_size), lambda rank: connect(rank, nodes, credentials))
        with closing_all([outcome for outcome in outcomes if isinstance(outcome, Backend)]):
            yield results(outcomes)
