"""`LocalSum`: sums as NumPy would make them, the tree that was added comes back, and a wrong tree is named."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ringfort.errors import GradientLayoutError, InvalidArgumentError, UnsupportedArrayError
from ringfort.training.elastic.local_sum import Gradient, Layout, LocalSum, is_finite

RANDOM = np.random.default_rng(3)


def tree(kind: str = "float32") -> dict[str, Any]:
    return {
        "w": RANDOM.standard_normal((3, 4)).astype(kind),
        "layers": [{"b": RANDOM.standard_normal(5).astype(kind)}, {"b": RANDOM.standard_normal((2, 1)).astype(kind)}],
        3: (RANDOM.standard_normal(()).astype(kind),),
    }


def summed(*parts: tuple[Any, float]) -> LocalSum:
    local = LocalSum()
    for gradients, count in parts:
        local.add(gradients, count)
    return local


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_the_mean_is_that_of_numpy_weighted_by_samples(kind: str) -> None:
    parts = [(tree(kind), 4), (tree(kind), 1), (tree(kind), 2.5)]
    local = summed(*parts)
    assert local.count == 7.5
    mean = local.mean(local.buffers, local.count)
    expected = sum(count * part["w"].astype(np.float64) for part, count in parts) / 7.5
    assert mean["w"].dtype == kind
    np.testing.assert_allclose(mean["w"], expected, rtol=1e-5)
    np.testing.assert_allclose(
        mean["layers"][1]["b"], sum(count * part["layers"][1]["b"] for part, count in parts) / 7.5, rtol=1e-5
    )


def test_one_micro_batch_comes_back_bit_by_bit() -> None:
    given = tree()
    local = summed((given, 1))
    mean = local.mean(local.buffers, 1)
    assert list(mean) == ["w", "layers", 3]
    assert type(mean["layers"]) is list
    assert type(mean[3]) is list  # it was a tuple
    assert mean[3][0].shape == ()
    assert np.array_equal(mean["w"], given["w"])
    assert np.array_equal(mean["layers"][0]["b"], given["layers"][0]["b"])


@pytest.mark.parametrize(
    "given",
    [
        np.ones(3, np.float32),
        [np.ones(3, np.float32)],
        {0: np.ones(1, np.float32), 1: np.ones(2, np.float32)},
        {"none": {}, "w": np.ones(2, np.float32), "empty": []},
        {"w": np.ones((0, 4), np.float32), "v": np.ones(1)},
        [[np.ones((2, 2), np.float32).T], np.ones((4, 6), np.float32)[:, ::2]],
    ],
    ids=str,
)
def test_the_tree_comes_back_as_it_was(given: Any) -> None:
    local = summed((given, 2))
    mean = local.mean(local.buffers, 2)
    np.testing.assert_equal(mean, given)
    assert type(mean) is type(given)


@pytest.mark.parametrize("count", [1, 2])
def test_a_mean_cannot_be_written(count: int) -> None:
    local = summed((tree(), count))
    before = local.buffers["float32"].copy()
    mean = local.mean(local.buffers, local.count)
    with pytest.raises(ValueError, match="read-only"):
        mean["w"] *= 2
    assert np.array_equal(local.buffers["float32"], before)


def test_a_mean_stays_as_it_is_as_long_as_the_program_has_it() -> None:
    local, means = LocalSum(), list[Any]()
    for number in range(5):
        local.begin()
        local.add({"w": np.full(100_000, number, np.float32)}, 3)
        means.append(local.mean(local.buffers, local.count)["w"])
    assert [float(mean[0]) for mean in means] == [float(mean[-1]) for mean in means] == [0, 1, 2, 3, 4]


def test_gradients_are_weighted_in_the_unit_of_the_step() -> None:
    local = LocalSum()
    assert local.add({"w": np.full(3, 8, np.float32)}, 2, unit=4) == 0.5
    assert local.add({"w": np.full(3, 4, np.float32)}, 2, unit=4) == 0.5
    assert local.count == 1
    assert np.array_equal(local.mean(local.buffers, local.count)["w"], np.full(3, 6))


@pytest.mark.parametrize("count", [1, 2.5])
def test_large_gradients_are_added_up_whole(count: float) -> None:
    values = np.arange(200_001, dtype=np.float32) % 1000
    local = summed(({"w": values}, count), ({"w": 2 * values}, count))
    assert np.array_equal(local.buffers["float32"], 3 * count * values)


@pytest.mark.parametrize(
    "other",
    [
        {"w": np.ones((3, 2), np.float32).T},
        {"w": np.ones((2, 6), np.float32)[:, ::2]},
        {"w": ((1.0, 1.0, 1.0), (1.0, 1.0, 1.0))},
    ],
    ids=["transposed", "strided", "tuples"],
)
def test_only_arrays_of_the_same_layout_are_added(other: Any) -> None:
    local = summed(({"w": np.ones((2, 3), np.float32)}, 1))
    if isinstance(other["w"], tuple):
        with pytest.raises(UnsupportedArrayError):
            local.add(other, 1)
    else:
        local.add(other, 1)
        assert np.array_equal(local.buffers["float32"], np.full(6, 2))


def test_float16_is_added_up_in_float32() -> None:
    small = {"w": np.full(8, 0.001, np.float16)}
    large = {"w": np.full(8, 2048, np.float16)}
    local = summed((large, 1), *[(small, 1)] * 2000)
    assert list(local.buffers) == ["float32"]
    # In float16, each of the small ones would be rounded away.
    np.testing.assert_allclose(local.buffers["float32"], 2048 + 2000 * np.float64(np.float16(0.001)), rtol=1e-4)
    mean = local.mean(local.buffers, local.count)
    assert mean["w"].dtype == np.float16
    # A sum that float16 cannot hold is no infinity.
    assert is_finite(summed(({"w": np.full(8, 60000, np.float16)}, 64)).buffers)


@pytest.mark.parametrize("first", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("second", ["float16", "bfloat16", "float32", "float64"])
def test_gradients_of_another_element_type_than_before_are_refused(first: str, second: str) -> None:
    local = summed(({"w": np.ones(3, np.dtype(first))}, 1))
    if first == second:
        local.add({"w": np.ones(3, np.dtype(second))}, 1)
    else:
        with pytest.raises(GradientLayoutError, match=second):
            local.add({"w": np.ones(3, np.dtype(second))}, 1)


def test_bfloat16_is_added_up_and_returned_as_float32() -> None:
    values = np.array([1.5, -2, 3e38, 1e-30], ml_dtypes.bfloat16)
    local = summed(({"w": values}, 1))
    mean = local.mean(local.buffers, 1)
    assert mean["w"].dtype == np.float32
    assert np.array_equal(mean["w"], values.astype(np.float32))


def test_element_types_have_a_buffer_each() -> None:
    given = {"a": np.ones(2, np.float64), "b": np.ones(3, np.float32), "c": np.full(4, 2, np.float16)}
    local = summed((given, 1), (given, 1))
    assert {kind: buffer.size for kind, buffer in local.buffers.items()} == {"float32": 7, "float64": 2}
    assert list(local.buffers) == ["float32", "float64"]
    np.testing.assert_equal(local.mean(local.buffers, 2), given)


def test_an_empty_turn_takes_the_layout_of_the_others_and_adds_zeros() -> None:
    busy, idle = summed((tree(), 4)), LocalSum()
    assert busy.layout is not None
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(busy.layout), type=Layout)
    idle.prepare(told)
    assert (idle.count, idle.layout) == (0, busy.layout)
    sums = {kind: buffer + idle.buffers[kind] for kind, buffer in busy.buffers.items()}
    np.testing.assert_equal(idle.mean(sums, 4), busy.mean(busy.buffers, 4))


def test_another_step_begins_with_nothing_and_keeps_the_layout() -> None:
    local = summed((tree(), 4))
    layout = local.layout
    local.clear()
    assert (local.count, local.layout) == (0, layout)
    assert not any(buffer.any() for buffer in local.buffers.values())
    given = tree()
    local.add(given, 1)
    np.testing.assert_equal(local.mean(local.buffers, 1)["w"], given["w"])


def test_infinities_are_found_without_a_warning() -> None:
    local = summed(({"w": np.array([np.inf, 1], np.float16)}, 2), ({"w": np.array([-np.inf, 1], np.float16)}, 2))
    assert not is_finite(local.buffers)
    local.mean(local.buffers, 4)
    assert is_finite(summed((tree(), 1)).buffers)
    assert not is_finite({"float32": np.zeros(3, np.float32), "float64": np.array([np.nan])})


# --- wrong trees ------------------------------------------------------------------------------------------------------

W, B = np.ones((2, 3), np.float32), np.ones(4, np.float32)


@pytest.mark.parametrize(
    ("other", "leaf", "ours", "theirs"),
    [
        ({"w": W.T, "b": [B]}, "gradients['w']", "float32(3, 2)", "float32(2, 3)"),
        ({"w": W, "b": [B.astype(np.float64)]}, "gradients['b'][0]", "float64(4,)", "float32(4,)"),
        ({"w": W}, "gradients['b'][0]", "missing", "float32(4,)"),
        ({"w": W, "b": [B, B]}, "gradients['b'][1]", "float32(4,)", "missing"),
        ({"b": [B], "w": W}, "gradients['b'][0]", "number 0", "number 1"),
        (
            {"w": W, "b": {0: B}},
            "gradients",
            "the tree {'w': None, 'b': {0: None}}",
            "the tree {'w': None, 'b': [None]}",
        ),
    ],
)
def test_a_tree_that_differs_is_an_error_that_names_the_leaf(other: Any, leaf: str, ours: str, theirs: str) -> None:
    local = summed(({"w": W, "b": [B]}, 2))
    before = {kind: buffer.copy() for kind, buffer in local.buffers.items()}
    with pytest.raises(GradientLayoutError) as raised:
        local.add(other, 2)
    assert (raised.value.leaf, raised.value.ours, raised.value.theirs) == (leaf, ours, theirs)
    assert str(raised.value).startswith(f"{leaf} is {ours} here and {theirs} in the run; every micro-batch must give")
    assert "start the same program everywhere" in str(raised.value)
    np.testing.assert_equal(local.buffers, before)
    assert local.count == 2


def test_the_layout_of_another_member_is_compared_with_ones_own() -> None:
    local, other = summed(({"w": W}, 1)), summed(({"w": B}, 1))
    assert local.layout is not None
    local.prepare(local.layout)
    assert other.layout is not None
    with pytest.raises(GradientLayoutError, match=r"gradients\['w'\] is float32\(2, 3\) here and float32\(4,\) in"):
        local.prepare(other.layout)


@pytest.mark.parametrize("count", [-1, True, float("nan"), float("inf"), 10**400, "2", None])
def test_an_invalid_number_of_samples_is_refused(count: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="number of samples"):
        LocalSum().add({"w": W}, count)


def test_counts_may_be_numbers_of_numpy() -> None:
    assert summed(({"w": W}, np.int64(3)), ({"w": W}, np.float32(0.5))).count == 3.5


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"w": np.ones(3, np.int32)}, r"gradients\['w'\]='int32': must be one of float16"),
        ({"w": {("a", 1): W}}, "keys must be strings"),
        ({np.int64(1): W}, "keys must be strings"),
        ({}, "at least one array"),
        ([[], {}], "at least one array"),
    ],
)
def test_what_cannot_be_added_is_named(given: Any, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        LocalSum().add(given, 1)


@pytest.mark.parametrize("leaf", [None, 3.0, "w", np.float32(2)])
def test_a_leaf_that_is_not_an_array_is_named(leaf: Any) -> None:
    with pytest.raises(UnsupportedArrayError, match=r"gradients\['w'\]\[0\]"):
        LocalSum().add({"w": [leaf]}, 1)


@pytest.mark.parametrize(
    "told",
    [
        {"gradients": [], "tree": None},
        {"gradients": [{"path": "g", "kind": "float32", "shape": [2]}], "tree": [None, None]},
        {"gradients": [{"path": "g", "kind": "int8", "shape": [2]}], "tree": None},
        {"gradients": [{"path": "g", "kind": "float32", "shape": [-2]}], "tree": None},
    ],
)
def test_a_layout_from_the_network_that_cannot_be_is_refused(told: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=Layout)


def test_a_layout_tells_how_much_memory_it_needs() -> None:
    local = summed(({"w": W, "h": np.ones(5, np.float16), "d": np.ones(2)}, 1))
    assert local.layout is not None
    assert local.layout.sizes == {"float32": 11, "float64": 2}


def test_the_first_micro_batch_after_begin_overwrites_the_sums() -> None:
    local = LocalSum()
    local.add({"w": np.full(3, 5.0, np.float32)}, 2)
    local.begin()
    local.add({"w": np.full(3, np.float32(1.5))}, 4)
    local.add({"w": np.ones(3, np.float32)}, 1)
    assert local.count == 5
    np.testing.assert_array_equal(local.buffers["float32"], np.full(3, 7.0))
    local.begin()
    local.clear()
    local.add({"w": np.ones(3, np.float32)}, 1)
    np.testing.assert_array_equal(local.buffers["float32"], np.ones(3))


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.sampled_from(["float32", "float64"]), st.integers(0, 300)), min_size=1), st.integers(0, 400)
)
def test_buckets_cover_every_element_once_from_the_end_and_name_the_gradients_in_them(
    leaves: list[tuple[Any, int]], nbytes: int
) -> None:
    gradients = tuple(Gradient(f"{place}", kind, (size,)) for place, (kind, size) in enumerate(leaves))
    layout = Layout(gradients, {one.path: None for one in gradients}, nbytes)
    for kind, total in layout.sizes.items():
        places = [place for place, one in enumerate(gradients) if one.kind == kind]
        ends = np.cumsum([gradients[place].size for place in places])
        buckets, end = [bucket for bucket in layout.buckets() if bucket.kind == kind], total
        least = nbytes // np.dtype(kind).itemsize or max(total, 1)
        for bucket in buckets:
            assert bucket.end == end
            assert bucket.end - bucket.begin < 3 * least
            assert bucket.end - bucket.begin >= least or len(buckets) == 1
            inside = {
                place
                for place, last in zip(places, ends, strict=True)
                if last > bucket.begin and last - gradients[place].size < bucket.end and gradients[place].size
            }
            assert {place for place in bucket.places if gradients[place].size} == inside
            assert len(set(bucket.places)) == len(bucket.places)
            end = bucket.begin
        assert end == 0
        assert {place for bucket in buckets for place in bucket.places} == set(places)  # empty ones too
