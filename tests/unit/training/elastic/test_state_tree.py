"""`StateTree`: what is copied out comes back bit by bit, and a state of another kind is named and not written."""

from __future__ import annotations

import sys
from enum import IntEnum
from types import SimpleNamespace
from typing import Any, NamedTuple

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays

from ringfort.errors import InvalidArgumentError, UnsupportedArrayError
from ringfort.training.elastic.state_tree import BLOCK, Image, Manifest, StateTree, block_hash, hashed

KINDS = ["bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex64"]
ARRAYS = arrays.arrays(st.sampled_from([np.dtype(kind) for kind in KINDS]), arrays.array_shapes(min_dims=0, min_side=0))
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text())
KEYS = st.one_of(st.text(), st.integers())
NODES = st.recursive(
    st.one_of(ARRAYS, PLAIN),
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, max_size=4), st.lists(inner, max_size=4), st.lists(ARRAYS, max_size=3).map(tuple)
    ),
    max_leaves=12,
)
TREES = st.one_of(st.dictionaries(KEYS, NODES, max_size=4), st.lists(NODES, max_size=4))


def sent(image: Image) -> Image:
    """The image after a way over the network or the disk."""
    manifest = msgspec.msgpack.decode(msgspec.msgpack.encode(image.manifest), type=Manifest)
    return Image(manifest, np.frombuffer(image.data.tobytes(), np.uint8))


def blank(node: Any) -> Any:
    """A tree of the same kind with other values."""
    if isinstance(node, dict):
        return {key: blank(child) for key, child in node.items()}
    if isinstance(node, (list, tuple)):
        return type(node)(blank(child) for child in node)
    return np.zeros_like(node) if isinstance(node, np.ndarray) else None


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    else:
        assert repr(one) == repr(other)  # NaN and -0.0 too


@given(TREES)
def test_any_tree_comes_back_bit_by_bit(tree: Any) -> None:
    image = sent(StateTree(tree).image())
    fresh = blank(tree)
    StateTree(fresh).load(image)
    assert_same(fresh, tree)


def test_arrays_are_written_in_place_and_plain_values_replaced() -> None:
    weights, state = np.arange(6.0), dict[str, Any]()
    state |= {"w": weights, "step": 7, "rates": [0.1, None], "name": "night"}
    image = StateTree(state).image()
    weights[:] = 0
    state |= {"step": 8, "rates": [0.5, 3], "name": None}
    StateTree(state).load(image)
    assert state["w"] is weights
    assert weights.tolist() == [0, 1, 2, 3, 4, 5]
    assert (state["step"], state["rates"], state["name"]) == (7, [0.1, None], "night")


def test_an_image_is_a_copy() -> None:
    state = {"w": np.ones(3)}
    image = StateTree(state).image()
    state["w"][:] = 5
    StateTree(state).load(image)
    assert state["w"].tolist() == [1, 1, 1]


def test_the_state_of_a_random_generator_is_a_plain_tree() -> None:
    first, second = np.random.default_rng(1), np.random.default_rng(2)
    state: Any = {"random": second.bit_generator.state}
    StateTree(state).load(sent(StateTree({"random": first.bit_generator.state}).image()))
    second.bit_generator.state = state["random"]
    assert second.random() == first.random()


@pytest.mark.parametrize("value", [2**63, -(2**63), 2**64, 2**127, -(2**127), 2**400, -(2**63) - 1])
def test_whole_numbers_of_any_size_come_back(value: int) -> None:
    state: dict[str, Any] = {"n": 0}
    StateTree(state).load(sent(StateTree({"n": value}).image()))
    assert state == {"n": value}


