"""`HybridBackend`: host by host, with and without an engine inside the hosts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ringfort import (
    AllReduceStrategy,
    CollectiveConfig,
    CollectiveMismatchError,
    DistributedConfig,
    DistributedContext,
    HybridBackend,
    ReduceOp,
)
from ringfort.backends.engines.native import ByHost
from ringfort.bootstrap import terms
from ringfort.config import Shape
from ringfort.errors import InvalidArgumentError
from ringfort.testing.groups import closing_all, passing_credentials, reserved_addresses
from ringfort.testing.ranks import results, run_ranks
from ringfort.transport.machine import this_machine

CONFIG = DistributedConfig(timeout=20.0)
TWO_HOSTS = (0, 0, 1, 1)


@contextmanager
def hybrid_group(
    places: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, kind: type[HybridBackend] = HybridBackend, **settings: Any
) -> Iterator[list[HybridBackend]]:
    """Ranks that say, each in its own thread, that they are on the machines `places`."""
    where = threading.local()

    def machine(*, shares: bool) -> Any:
        return replace_id(this_machine(shares=shares), where.place)

    monkeypatch.setattr(terms, "this_machine", machine)
    credentials = passing_credentials()
    with reserved_addresses(1) as (master,):

        def connect(rank: int) -> HybridBackend:
            where.place = places[rank]
            return kind(rank, len(places), master, config=replace(CONFIG, **settings), credentials=credentials)

        with closing_all(results(run_ranks(range(len(places)), connect))) as backends:
            yield list(backends)


def replace_id(machine: Any, place: int) -> Any:
    return type(machine)(b"host %d" % place, machine.shares, machine.is_ordered)


def test_collectives_go_host_by_host_and_ranks_of_a_host_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with hybrid_group(TWO_HOSTS, monkeypatch) as backends:
        assert {backend.config.collective.all_reduce.shape for backend in backends} == {Shape.HIERARCHICAL}
        places = [hosts_of(backend) for backend in backends]
        assert [place.local.members for place in places] == [(0, 1), (0, 1), (2, 3), (2, 3)]
        assert [place.between and place.between.members for place in places] == [(0, 2), None, (0, 2), None]
        assert all(place.local.shares_memory for place in places)

        def program(backend: HybridBackend) -> None:
            x = np.full(70_001, backend.rank + 1.0, np.float32)
            assert (DistributedContext(backend).all_reduce(x) == 10).all()

        results(run_ranks(backends, program))


def test_what_a_person_has_chosen_stays_and_one_host_goes_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = CollectiveConfig(all_reduce=AllReduceStrategy.RING)
    with hybrid_group((0, 0, 1), monkeypatch, collective=chosen) as backends:
        assert backends[0].config.collective.all_reduce is AllReduceStrategy.RING
        assert backends[0].config.collective.broadcast.shape is Shape.HIERARCHICAL
    with hybrid_group((0, 0), monkeypatch) as backends:
        assert backends[0].config.collective.all_reduce is AllReduceStrategy.AUTO


class GlooInside(HybridBackend):
    """Gloo in the place of NCCL, and tensors of the CPU in the place of those on a GPU: the way is the same."""

    stores: Any = None

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        gloo = pytest.importorskip("ringfort.backends.engines.gloo")
        places = hosts_of(self)
        native = gloo.GlooNative(places.local, self._connect, self.group.engine._poller.wake)
        native.tensors_on, native.by_host = "cpu", places
        self.group.native = native

    def _connect(self) -> Any:
        from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        local = hosts_of(self).local
        store = PrefixStore(str(local.members), self.stores)
        return ProcessGroupGloo(store, local.rank, local.world_size, options)


def hosts_of(backend: HybridBackend) -> ByHost:
    native = backend.native()
    assert native is not None
    assert native.by_host is not None
    return native.by_host


@pytest.mark.parametrize("places", [TWO_HOSTS, (0, 1, 1), (0, 0), (0, 1)], ids=str)
def test_tensors_of_a_device_go_through_its_engine_inside_hosts_and_ours_between(
    places: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(GlooInside, "stores", torch.distributed.HashStore())
    n = len(places)

    def program(backend: HybridBackend) -> None:
        context = DistributedContext(backend)
        x = torch.full((500, 3), float(backend.rank + 1))
        assert context.all_reduce(x) is x
        assert (x == n * (n + 1) / 2).all()
        whole = torch.arange(12).reshape(3, 4) + backend.rank
        context.all_reduce(whole[:, ::2], ReduceOp.MEAN)  # a part that is not contiguous
        expected = (n * torch.arange(12) + n * (n - 1) // 2) // n
        assert (whole[:, ::2] == expected.reshape(3, 4)[:, ::2]).all()
        assert (whole[:, 1::2] == torch.arange(12).reshape(3, 4)[:, 1::2] + backend.rank).all()
        kept, into = torch.ones(500), torch.zeros(500)
        assert context.all_reduce(kept, out=into) is into
        assert (kept == 1).all()
        assert (into == n).all()
        for a, b in ((kept, np.zeros(500, np.float32)), (np.zeros(500, np.float32), into)):
            with pytest.raises(InvalidArgumentError, match=r"^out=.*must be where x is"):
                context.all_reduce(a, out=b)
        y = torch.ones(5)
        context.all_reduce(y, ReduceOp.premul_sum(backend.rank + 1))
        assert (y == n * (n + 1) / 2).all()
        for root in range(n):
            z = torch.full((7,), backend.rank, dtype=torch.int64)
            context.broadcast(z, root)
            assert (z == root).all()

    with hybrid_group(places, monkeypatch, GlooInside) as backends:
        results(run_ranks(backends, program))


def test_ranks_that_disagree_about_a_tensor_of_a_device_all_learn_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(GlooInside, "stores", torch.distributed.HashStore())

    def program(backend: HybridBackend) -> None:
        with pytest.raises(CollectiveMismatchError):
            DistributedContext(backend).all_reduce(torch.zeros(5 if backend.rank == 3 else 4))

    with hybrid_group(TWO_HOSTS, monkeypatch, GlooInside) as backends:
        results(run_ranks(backends, program))
