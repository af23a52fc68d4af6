"""Ranks that know the addresses of all others beforehand."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from ringfort import DistributedConfig, RingBackend
from ringfort.config import format_address
from ringfort.errors import (
    ConfigError,
    DistributedError,
    InvalidRankError,
    RefusedError,
    RendezvousTimeoutError,
    TransportError,
)
from ringfort.testing import ring_group, run_ranks
from ringfort.testing.groups import reserved_addresses
from tests.helpers.background import Background

CONFIG = DistributedConfig(timeout=20)
SHORT = DistributedConfig(timeout=0.5)


def ring(nodes: list[str] | list[list[str]], rank: int, config: DistributedConfig = CONFIG) -> RingBackend:
    return RingBackend(replace(config, nodes=nodes, rank=rank))


def check(backends: list[RingBackend]) -> None:
    """Every rank passes a byte on to the next, and all are closed."""

    def pass_on(backend: RingBackend) -> None:
        n, rank = backend.world_size, backend.rank
        came = bytearray(1)
        backend.exchange(bytes([rank]), (rank + 1) % n, came, (rank - 1) % n)
        assert came == bytes([(rank - 1) % n])

    assert run_ranks(backends, pass_on) == [None] * len(backends)
    run_ranks(backends, lambda backend: backend.close())


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_every_rank_is_linked_to_every_other(world_size: int, host: str) -> None:
    with ring_group(world_size, CONFIG, host=host) as backends:
        assert run_ranks(backends, lambda backend: backend.barrier()) == [None] * world_size
        for backend in backends:
            assert len(backend.group.engine.links) == world_size - 1
            assert backend.group.hosts == (0,) * world_size


def test_ranks_may_start_in_any_order() -> None:
    with reserved_addresses(3) as nodes:
        started = [Background(ring, nodes, rank) for rank in (2, 0, 1)]
        check(sorted((start.result() for start in started), key=lambda backend: backend.rank))


def test_the_first_address_that_works_is_taken() -> None:
    with reserved_addresses(4) as (closed, *nodes):
        listed = [
            [nodes[0]],
            [nodes[1], closed],
            ["192.0.2.1:5", nodes[2]],
        ]  # rank 2 cannot listen at its first address
        started = [Background(ring, listed, rank) for rank in range(3)]
        check([start.result() for start in started])


def test_a_port_in_use_is_said_in_words() -> None:
    with reserved_addresses(1) as (free,), socket.create_server(("127.0.0.1", 0)) as other:
        nodes = [free, format_address(*other.getsockname())]
        with pytest.raises(TransportError, match="the port is in use"):
            ring(nodes, 1, SHORT)


def test_ranks_with_different_lists_do_not_meet() -> None:
    with reserved_addresses(3) as (a, b, c):
        host = Background(ring, [a, b], 0, SHORT)
        with pytest.raises(RefusedError, match="another list of nodes"):
            ring([a, c], 1)
        with pytest.raises(DistributedError, match=r"(?s)missing: rank 1.*another list of nodes"):
            host.result()


def test_a_list_of_another_length_is_said_in_words() -> None:
    with reserved_addresses(3) as (a, b, c):
        host = Background(ring, [a, b], 0, SHORT)
        with pytest.raises(RefusedError, match="started with 3 ranks, rank 0 with 2"):
            ring([a, b, c], 1)
        with pytest.raises(DistributedError, match="missing: rank 1"):
            host.result()


def test_a_rank_that_is_used_twice_finds_its_port_in_use() -> None:
    with reserved_addresses(3) as nodes:
        both = [Background(ring, nodes, 1, SHORT) for _ in range(2)]
        errors: list[str] = []
        for start in both:
            with pytest.raises(TransportError) as caught:
                start.result()
            errors.append(str(caught.value))
        assert sum("the port is in use" in error for error in errors) == 1


def test_a_missing_rank_is_named() -> None:
    with reserved_addresses(3) as nodes:
        started = [Background(ring, nodes, rank, SHORT) for rank in (0, 1)]
        for start in started:
            # The one that gives up last finds the other gone too.
            with pytest.raises(DistributedError, match=r"missing: rank (1, )?2\b"):
                start.result()


def test_a_missing_lower_rank_is_named() -> None:
    with reserved_addresses(2) as nodes, pytest.raises(RendezvousTimeoutError, match="looking for rank 0") as caught:
        ring(nodes, 1, SHORT)
    assert caught.value.missing == (0,)


@pytest.mark.parametrize(
    ("kind", "nodes", "rank", "saying"),
    [
        (ConfigError, [], 0, "nodes=[]"),
        (ConfigError, ["a:1", "b:2"], None, "rank=None"),
        (InvalidRankError, ["a:1", "b:2"], 2, "rank=2"),
        (InvalidRankError, ["a:1", "b:2"], -1, "rank=-1"),
        (ConfigError, ["a:1", "a:1"], 0, "named twice"),
        (ConfigError, ["a:1", "b"], 0, "nodes='b'"),
        (ConfigError, "a:1", 0, "nodes='a:1'"),
    ],
)
def test_wrong_arguments_raise_at_once(kind: type[DistributedError], nodes: list[str], rank: int, saying: str) -> None:
    with pytest.raises(kind) as caught:
        RingBackend(DistributedConfig(nodes=nodes, rank=rank, timeout=0.5))
    assert saying in str(caught.value)
