"""The memory of a run, in numbers: the formula against what is allocated."""

from __future__ import annotations

import numpy as np
import pytest

from ringfort.training.elastic.donor import HISTORY_BYTES
from ringfort.training.elastic.exchange import Exchange
from ringfort.training.elastic.local_sum import Gradient, Layout, LocalSum
from ringfort.training.elastic.memory_needs import MemoryNeeds
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


@pytest.mark.parametrize(("elements", "history"), [(1000, HISTORY_BYTES), (10**9, 4 * 4 * 10**9)])
def test_the_history_has_a_limit_or_four_results_of_a_large_model(elements: int, history: int) -> None:
    layout = Layout((Gradient("gradients['w']", "float32", (elements,)),), {"w": None})
    assert MemoryNeeds.of(layout, 100).joining == 100 + history


def test_it_is_said_in_one_line() -> None:
    assert str(MemoryNeeds(64_000_000, 192_000_000, 1 << 30)) == (
        "Memory beside the program's own: 448 MB always (4 x 64 MB of gradients, and up to 192 MB of recent results); "
        "while a machine joins up to 1.27 GB (the state of 192 MB and recent results); 192 MB while a checkpoint is "
        "written"
    )