def test_arrays_that_are_not_contiguous_are_copied_and_written_in_place() -> None:
    base = np.arange(24.0).reshape(4, 6)
    views = [base[:, ::2], base.T[1:2], np.asfortranarray(base), base[::-1]]
    image = StateTree({"views": views}).image()
    fresh = [np.zeros((4, 6))[:, ::2], np.zeros((6, 4))[1:2], np.zeros((4, 6), order="F"), np.zeros((4, 6))[::-1]]
    kept = list(fresh)
    StateTree({"views": fresh}).load(image)
    for new, same, old in zip(fresh, kept, views, strict=True):
        assert new is same
        assert np.array_equal(new, old)


def test_arrays_in_tuples_are_written_in_place() -> None:
    class Pair(NamedTuple):
        w: Any
        b: Any

    pair = Pair(np.ones(2), np.ones((3, 2)).T)
    image = StateTree({"pair": Pair(np.full(2, 5.0), np.full((2, 3), 6.0))}).image()
    StateTree({"pair": pair}).load(image)
    assert pair.w.tolist() == [5, 5]
    assert pair.b.tolist() == [[6, 6, 6], [6, 6, 6]]


def test_a_plain_value_in_a_tuple_is_refused_because_it_cannot_be_replaced() -> None:
    with pytest.raises(InvalidArgumentError, match=r"state\['betas'\]\[0\].*use a list"):
        StateTree({"betas": (0.9, 0.99)})


def test_bfloat16_comes_back() -> None:
    state = {"w": np.zeros(3, ml_dtypes.bfloat16)}
    StateTree(state).load(sent(StateTree({"w": np.array([1.5, -2, np.nan], ml_dtypes.bfloat16)}).image()))
    assert state["w"].view(np.uint16).tolist() == [0x3FC0, 0xC000, 0x7FC0]


def test_arrays_that_cannot_be_written_are_replaced_by_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Immutable:
        """What an array of JAX shows of itself."""

        def __init__(self, values: Any) -> None:
            self._values = np.array(values)
            self.shape, self.dtype = self._values.shape, self._values.dtype

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
            return self._values.astype(dtype or self.dtype)

    Immutable.__module__ = "jax"
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(numpy=SimpleNamespace(asarray=Immutable)))
    state: Any = {"w": Immutable([0.0, 0.0]), "layers": [Immutable([[1, 2]])]}
    old = state["w"]
    StateTree(state).load(sent(StateTree({"w": np.array([3.0, 4.0]), "layers": [np.array([[5, 6]])]}).image()))
    assert type(state["w"]) is Immutable
    assert state["w"] is not old
    assert np.array(state["w"]).tolist() == [3, 4]
    assert np.array(state["layers"][0]).tolist() == [[5, 6]]
    with pytest.raises(InvalidArgumentError, match="use a list"):
        StateTree({"pair": (Immutable([1.0]),)})


def test_tensors_are_written_in_place() -> None:
    torch = pytest.importorskip("torch")
    weights = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).T)
    state = {"w": weights, "half": torch.tensor([1.5, 2], dtype=torch.bfloat16)}
    image = sent(StateTree(state).image())
    with torch.no_grad():
        weights.zero_()
    state["half"].zero_()
    StateTree(state).load(image)
    assert state["w"] is weights
    assert weights.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert state["half"].tolist() == [1.5, 2]


# --- what is refused --------------------------------------------------------------------------------------------------


