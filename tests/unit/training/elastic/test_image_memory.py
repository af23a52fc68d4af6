"""Memory for images is ready before it is needed, is used again, and is given back after a while."""

from __future__ import annotations

import tracemalloc

import numpy as np

from ringfort.training.elastic.image_memory import ImageMemory
from ringfort.training.elastic.state_tree import StateTree

SIZE = 1 << 20


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_images_are_made_in_the_memory_that_was_reserved() -> None:
    memory = ImageMemory()
    memory.reserve(SIZE, 2)
    tracemalloc.start()
    try:
        first, second = memory.take(SIZE), memory.take(SIZE)
        assert tracemalloc.get_traced_memory()[0] < SIZE
        third = memory.take(SIZE)
        assert tracemalloc.get_traced_memory()[0] >= SIZE
    finally:
        tracemalloc.stop()
    assert len({address(array) for array in (first, second, third)}) == 3


def test_a_reservation_takes_nothing_that_an_image_has() -> None:
    memory = ImageMemory()
    image = memory.take(SIZE)
    image.fill(7)
    memory.reserve(SIZE, 2)
    assert (image == 7).all()


def test_memory_that_was_not_needed_for_a_minute_is_given_back_but_for_what_somebody_has() -> None:
    now = [0.0]
    tracemalloc.start()
    try:
        memory = ImageMemory(lambda: now[0])
        memory.reserve(SIZE, 2)
        image = memory.take(SIZE)
        now[0] = 59.0
        memory.trim()
        assert tracemalloc.get_traced_memory()[0] >= 2 * SIZE
        now[0] = 61.0
        memory.trim()
        assert SIZE <= tracemalloc.get_traced_memory()[0] < 2 * SIZE
        del image
        memory.trim()
        assert tracemalloc.get_traced_memory()[0] < SIZE
    finally:
        tracemalloc.stop()


def test_the_gaps_between_the_arrays_of_an_image_are_zeros_whatever_was_there_before() -> None:
    """Otherwise equal states would have images with other hashes."""
    state = StateTree({"a": np.full(70001, 1, np.uint8), "b": 3, "c": np.full(3, 1, np.uint8)})
    expected = state.image().data.copy()
    memory = state.memory.take(expected.nbytes)
    memory.fill(255)
    del memory
    image = state.image()
    assert np.array_equal(image.data, expected)
    assert int(image.data.sum(dtype=np.int64)) == 70004
