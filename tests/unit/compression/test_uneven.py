"""Shares of a compressed reduction by the speed of links: never slower than equal ones, and the sum of all ranks."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ringfort import Backend, DistributedConfig, DistributedContext
from ringfort.backends.group import Group
from ringfort.collectives import algorithms
from ringfort.compression.uneven import PAYS, Shares, _seconds, shares
from ringfort.testing.groups import tcp_group
from ringfort.testing.ranks import results, run_ranks
from ringfort.transport.machine import Machine

SPEEDS = st.integers(1, 10**12)
LINKS = st.lists(st.tuples(SPEEDS, SPEEDS), min_size=1, max_size=9)


def seconds(weights: tuple[int, ...], sends: list[int], receives: list[int]) -> Fraction:
    return _seconds([Fraction(weight, sum(weights)) for weight in weights], sends, receives)


@given(LINKS)
def test_unequal_shares_are_clearly_faster_and_a_slower_link_never_owns_more(links: list[tuple[int, int]]) -> None:
    sends, receives = [out for out, _ in links], [into for _, into in links]
    found = shares(sends, receives)
    if found.weights:
        assert len(links) > 2
        assert min(found.weights) >= 0
        assert seconds(found.weights, sends, receives) < PAYS * seconds((1,) * len(links), sends, receives)
        for (slower, less), (faster, more) in pairwise(sorted(zip(sends, found.weights, strict=True))):
            assert less <= more
            assert less < more or slower == faster or slower >= len(links) * min(sends)


@given(st.integers(3, 9), SPEEDS, SPEEDS)
def test_links_that_are_alike_own_the_same(n: int, out: int, into: int) -> None:
    assert shares([out] * n, [into] * n) == Shares()


@given(st.lists(st.integers(0, 1000), min_size=3, max_size=9), st.integers(0, 100_000))
def test_spans_follow_each_other_and_are_as_long_as_their_shares(weights: list[int], count: int) -> None:
    total = sum(weights)
    spans = Shares(tuple(weights) if total else ()).split(count, len(weights))
    assert [start for start, _ in spans] + [count] == [0] + [stop for _, stop in spans]
    for weight, (start, stop) in zip(weights, spans, strict=True):
        share = weight / total if total else 1 / len(weights)
        assert abs(stop - start - count * share) < 1


def test_equal_shares_are_cut_as_everywhere() -> None:
    assert Shares().split(10, 4) == algorithms.split(10, 4)


@pytest.mark.parametrize(
    ("sends", "receives", "weights"),
    [
        ([10, 100, 100, 100], [100] * 4, (0, 30, 30, 30)),  # a slow uplink owns nothing
        ([10, 100], [100, 100], ()),  # two: each sends half and gets half, whoever owns what
        ([10, 100, 100, 100], [10, 100, 100, 100], ()),  # as slow the other way: the sums would take longer
        ([0, 100, 100, 100], [100] * 4, ()),  # not measured
        ([100, 100, 90, 100], [100] * 4, ()),  # hardly slower
    ],
)
def test_who_owns_what(sends: list[int], receives: list[int], weights: tuple[int, ...]) -> None:
    assert shares(sends, receives).weights == weights


def test_the_sum_is_the_same_whoever_owns_it_and_the_slow_rank_sends_less() -> None:
    def work(backend: Backend) -> tuple[bytes, Any]:
        rank, n = backend.rank, backend.world_size
        known = {peer: 1e6 if rank == 1 else 1e8 for peer in range(n) if peer != rank}
        machines = {peer: Machine(b"%d" % peer) for peer in range(n)}
        group = Group(rank, backend.config, [backend.group.engine], machines, speeds_out=known, is_measured=True)
        backend.__dict__["_group"] = group
        ctx = DistributedContext(backend)
        before = backend.traffic().bytes_sent
        total = ctx.all_reduce(np.arange(40_000, dtype=np.float32) * (rank + 1), compression="int8")
        assert group.part(Shares).weights == (3_000_000, 0, 3_000_000, 3_000_000)
        return total.tobytes(), (total, backend.traffic().bytes_sent - before)

    with tcp_group(4, DistributedConfig(timeout=30, shared_memory="off")) as backends:
        found = results(run_ranks(backends, work))
    assert len({data for data, _ in found}) == 1
    totals, sent = zip(*(more for _, more in found), strict=True)
    assert np.allclose(totals[0], np.arange(40_000) * 10, atol=0.02 * 400_000)
    assert sent[1] < 0.72 * sent[0]
