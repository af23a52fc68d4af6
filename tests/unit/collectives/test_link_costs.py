"""What is made of what the ranks measured, and that all ranks of a group make the same of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ringfort import Backend, DistributedConfig, DistributedContext, SimulatedBackend
from ringfort.backends.group import Group
from ringfort.collectives import cost_model, link_costs
from ringfort.collectives.link_costs import LinkCosts, combine, distances
from ringfort.compression import auto as compression
from ringfort.config import AllReduceStrategy, CollectiveConfig
from ringfort.errors import CollectiveMismatchError, DistributedError
from ringfort.testing.groups import closing_all, tcp_group
from ringfort.testing.ranks import results, run_ranks
from ringfort.transport.machine import Machine
from ringfort.transport.messages import Envelope

FOLDS = (1e-10, 1e-9, 5e-9)


def table_of(
    hosts: tuple[int, ...], *, near: float = 1.0, far: float = 10.0, cores: int = 64
) -> np.ndarray[tuple[int, int], np.dtype]:
    """What ranks on `hosts` would measure without any noise: seconds of a link inside a host and between hosts."""
    n = len(hosts)
    rows: list[list[float]] = []
    for rank in range(n):
        row: list[float] = []
        for distance in distances(hosts):
            cost = near if hosts[rank] == hosts[(rank - distance) % n] else far
            row += cost, cost / 1000
        rows.append([*row, 0.5 * n if rank == 0 else 0.0, near + 0.25 * (n - 2), cores, *FOLDS])
    return np.array(rows)


def test_links_inside_a_host_and_between_hosts_keep_their_own_costs() -> None:
    hosts = (0, 0, 2, 2)
    found = combine(table_of(hosts), hosts)
    for a in range(4):
        for b in range(4):
            if a != b:
                cost = 1.0 if hosts[a] == hosts[b] else 10.0
                assert found.latency[a, b] == pytest.approx(cost)
                assert found.per_byte[a, b] == pytest.approx(cost / 1000)
    assert found.reducer == FOLDS


def test_one_way_that_was_disturbed_does_not_make_a_slow_link() -> None:
    hosts = (0, 1, 2, 3)
    table = table_of(hosts)
    table[2, 0] = 500.0  # from rank 1, at distance 1; the way back, at distance 3, was not disturbed
    found = combine(table, hosts)
    assert np.ptp(found.latency[~np.eye(4, dtype=bool)]) == pytest.approx(0)


def test_a_link_that_is_slow_both_ways_stays_so() -> None:
    hosts = (0, 1, 2, 3)
    table = table_of(hosts)
    table[2, 0] = table[1, 4] = 500.0
    found = combine(table, hosts)
    assert found.latency[1, 2] == found.latency[2, 1] == 500.0
    assert found.latency[0, 1] == 10.0


@given(st.lists(st.integers(0, 4), min_size=2, max_size=40), st.integers(0, 2**32))
def test_any_figures_make_costs_that_are_positive_and_the_same_each_way(places: list[int], seed: int) -> None:
    hosts = tuple(places.index(place) for place in places)
    n = len(hosts)
    table = np.random.default_rng(seed).uniform(1e-6, 1e-2, (n, 2 * len(distances(hosts)) + 6))
    found = combine(table, hosts)
    links = ~np.eye(n, dtype=bool)
    for figure in (found.latency, found.per_byte):
        assert (figure[links] > 0).all()
        np.testing.assert_array_equal(figure[links], figure.T[links])
    assert 0 < found.hop <= 1
    assert found.overhead > 0


@given(st.integers(2, 100))
def test_the_ranks_that_rings_and_halving_use_are_measured_and_never_very_many(n: int) -> None:
    away = distances(tuple(range(n)))
    assert {1, n - 1} <= set(away) <= set(range(1, n))
    assert len(away) <= max(8, 2 * n.bit_length())


def test_on_one_host_one_link_of_each_rank_stands_for_all() -> None:
    assert distances((0,) * 9) == [1]
    found = combine(table_of((0,) * 9), (0,) * 9)
    assert (found.latency[~np.eye(9, dtype=bool)] == 1.0).all()
    assert found.overhead == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("hosts", "cores", "crowd"),
    [((0,) * 8, 2, 4.0), ((0,) * 8, 8, 1.0), ((0, 0, 0, 3), 2, 1.5), ((0, 1, 2, 3), 1, 1.0), ((0, 0), 64, 1.0)],
)
def test_the_fullest_host_says_how_many_ranks_share_a_core(hosts: tuple[int, ...], cores: int, crowd: float) -> None:
    assert combine(table_of(hosts, cores=cores), hosts).crowd == crowd


def test_what_a_person_has_said_is_taken_in_place_of_what_was_measured() -> None:
    found = LinkCosts.even(3).with_known(0.5, None)
    assert (found.latency == 0.5).all()
    assert (found.per_byte == 1 / link_costs.BANDWIDTH).all()
    assert (found.with_known(None, 4.0).per_byte == 0.25).all()


def test_every_rank_of_a_group_ends_with_the_same_table_and_the_same_choices() -> None:
    def work(backend: Backend) -> tuple[bytes, bytes, list[str]]:
        model = cost_model.model_of(backend.group)
        assert model is cost_model.model_of(backend.group)
        choices = [str(model.choose(AllReduceStrategy, 1 << bit)) for bit in range(28)]
        return model.links.latency.tobytes(), model.links.per_byte.tobytes(), choices

    with tcp_group(3, DistributedConfig(timeout=30, shared_memory="off")) as backends:
        assert all(cost_model.needs_measuring(backend.group) for backend in backends)
        found = results(run_ranks(backends, work))
    assert found[0] == found[1] == found[2]


def test_nothing_is_measured_where_both_figures_are_given() -> None:
    config = DistributedConfig(collective=CollectiveConfig(latency=1e-3, bandwidth=1e6))
    with tcp_group(2, config) as backends:
        assert not cost_model.needs_measuring(backends[0].group)
        links = cost_model.model_of(backends[0].group).links
        assert float(links.latency[0, 1]) == 1e-3
        assert backends[0].traffic().messages_sent == 0


def test_a_group_that_was_made_in_haste_measures_its_links_when_it_is_told_to() -> None:
    def work(backend: Backend) -> tuple[list[int], bytes]:
        backend.group.is_measured = False  # as one of an epoch is made
        context, messages = DistributedContext(backend), list[int]()
        for turn in range(3):
            if turn == 1:
                backend.group.measure_links()
            before = backend.traffic().messages_sent
            assert (context.all_reduce(np.ones(1000, np.float32)) == 3).all()
            messages.append(backend.traffic().messages_sent - before)
        return messages, cost_model.model_of(backend.group).links.per_byte.tobytes()

    with tcp_group(3, DistributedConfig(timeout=30, shared_memory="off")) as backends:
        found = results(run_ranks(backends, work))
    for (first, second, third), links in found:
        assert second > 2 * max(first, third)  # in the second all-reduce they measure
        assert links == found[0][1] != LinkCosts.even(3).per_byte.tobytes()


# --- what was known before --------------------------------------------------------------------------------------------


def test_of_a_link_both_ends_know_the_slower_figure_counts_and_nothing_stands_for_unknown() -> None:
    table = np.array([[0.0, 5.0, 0.0], [3.0, 0.0, 0.0], [7.0, 0.0, 0.0]])
    assert link_costs.agree_on(table).tolist() == [[0, 3, 7], [3, 0, 0], [7, 0, 0]]


def test_ranks_of_one_host_share_its_wire_and_only_slow_links_are_taken_as_known() -> None:
    speeds = np.full((4, 4), 10e6)
    assert link_costs.shared_per_byte(speeds, (0, 0, 2, 2), 2).tolist() == [2e-7] * 4
    assert link_costs.shared_per_byte(speeds, (0, 0, 2, 2), 1).tolist() == [1e-7, 0.0, 1e-7, 0.0]
    assert not link_costs.shared_per_byte(np.full((4, 4), 10 * link_costs.SLOW), (0, 1, 2, 3), 1).any()
    assert not link_costs.shared_per_byte(np.zeros((4, 4)), (0, 1, 2, 3), 1).any()


def elsewhere(backend: Backend, bandwidth: float) -> Group:
    """The same ranks, as if they were hosts that have measured their links."""
    rank, n = backend.rank, backend.world_size
    machines = {peer: Machine(b"%d" % peer) for peer in range(n)}
    known = {peer: bandwidth * (1 + rank) for peer in range(n) if peer != rank}
    return Group(rank, backend.config, [backend.group.engine], machines, bandwidths=known, is_measured=True)


def test_a_link_that_was_measured_before_is_not_kept_busy_again() -> None:
    def work(backend: Backend) -> tuple[bytes, float]:
        group = elsewhere(backend, 10e6)
        links = cost_model.model_of(group).links
        table = compression.table_of(group)
        assert table.per_byte == pytest.approx(1e-7)
        return links.per_byte.tobytes(), float(links.per_byte[0, 1])

    with tcp_group(3, DistributedConfig(timeout=30, shared_memory="off")) as backends:
        found = results(run_ranks(backends, work))
        sent = [backend.traffic().bytes_sent for backend in backends]
    assert found[0] == found[1] == found[2]
    assert found[0][1] == pytest.approx(1e-7)
    assert max(sent) < 64 << 10


def test_a_probe_is_never_taken_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that measures and one that does not find out at the first message, and no sum is wrong."""

    def work(backend: Backend) -> object:
        if backend.rank == 1:  # as if it had a model of another group's links
            monkeypatch.setattr(backend.group, "is_measured", False)
        x = np.ones(1000, np.float32)
        try:
            return DistributedContext(backend).all_reduce(x)
        except CollectiveMismatchError as exc:
            return str(exc)

    with tcp_group(2, DistributedConfig(timeout=30, shared_memory="off")) as backends:
        found = results(run_ranks(backends, work))
    assert all(
        isinstance(words, str) and "measuring the links first" in words and "all_reduce(" in words for words in found
    )


def test_probes_have_a_communicator_id_of_their_own() -> None:
    ids: set[int] = set()
    with closing_all(SimulatedBackend.create_group(1)) as (backend,):
        for comm_id in range(100):
            with link_costs.probing(backend.group, Envelope(comm_id, 1)) as probes:
                ids.add(probes.comm_id)
    assert len(ids) == 100
    assert not ids & set(range(100))


def test_what_ends_the_probes_of_one_rank_ends_the_collective_of_those_who_wait_for_it() -> None:
    """A rank that times out among the probes tells the ranks that are done with them already."""

    def work(backend: Backend) -> str:
        envelope = backend.group.envelope(bytes(16), 0.3 if backend.rank == 0 else 30)
        try:
            if backend.rank == 0:
                with link_costs.probing(backend.group, envelope) as probes:
                    backend.group.recv(bytearray(8), 1, probes)
            else:
                backend.group.recv(bytearray(8), 0, envelope)
        except DistributedError as exc:
            return type(exc).__name__
        return "nothing"

    with tcp_group(2, DistributedConfig(timeout=30, shared_memory="off")) as backends:
        assert results(run_ranks(backends, work)) == ["OperationTimeoutError", "AbortedError"]
