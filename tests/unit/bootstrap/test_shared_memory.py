"""Who speaks through memory and who stays on the network, and that nothing is lost or left behind either way."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from ringfort import DistributedConfig, DistributedContext, SubBackend, TcpBackend
from ringfort.errors import TransportError
from ringfort.testing import run_ranks
from ringfort.testing.groups import closing_all, passing_credentials, reserved_addresses, tcp_group
from ringfort.testing.ranks import results
from ringfort.transport import machine
from ringfort.transport.segment import PAGE, Offer, Segment
from ringfort.transport.shm import ShmStream

CONFIG = DistributedConfig(timeout=20)


def streams_of(backend: TcpBackend) -> dict[int, bool]:
    """Whether the link to each peer goes through memory."""
    return {peer: isinstance(link.stream, ShmStream) for peer, link in backend.group.engine.links.items()}


def all_works(backend: TcpBackend) -> None:
    context = DistributedContext(backend)
    n = backend.world_size
    for size in (1, 1000, 300_000):
        for _ in range(3):
            assert set(context.all_reduce(np.full(size, backend.rank + 1.0)).tolist()) == {n * (n + 1) / 2}
        assert context.broadcast(np.full(size, float(backend.rank)), root=n - 1)[-1] == n - 1
        assert context.all_gather(np.full(size, backend.rank))[:, -1].tolist() == list(range(n))
    context.barrier()
    after, before = (backend.rank + 1) % n, (backend.rank - 1) % n
    assert context.sendrecv(np.full(5, backend.rank), after, np.zeros(5, int), before)[0] == before


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Offer]:
    """The segments that were made."""
    made: list[Offer] = []
    create = Segment.create

    def note(size: int) -> Segment:
        segment = create(size)
        made.append(segment.offer)
        return segment

    monkeypatch.setattr(Segment, "create", staticmethod(note))
    return made


def test_ranks_of_one_machine_share_memory_and_leave_no_way_to_it(opened: list[Offer]) -> None:
    with tcp_group(3, CONFIG) as backends:
        results(run_ranks(backends, all_works))
        for backend in backends:
            assert set(streams_of(backend).values()) == {True}
            assert backend.group._arena is not None
        assert len(opened) == 4  # three pairs and the arena
        for offer in opened:
            with pytest.raises(TransportError):
                Segment.open(offer, offer.size - PAGE)
    assert all(backend.group._arena is None for backend in backends)


def test_one_that_does_not_want_to_is_spoken_to_over_the_network() -> None:
    credentials = passing_credentials()
    with reserved_addresses(1) as (master,):

        def connect(rank: int) -> TcpBackend:
            config = replace(CONFIG, shared_memory="off" if rank == 1 else "on")
            return TcpBackend(rank, 3, master, config=config, credentials=credentials)

        with closing_all(results(run_ranks(range(3), connect))) as backends:
            results(run_ranks(backends, all_works))
            assert [streams_of(backend) for backend in backends] == [
                {1: False, 2: True},
                {0: False, 2: False},
                {0: True, 1: False},
            ]
            assert [backend.group._arena for backend in backends] == [None] * 3
            pair = [SubBackend(backends[rank], (0, 2)) for rank in (0, 2)]
            results(run_ranks(pair, lambda backend: backend.barrier()))
            assert all(backend.group._arena is not None for backend in pair)


def test_memory_that_cannot_be_opened_costs_nothing_but_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(offer: Offer, size: int) -> Segment:
        raise TransportError("no")

    monkeypatch.setattr(Segment, "open", staticmethod(refuse))
    with tcp_group(3, CONFIG) as backends:
        results(run_ranks(backends, all_works))
        for backend in backends:
            assert set(streams_of(backend).values()) == {False}
            assert backend.group._arena is None


def test_memory_that_cannot_be_had_costs_nothing_but_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> Segment:
        raise TransportError("no")

    monkeypatch.setattr(Segment, "create", staticmethod(refuse))
    with tcp_group(2, CONFIG) as backends:
        results(run_ranks(backends, all_works))
        assert [backend.group._arena for backend in backends] == [None, None]


def test_a_arena_that_one_cannot_open_is_used_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(offer: Offer, size: int) -> Segment:
        raise TransportError("no")

    with tcp_group(3, CONFIG) as backends:
        monkeypatch.setattr(Segment, "open", staticmethod(refuse))
        results(run_ranks(backends, all_works))
        assert [backend.group._arena for backend in backends] == [None] * 3
        assert set(streams_of(backends[0]).values()) == {True}


def test_where_writes_are_not_ordered_there_are_streams_but_no_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_ORDERED", ())
    with tcp_group(3, CONFIG) as backends:
        results(run_ranks(backends, all_works))
        assert [backend.group._arena for backend in backends] == [None] * 3
        assert set(streams_of(backends[0]).values()) == {True}


def test_other_machines_are_spoken_to_over_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    # A rank is a thread here: let each be a machine.
    monkeypatch.setattr(machine, "_machine_id", lambda: threading.get_ident().to_bytes(16, "little"))
    monkeypatch.setattr(Segment, "create", lambda size: pytest.fail("memory was made for nobody"))
    with tcp_group(2, CONFIG) as backends:
        monkeypatch.undo()
        assert backends[0].group.hosts == (0, 1)
        results(run_ranks(backends, all_works))
