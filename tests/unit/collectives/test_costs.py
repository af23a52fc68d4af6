"""What is made of what the ranks measured, and that all ranks of a group make the same of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfort import Backend, DistributedConfig
from ringfort.collectives import auto, costs
from ringfort.collectives.costs import LinkCosts, combine, distances
from ringfort.config import AllReduceStrategy, CollectiveConfig
from ringfort.testing.groups import tcp_group
from ringfort.testing.ranks import results, run_ranks

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
    assert found.fold == FOLDS


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
    assert (found.per_byte == 1 / costs.BANDWIDTH).all()
    assert (found.with_known(None, 4.0).per_byte == 0.25).all()


def test_every_rank_of_a_group_ends_with_the_same_table_and_the_same_choices() -> None:
    def work(backend: Backend) -> tuple[bytes, bytes, list[str]]:
        model = auto.model_of(backend, backend.envelope(bytes(16)))
        assert model is auto.model_of(backend)
        choices = [str(model.choose(AllReduceStrategy, 1 << bit)) for bit in range(28)]
        return model.links.latency.tobytes(), model.links.per_byte.tobytes(), choices

    with tcp_group(3, DistributedConfig(timeout=30, shared_memory="off")) as backends:
        assert all(auto.needs_measuring(backend) for backend in backends)
        found = results(run_ranks(backends, work))
    assert found[0] == found[1] == found[2]


def test_nothing_is_measured_where_both_figures_are_given() -> None:
    config = DistributedConfig(collective=CollectiveConfig(latency=1e-3, bandwidth=1e6))
    with tcp_group(2, config) as backends:
        assert not auto.needs_measuring(backends[0])
        links = auto.model_of(backends[0]).links
        assert float(links.latency[0, 1]) == 1e-3
        assert backends[0].traffic().messages_sent == 0
