"""The memory of a run, in numbers: the formula against what is allocated."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from ringfort.cluster.core.peer_messages import Epoch, Member
from ringfort.training.elastic.donor import HISTORY_BYTES, HISTORY_MOST, Donor
from ringfort.training.elastic.exchange import Exchange
from ringfort.training.elastic.local_sum import Gradient, Layout, LocalSum
from ringfort.training.elastic.memory_needs import MemoryNeeds
from ringfort.training.elastic.protocol import Mark, Result
from ringfort.training.elastic.state_tree import Image, Manifest
from ringfort.training.elastic.token_codec import TokenCodec
from tests.unit.training.elastic.test_exchange import ALONE

GRADIENTS = {"w": np.ones((1000, 30), np.float32), "b": np.ones(500, np.float16), "scale": np.ones(7)}


def nbytes(arrays: dict[str, np.ndarray]) -> int:
    return sum(array.nbytes for name, array in arrays.items() if name != "sums")


def test_the_formula_is_what_sums_results_and_the_mean_take() -> None:
    local = LocalSum()
    local.add(GRADIENTS, 2.0)
    assert local.layout is not None
    needs = MemoryNeeds.of(local.layout, 10)
    assert needs.gradients == 4 * 30_500 + 8 * 7
    exchange = Exchange(local, TokenCodec(1))
    last = exchange.reduce(ALONE)
    places, means = set[int](), set[int]()
    for _ in range(5):  # the last result is in use until the next one is sealed
        last = exchange.reduce(ALONE)
        places.add(last["float32"].ctypes.data)
        means.add(local.mean(last, 2.0)["w"].ctypes.data)
    copies = 1 + len(places) + len(means)
    assert copies * needs.gradients == needs.always - needs.recent


@pytest.mark.parametrize(
    ("elements", "history"), [(10**6, HISTORY_BYTES), (10**9, 4 * 4 * 10**9), (1000, HISTORY_MOST * (4000 + 2048))]
)
def test_the_history_has_a_limit_or_four_results_of_a_large_model(elements: int, history: int) -> None:
    layout = Layout((Gradient("gradients['w']", "float32", (elements,)),), {"w": None})
    assert MemoryNeeds.of(layout, 100).history == history


def test_the_history_of_small_results_takes_no_more_than_the_formula_says() -> None:
    donor = Donor(lambda: None)
    donor.offer(Image(Manifest((), 0), np.empty(0, np.uint8)), Mark("l@1", 0), Epoch(1, "a", (Member("a"),), ()))
    layout = Layout((Gradient("gradients['w']", "float64", (4,)),), {"w": None})
    before = Mark("l@1", 0)
    tracemalloc.start()
    try:
        for step in range(1, HISTORY_MOST + 100):
            result = Result("l@1", step, step, {"float64": np.ones(4), "sums": np.ones(2)})
            donor.sealed(before, result, step)
            before = before.after(result, step)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0 < taken <= MemoryNeeds.of(layout, 0).history


def test_it_is_said_in_one_line() -> None:
    assert str(MemoryNeeds(64_000_000, 192_000_000, 1 << 30)) == (
        "Memory beside the program's own: 448 MB always (4 x 64 MB of gradients, and up to 192 MB of recent results); "
        "while a machine joins 192 MB for a copy of the state, and 64 MB for each step that it has to catch up on, at "
        "most 1.07 GB; 192 MB while a checkpoint is written"
    )
