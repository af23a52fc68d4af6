"""Values as bytes and back."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from ringfort.errors import InvalidMessageError
from ringfort.rpc import values
from ringfort.rpc.protocol import Reference

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


def there_and_back(value: Any, kind: Any = Any) -> Any:
    encoded = values.Encoded(value, lambda _: None)
    return values.decode([memoryview(bytearray(data)) for data in encoded.buffers], [], kind=kind)


@given(plain)
def test_plain_values_come_back(value: Any) -> None:
    assert there_and_back(value) == value


@given(
    st.lists(
        hnp.arrays(
            st.sampled_from(["bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex64"]),
            hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=30),
        ),
        max_size=4,
    )
)
def test_arrays_come_back_and_can_be_written(arrays: list[Any]) -> None:
    back = there_and_back({"x": arrays})["x"]
    for before, after in zip(arrays, back, strict=True):
        assert before.dtype == after.dtype
        np.testing.assert_array_equal(before, after)
        assert after.flags.writeable


def test_a_large_array_is_not_copied() -> None:
    x = np.arange(10_000.0)
    encoded = values.Encoded([x, 1], lambda _: None)
    assert len(encoded.buffers) == 2
    assert np.shares_memory(np.frombuffer(encoded.buffers[1], np.uint8), x)
    memory = memoryview(bytearray(encoded.buffers[1]))
    (back, _) = values.decode([encoded.buffers[0], memory], [])
    assert np.shares_memory(back, np.frombuffer(memory, np.uint8))
    assert len(encoded.buffers[0]) < 100


def test_arrays_that_are_not_contiguous_come_back() -> None:
    x = np.arange(20_000.0).reshape(100, 200)[::2, ::3]
    np.testing.assert_array_equal(there_and_back(x), x)


def test_tensors_come_back_as_tensors() -> None:
    torch = pytest.importorskip("torch")
    for x in (torch.arange(3000.0), torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(3000, dtype=torch.bfloat16)):
        back = there_and_back([x])[0]
        assert isinstance(back, torch.Tensor)
        assert torch.equal(back, x)


def test_numpy_scalars_are_numbers() -> None:
    assert there_and_back([np.float32(1.5), np.int64(3)]) == [1.5, 3]


class Point(msgspec.Struct):
    x: int


@dataclass
class Pair:
    a: int
    b: list[float]


def test_structs_and_dataclasses_are_dicts_until_somebody_says_what_they_are() -> None:
    assert there_and_back([Point(1), Pair(2, [3.0])]) == [{"x": 1}, {"a": 2, "b": [3.0]}]
    assert there_and_back(Pair(2, [3.0]), Pair) == Pair(2, [3.0])


def test_references_are_named_in_order_and_come_back_as_what_was_taken() -> None:
    names = {"a": Reference(1, 2, 3), "b": Reference(1, 2, 4)}

    class Held:
        def __init__(self, key: str) -> None:
            self.key = key

    encoded = values.Encoded(
        [Held("b"), {"x": Held("a")}], lambda value: names[value.key] if isinstance(value, Held) else None
    )
    assert encoded.references == [names["b"], names["a"]]
    assert values.decode(encoded.buffers, ["B", "A"]) == ["B", {"x": "A"}]


@pytest.mark.parametrize("value", [object(), lambda: 1, {1j}, 2**70, np.array(["text"]), [[[object()]]]])
def test_what_cannot_be_sent_is_named(value: object) -> None:
    with pytest.raises(InvalidMessageError, match="sent"):
        values.Encoded(value, lambda _: None)


def test_deep_nesting_is_an_error_and_no_crash() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(InvalidMessageError):
        values.Encoded(value, lambda _: None)
    while value:
        value = value[0]
    with pytest.raises(InvalidMessageError):
        values.decode([b"\x91" * 100_000 + b"\xc0"], [])


@given(st.binary(max_size=200), st.lists(st.binary(max_size=40), max_size=2))
def test_strange_bytes_are_values_or_an_error(data: bytes, buffers: list[bytes]) -> None:
    with suppress(InvalidMessageError):
        values.decode([data, *buffers], [])


@given(st.integers(1, 4), st.binary(max_size=60), st.lists(st.binary(max_size=64), max_size=2))
def test_strange_extensions_are_values_or_an_error(code: int, body: bytes, buffers: list[bytes]) -> None:
    data = msgspec.msgpack.encode(msgspec.msgpack.Ext(code, body))
    with suppress(InvalidMessageError):
        values.decode([data, *buffers], [])