class Colour(IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (object(), "must be an array, a number"),
        (b"bytes", "must be an array, a number"),
        ({1}, "must be an array, a number"),
        (Colour.RED, "must be an array, a number"),
        (np.float64(1), "NumPy scalar"),
        (np.array(["text"]), "unsupported element type"),
        (np.array([object()]), "unsupported element type"),
        (np.ones(2, ">f4"), "little-endian"),
        (np.broadcast_to(1.0, (3,)), "read-only; pass a copy"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_a_leaf_that_cannot_be_kept_is_named_when_the_run_begins(leaf: Any, words: str) -> None:
    with pytest.raises(UnsupportedArrayError, match=words) as raised:
        StateTree({"a": [0, leaf]})
    assert str(raised.value).startswith("state['a'][1]")


@pytest.mark.parametrize("tree", [3, "state", (np.ones(2),), np.ones(2), None])
def test_the_whole_must_be_a_dict_or_a_list(tree: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="must be a dict or a list"):
        StateTree(tree)


@pytest.mark.parametrize("key", [("a", 1), 1.0, True, None, np.int64(2)])
def test_keys_that_may_look_different_elsewhere_are_refused(key: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"state\['a'\].*keys must be strings"):
        StateTree({"a": {key: 1}})


def test_a_state_that_contains_itself_is_refused() -> None:
    tree: dict[str, Any] = {"w": np.zeros(2)}
    tree["self"] = [tree]
    with pytest.raises(InvalidArgumentError, match="more than 100 levels; does it contain itself"):
        StateTree(tree)


def test_a_key_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="UTF-8"):
        StateTree({"\udcff": 1})


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="UTF-8"):
        StateTree({"path": "\udcff"})


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"w": np.ones((3, 2)), "s": 1}, r"state\['w'\] is float64\(2, 3\) here and float64\(3, 2\) there"),
        ({"w": np.ones((2, 3), np.float32), "s": 1}, r"state\['w'\] is float64\(2, 3\) here and float32\(2, 3\) there"),
        ({"w": 1, "s": 1}, r"state\['w'\] is float64\(2, 3\) here and a plain value there"),
        ({"s": 1}, r"state\['w'\] is float64\(2, 3\) here and missing there"),
        ([np.ones((2, 3)), 1], "state is a dict here and a list there"),
    ],
)
def test_a_state_of_another_program_is_named_and_not_written(other: Any, words: str) -> None:
    state: dict[str, Any] = {"s": 0, "w": np.zeros((2, 3))}
    with pytest.raises(InvalidArgumentError, match=words) as raised:
        StateTree(state).load(StateTree(other).image())
    assert "start the same program everywhere" in str(raised.value)
    assert state["s"] == 0
    assert not state["w"].any()


def test_the_order_of_keys_does_not_matter() -> None:
    state: dict[str, Any] = {"a": np.zeros(2), "b": np.zeros(3), "c": 0}
    other = {"c": 5, "b": np.ones(3), "a": np.full(2, 7.0)}
    StateTree(state).load(StateTree(other).image())
    assert (state["a"].tolist(), state["b"].tolist(), state["c"]) == ([7, 7], [1, 1, 1], 5)
    # Donors with the same state have the same image, so that blocks can come from all of them.
    mine, theirs = StateTree(state).image(), StateTree(other).image()
    assert mine.data.tobytes() == theirs.data.tobytes()
    assert mine.manifest.entries == theirs.manifest.entries


@pytest.mark.parametrize("change", [{"offset": 128}, {"offset": -64}, {"nbytes": 8}, {"nbytes": 1}, {"offset": 2**70}])
def test_a_manifest_that_lies_about_places_is_refused_before_anything_is_written(change: dict[str, int]) -> None:
    image = StateTree({"a": np.ones(2), "b": np.ones(16)}).image()
    first, second = image.manifest.entries
    bad = msgspec.structs.replace(image.manifest, entries=(first, msgspec.structs.replace(second, **change)))
    state = {"a": np.zeros(2), "b": np.zeros(16)}
    with pytest.raises(InvalidArgumentError, match=r"state\['b'\]"):
        StateTree(state).load(Image(bad, image.data))
    assert not state["a"].any()


# --- leaves that are created later ------------------------------------------------------------------------------------


def younger(node: Any, chance: Any) -> Any:
    """The same tree before some of its leaves, dicts and lists were created."""
    if isinstance(node, dict):
        return {key: younger(child, chance) for key, child in node.items() if chance.draw(st.booleans())}
    if isinstance(node, list):
        return [younger(child, chance) for child in node[: chance.draw(st.integers(0, len(node)))]]
    return blank(node)


