"""`GlooBackend`: meeting at a store, where Gloo listens, and what goes wrong there."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ringfort import (
    ConfigError,
    DistributedConfig,
    DistributedContext,
    GlooBackend,
    InvalidRankError,
    InvalidWorldSizeError,
    RendezvousError,
    RendezvousTimeoutError,
)
from ringfort.bootstrap import torch_store
from ringfort.bootstrap.terms import warn_once
from ringfort.bootstrap.torch_store import Place
from ringfort.testing.groups import closing_all, reserved_addresses
from ringfort.testing.ranks import results, run_ranks
from ringfort.transport.machine import Machine

torch: Any = pytest.importorskip("torch")
HERE, THERE = Machine(b"here"), Machine(b"there")


def place(rank: int = 0, machine: Machine = HERE) -> Place:
    return Place(rank, 2, machine, 1.0)


def test_a_rank_that_does_not_come_is_named() -> None:
    config = DistributedConfig(timeout=0.2)
    with pytest.raises(RendezvousTimeoutError, match="rank 1, 2 has not registered") as caught:
        GlooBackend(0, 3, store=torch.distributed.HashStore(), config=config)
    assert caught.value.missing == (1, 2)


def test_nobody_at_the_address_of_rank_0_is_an_error_that_names_it() -> None:
    with reserved_addresses(1) as (master,), pytest.raises(RendezvousError, match=master):
        GlooBackend(1, 2, master, config=DistributedConfig(timeout=0.3))


@pytest.mark.parametrize(
    ("rank", "world_size", "error"),
    [(2, 2, InvalidRankError), (-1, 2, InvalidRankError), (0, 0, InvalidWorldSizeError), (0, 2, ConfigError)],
)
def test_wrong_arguments_raise_at_once(rank: int, world_size: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        GlooBackend(rank, world_size)


def test_groups_of_one_store_do_not_meet_and_gloo_is_said_not_to_encrypt(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    store = torch.distributed.HashStore()
    with caplog.at_level(logging.WARNING):
        for turn in range(2):
            backends = results(run_ranks(range(2), lambda rank: GlooBackend(rank, 2, store=store)))
            with closing_all(backends):

                def program(backend: GlooBackend) -> Any:
                    return DistributedContext(backend).all_gather_object([turn, backend.rank])  # noqa: B023

                assert results(run_ranks(backends, program)) == [[[turn, 0], [turn, 1]]] * 2
                assert backends[0].group.hosts == (0, 0)
    assert "does not encrypt" in caplog.text


@pytest.mark.parametrize(("native_bytes", "expected"), [(None, 0), (0, 1), (4096, 1), (4097, 0)])
def test_gloos_own_collectives_are_used_from_the_configured_size_on(native_bytes: int | None, expected: int) -> None:
    store, config = torch.distributed.HashStore(), DistributedConfig(timeout=20.0)
    config = replace(config, collective=replace(config.collective, native_bytes=native_bytes))
    with closing_all(
        results(run_ranks(range(2), lambda rank: GlooBackend(rank, 2, store=store, config=config)))
    ) as backends:

        def program(backend: GlooBackend) -> int:
            native = backend.native()
            assert native is not None
            begun: list[str] = []
            begin, native.all_reduce = native.all_reduce, lambda x, op: (begun.append(op), begin(x, op))[1]  # type: ignore[method-assign]
            x = np.ones(1024, np.float32)
            DistributedContext(backend).all_reduce(x)
            assert (x == 2).all()
            return len(begun)

        assert results(run_ranks(backends, program)) == [expected] * 2


def test_every_rank_has_the_same_bits_also_of_nans() -> None:
    store, config = torch.distributed.HashStore(), DistributedConfig(timeout=20.0)
    config = replace(config, collective=replace(config.collective, native_bytes=0))
    with closing_all(
        results(run_ranks(range(3), lambda rank: GlooBackend(rank, 3, store=store, config=config)))
    ) as backends:

        def program(backend: GlooBackend) -> bytes:
            bits = np.random.default_rng(backend.rank).integers(0, 2**32, 50_000, np.uint32)  # NaNs of all kinds too
            return DistributedContext(backend).all_reduce(bits.view(np.float32)).tobytes()

        assert len(set(results(run_ranks(backends, program)))) == 1


# --- where Gloo listens -----------------------------------------------------------------------------------------------


def test_ranks_of_one_machine_meet_on_loopback() -> None:
    found = torch_store._where_to_listen(place(), ["10.0.0.1", "10.0.0.1"], {0: HERE, 1: HERE}, None)
    assert found == {"hostname": "127.0.0.1"}


def test_ranks_of_several_machines_listen_where_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"10.0.0.2": "10.0.0.1"}
    monkeypatch.setattr(torch_store, "_address_towards", lambda host: ways[host])
    machines, addresses = {0: HERE, 1: THERE}, ["127.0.1.1", "10.0.0.2"]
    # Rank 0's way to itself is of no use to others: it listens where its way to another begins.
    assert torch_store._where_to_listen(place(), list(addresses), machines, None) == {"hostname": "10.0.0.1"}
    assert torch_store._where_to_listen(place(1, THERE), list(addresses), machines, None) == {"hostname": "10.0.0.2"}


def test_a_person_knows_better(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = {0: HERE, 1: THERE}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert torch_store._where_to_listen(place(), ["", ""], machines, None) == {"interface": "eth7"}
    assert torch_store._where_to_listen(place(), ["", ""], machines, "eth8") == {"interface": "eth8"}


def test_where_nothing_is_known_the_person_may_use_engine() -> None:
    with pytest.raises(ConfigError, match="name the network interface"):
        torch_store._where_to_listen(place(), ["", ""], {0: HERE, 1: THERE}, None)
