"""Memory is used again when nobody has it, and not before."""

from __future__ import annotations

import gc
import subprocess
import sys

import numpy as np

from ringfort.training.elastic.spare_memory import SpareMemory

SIZE = 1 << 20


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_what_nobody_has_is_used_again() -> None:
    memory = SpareMemory()
    assert len({address(memory.take("float32", SIZE)) for _ in range(10)}) == 1


def test_what_somebody_has_is_not_used_be_it_a_view_a_part_or_a_buffer() -> None:
    memory = SpareMemory()
    holds = (
        lambda array: array,
        lambda array: array[5:6],
        lambda array: array.reshape(2, -1).T,
        memoryview,
        lambda array: {"float32": array},
        lambda array: array.view(np.uint8)[:0],
    )
    for hold in holds:
        array = memory.take("float32", SIZE)
        place, held = address(array), hold(array)
        del array
        assert all(address(memory.take("float32", SIZE)) != place for _ in range(20))
        del held


def test_two_that_are_used_in_turn_stay_two() -> None:
    memory, places = SpareMemory(), set[int]()
    before = memory.take("float32", SIZE)
    for _ in range(20):
        after = memory.take("float32", SIZE)
        places.add(address(after))
        before = after  # the one before is free now
    assert len(places) == 2
    assert before is after


def test_memory_that_was_in_use_for_a_while_is_given_back() -> None:
    memory = SpareMemory()
    many = [memory.take("float32", SIZE) for _ in range(30)]
    many.clear()
    gc.collect()
    for _ in range(10):
        memory.take("float32", SIZE)
    assert len(memory._arrays) <= 8


def test_another_size_or_kind_gets_other_memory() -> None:
    memory = SpareMemory()
    for kind, size in (("float32", SIZE), ("float64", SIZE), ("float32", SIZE + 1), ("float32", 3)):
        array = memory.take(kind, size)
        assert (array.dtype, array.size) == (np.dtype(kind), size)


def test_what_somebody_has_is_not_used_if_a_debugger_has_looked_on_for_a_while() -> None:
    # Before Python 3.13, whoever looks at the variables of a function makes a dict that holds them.
    program = """
import sys
def look(frame, event, argument):
    frame.f_locals
    return look
sys.settrace(look)
from ringfort.training.elastic.spare_memory import SpareMemory
memory = SpareMemory()
memory.take("float32", 1 << 20)
sys.settrace(None)
array = memory.take("float32", 1 << 20)
place, held = array.ctypes.data, array[5:6]
del array
assert all(memory.take("float32", 1 << 20).ctypes.data != place for _ in range(20))
sys.settrace(look)
assert all(memory.take("float32", 1 << 20).ctypes.data != place for _ in range(20))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