def plainer(node: Any) -> Any:
    """A tree with lists instead of tuples, and sorted dicts."""
    if isinstance(node, dict):
        return {key: plainer(node[key]) for key in sorted(node, key=repr)}
    return [plainer(child) for child in node] if isinstance(node, (list, tuple)) else node


@given(TREES, st.data())
def test_what_is_missing_is_created_wherever_it_is(tree: Any, chance: Any) -> None:
    image = sent(StateTree(tree).image())
    state = younger(tree, chance)
    StateTree(state).load(image)
    assert_same(plainer(state), plainer(tree))
    assert StateTree(state).manifest().differences(image.manifest) == ""
    assert StateTree(state).image().data.tobytes() == image.data.tobytes()


def test_what_is_there_stays_the_same_object_when_more_is_created() -> None:
    weights, layers, extra = np.zeros(2), list[Any](), dict[str, Any]()
    layers.append(weights)
    state: dict[str, Any] = {"layers": layers, "extra": extra}
    late = {"layers": [np.ones(2), np.full(3, 5, np.float32)], "extra": {"m": {7: [1, "x"]}}, "empty": {"too": []}}
    StateTree(state).load(sent(StateTree(late).image()))
    assert (state["layers"] is layers, layers[0] is weights, state["extra"] is extra) == (True, True, True)
    assert_same(state, late)
    late["layers"][1][0] = 1
    assert layers[1].tolist() == [5, 5, 5]  # a copy, which the program may write
    layers[1] += 1


def test_leaves_that_came_later_are_removed_again_if_the_image_is_from_before() -> None:
    """The program applies zeros to a step that never was, and its optimizer creates its state: that is undone."""
    state: dict[str, Any] = {"w": np.zeros(2), "opt": {}, "list": [1]}
    tree = StateTree(state)
    image = tree.image()
    state["opt"]["m"] = np.ones(2)
    state["late"] = [np.ones(3), {"n": 1}]
    state["list"].append(np.ones(1))
    tree.load(image)
    assert_same(state, {"w": np.zeros(2), "opt": {}, "list": [1]})


def test_a_leaf_that_came_later_may_change_its_shape() -> None:
    state: dict[str, Any] = {"w": np.zeros(2)}
    tree = StateTree(state)
    state["late"] = np.ones(3)
    tree.load(sent(StateTree({"w": np.ones(2), "late": {"m": np.full(5, 2.0)}}).image()))
    assert_same(state, {"w": np.ones(2), "late": {"m": np.full(5, 2.0)}})


def test_none_stands_for_what_is_not_there_yet() -> None:
    state: dict[str, Any] = {"w": np.zeros(2), "m": None, "v": [None]}
    StateTree(state).load(sent(StateTree({"w": np.ones(2), "m": np.ones(2), "v": [{"a": 1}]}).image()))
    assert_same(state, {"w": np.ones(2), "m": np.ones(2), "v": [{"a": 1}]})


@pytest.mark.parametrize("later", [np.ones(3), 5, {"a": np.ones(2)}, [1, np.ones(1)]])
def test_what_came_in_the_place_of_none_is_none_again_in_an_image_from_before(later: Any) -> None:
    tree = {"w": np.zeros(2), "momentum": None}
    state = StateTree(tree)
    image = state.image()
    tree["momentum"] = later
    state.load(sent(image))
    assert tree["momentum"] is None


def test_a_tuple_that_came_later_becomes_a_list() -> None:
    state: dict[str, Any] = {}
    StateTree(state).load(sent(StateTree({"pair": (np.ones(1), np.ones(2))}).image()))
    assert_same(state, {"pair": [np.ones(1), np.ones(2)]})


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        ({"a": [5]}, {"a": {0: 5}}, "a plain value here and a plain value in a dict in a dict there"),
        ({0: [5]}, [{0: 5}], "state is a dict here and a list there"),
        ({0: [5]}, {0: {0: 5}}, "a plain value in a list in a dict here and a plain value in a dict in a dict there"),
    ],
)
def test_a_list_is_no_dict_with_numbers_as_keys(mine: Any, theirs: Any, words: str) -> None:
    before, after = StateTree(mine), StateTree(theirs)
    assert before.manifest().differences(after.manifest())
    with pytest.raises(InvalidArgumentError, match=words):
        before.load(sent(after.image()))


@pytest.mark.parametrize(
    "tree",
    [
        None,
        {},
        {"'a'": None},
        {"'a'": None, "'b'": None, "'c'": None},
        {"a": None, "'b'": None},
        {"'a'": None, "('b')": None},
        {"'a'": None, "'b'": 3},
        {"'a'": None, "(" * 5000: None},
    ],
    ids=lambda tree: str(tree)[:40],
)
def test_a_manifest_with_another_tree_than_its_leaves_is_refused(tree: Any) -> None:
    image = StateTree({"a": np.ones(2), "b": np.ones(1)}).image()
    state = {"a": np.zeros(2)}
    bad = msgspec.structs.replace(image.manifest, tree=tree)
    with pytest.raises(InvalidArgumentError, match=r"invalid|here and"):
        StateTree(state).load(Image(bad, image.data))
    assert not state["a"].any()


def test_a_tree_that_is_too_deep_is_refused() -> None:
    tree: Any = None
    for _ in range(500):
        tree = [tree]
    image = StateTree({"a": np.ones(2)}).image()
    bad = msgspec.structs.replace(image.manifest, tree={"'a'": None, "'b'": tree})
    assert "too deep" in StateTree({"a": np.zeros(2)}).misfit(bad)


@pytest.mark.parametrize("change", [{"shape": (3,)}, {"shape": (-1, -2)}, {"kind": "float32"}, {"kind": "unknown"}])
def test_a_leaf_is_not_created_with_another_size_than_its_bytes(change: dict[str, Any]) -> None:
    image = StateTree({"a": np.ones(2), "b": np.ones(2)}).image()
    first, second = image.manifest.entries
    bad = msgspec.structs.replace(image.manifest, entries=(first, msgspec.structs.replace(second, **change)))
    state = {"a": np.zeros(2)}
    with pytest.raises((InvalidArgumentError, UnsupportedArrayError)):
        StateTree(state).load(Image(bad, image.data))
    assert not state["a"].any()
    assert list(state) == ["a"]


def test_bfloat16_is_created_where_numpy_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    image = sent(StateTree({"w": np.array([1.5], ml_dtypes.bfloat16)}).image())
    state: dict[str, Any] = {}
    StateTree(state).load(image)
    assert_same(state, {"w": np.array([1.5], ml_dtypes.bfloat16)})
    monkeypatch.setattr("ringfort.collectives.arrays._wrap_numpy", lambda array, kind: array)
    state = {}
    with pytest.raises(InvalidArgumentError, match="only with ml_dtypes"):
        StateTree(state).load(image)
    assert not state


# --- blocks -----------------------------------------------------------------------------------------------------------


def test_each_block_has_a_hash_and_arrays_are_aligned() -> None:
    state = {"a": np.ones(3, np.uint8), "b": np.arange(BLOCK // 4, dtype=np.float32)}
    image = hashed(StateTree(state).image())
    assert [entry.offset % 64 for entry in image.manifest.entries] == [0, 0]
    assert len(image.manifest.hashes) == 2
    assert [block_hash(image.block(index)) for index in range(2)] == list(image.manifest.hashes)
    assert sum(len(image.block(index)) for index in range(2)) == image.manifest.nbytes
    image.data[BLOCK] ^= 1
    assert [block_hash(image.block(index)) == image.manifest.hashes[index] for index in range(2)] == [True, False]


def test_a_state_without_arrays_has_no_blocks() -> None:
    image = hashed(StateTree({"step": 1, "empty": np.ones((0, 3))}).image())
    assert (image.manifest.nbytes, image.manifest.hashes) == (0, ())
