"""`average_gradients`: the mean of every leaf, in few messages, and an error in place of a wrong mean."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ringfort import DistributedContext, SimulatedBackend
from ringfort.collectives import reduction
from ringfort.collectives.arrays import as_view
from ringfort.collectives.ops import Op, ReduceOp
from ringfort.errors import CollectiveMismatchError, GradientMismatchError, InvalidArgumentError, UnsupportedArrayError
from ringfort.testing.ranks import results, run_ranks
from ringfort.training import average_gradients
from ringfort.training.gradients import plan_buckets, rebuild

# --- a group of threads -----------------------------------------------------------------------------------------------


class Meeting:
    """Where the ranks of a fake group lay down what they bring and see what the others brought."""

    def __init__(self, world_size: int) -> None:
        self.brought: list[Any] = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=20)

    def exchange(self, rank: int, thing: Any) -> list[Any]:
        self.brought[rank] = thing
        self.barrier.wait()
        everyone = list(self.brought)
        self.barrier.wait()
        return everyone


class FakeWork:
    def __init__(self, future: Future[Any]) -> None:
        self.future = future

    def wait(self, timeout: float | None = None) -> None:
        self.future.result(timeout or 20)


class FakeContext:
    """As much of a context as `average_gradients` uses, with one engine thread like the real one."""

    def __init__(self, meeting: Meeting, rank: int, world_size: int) -> None:
        self.meeting, self.rank, self.world_size = meeting, rank, world_size
        (self.backend,) = SimulatedBackend.create_group(1)
        self.group = self.backend.group
        self.engine = ThreadPoolExecutor(1)

    def _meet(self, what: str, thing: Any) -> list[Any]:
        everyone = self.meeting.exchange(self.rank, (what, thing))
        for peer, (theirs, _) in enumerate(everyone):
            if theirs != what:
                raise CollectiveMismatchError(self.rank, what, peer, theirs, operation=0)
        return [thing for _, thing in everyone]

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._meet("all_gather_object", value)

    def all_reduce(self, x: Any, op: Op = ReduceOp.SUM, *, async_op: bool = False) -> Any:
        view = as_view(x, "x", writable=True)
        work = FakeWork(self.engine.submit(self._reduce, view, op))
        if async_op:
            return work
        work.wait()
        return x

    def _reduce(self, view: Any, op: Op) -> None:
        scaled = view.flat.copy()
        reduction.scale_before(op, view.kind, scaled)
        parts = self._meet(f"all_reduce({view.kind.name}, {view.flat.size}, {reduction.describe(op)})", scaled)
        total = parts[0].copy()
        for part in parts[1:]:
            reduction.reducer(op, view.kind).apply(total, part)
        reduction.scale_after(op, view.kind, total, self.world_size)
        view.flat[...] = total
        view.finish()


class Watched:
    """A context that also notes which calls were made and how many reductions were under way at once."""

    def __init__(self, ctx: Any) -> None:
        self.ctx, self.rank, self.world_size, self.group = ctx, ctx.rank, ctx.world_size, ctx.group
        self.calls: list[str] = []
        self.under_way = self.most_under_way = 0

    def all_gather_object(self, value: Any) -> list[Any]:
        self.calls.append("all_gather_object")
        return self.ctx.all_gather_object(value)

    def all_reduce(self, x: Any, op: Op = ReduceOp.SUM, *, async_op: bool = False) -> Any:
        view = as_view(x, "x", writable=True)
        self.calls.append(f"all_reduce({view.kind.name}, {view.flat.size})")
        result = self.ctx.all_reduce(x, op, async_op=async_op)
        if not async_op:
            return result
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        return WatchedWork(self, result)


class WatchedWork:
    def __init__(self, watched: Watched, work: Any) -> None:
        self.watched, self.work = watched, work

    def wait(self) -> None:
        self.watched.under_way -= 1
        self.work.wait()


def on_ranks(world_size: int, work: Callable[[Any], Any]) -> list[Any]:
    """What `work(ctx)` returned or raised at each rank."""
    meeting = Meeting(world_size)

    def at(rank: int) -> Any:
        ctx = FakeContext(meeting, rank, world_size)
        try:
            return work(Watched(ctx))
        except Exception as exc:
            return exc
        finally:
            ctx.engine.shutdown()

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(at, range(world_size)))


def averaged(trees: Sequence[Any], **options: Any) -> list[Any]:
    return on_ranks(len(trees), lambda ctx: average_gradients(ctx, trees[ctx.rank], **options))


class Layer(NamedTuple):
    weight: Any
    bias: Any


def gradients(rank: int) -> dict[str, Any]:
    generator = np.random.default_rng(rank)
    return {
        "layers": [Layer(generator.normal(size=(3, 4)).astype(np.float32), generator.normal(size=4)) for _ in range(2)],
        "head": (generator.normal(size=5).astype(np.float16), None, np.float32(generator.normal(size=()))[...]),
        "frozen": None,
        "empty": np.zeros((0, 3), np.float32),
    }


def arrays_of(tree: Any) -> list[Any]:
    layers = [part for layer in tree["layers"] for part in layer]
    return [*layers, tree["head"][0], tree["head"][2], tree["empty"]]


# --- the mean ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 64, 25 * 1024 * 1024])
def test_every_leaf_becomes_the_mean_over_the_ranks_in_place(world_size: int, bucket_bytes: int) -> None:
    trees = [gradients(rank) for rank in range(world_size)]
    expected = [
        np.mean(np.stack(parts).astype(np.float64), axis=0)
        for parts in zip(*(arrays_of(gradients(rank)) for rank in range(world_size)), strict=True)
    ]
    kept = [arrays_of(tree) for tree in trees]
    results = averaged(trees, bucket_bytes=bucket_bytes)
    for rank in range(world_size):
        assert results[rank] is trees[rank]
        for array, before, want in zip(arrays_of(results[rank]), kept[rank], expected, strict=True):
            assert array is before
            tolerance = 2e-3 if array.dtype == np.float16 else 1e-6
            np.testing.assert_allclose(array, want, rtol=tolerance, atol=tolerance)
        for array, other in zip(arrays_of(results[rank]), arrays_of(results[0]), strict=True):
            assert array.tobytes() == other.tobytes()


leaf_shapes = st.lists(st.tuples(st.sampled_from(["float32", "float64", "complex64"]), st.integers(0, 40)), max_size=12)


@settings(max_examples=40)
@given(leaf_shapes, st.integers(1, 400), st.integers(1, 3), st.booleans())
def test_any_tree_and_bucket_size_gives_numpys_mean(
    shapes: list[tuple[str, int]], bucket_bytes: int, world_size: int, weighted: bool
) -> None:
    generator = np.random.default_rng(len(shapes))
    trees = [[generator.integers(-8, 8, n).astype(dtype) for dtype, n in shapes] for _ in range(world_size)]
    weights = [rank + 1.0 if weighted else 1.0 for rank in range(world_size)]
    expected = [
        np.average(np.stack(parts), axis=0, weights=weights) if len(parts[0]) else parts[0]
        for parts in zip(*([leaf.copy() for leaf in tree] for tree in trees), strict=True)
    ]

    def work(ctx: Any) -> Any:
        weight = weights[ctx.rank] if weighted else None
        return average_gradients(ctx, trees[ctx.rank], weight=weight, bucket_bytes=bucket_bytes)

    for result in on_ranks(world_size, work):
        for array, want in zip(result, expected, strict=True):
            np.testing.assert_allclose(array, want, rtol=1e-5, atol=1e-5)


def test_a_weighted_mean_equals_the_mean_over_all_samples() -> None:
    samples = np.random.default_rng(0).normal(size=(7, 5))
    shares = [samples[:4], samples[4:5], samples[5:]]
    trees = [[share.mean(axis=0)] for share in shares]
    results = on_ranks(3, lambda ctx: average_gradients(ctx, trees[ctx.rank], weight=len(shares[ctx.rank])))
    for result in results:
        np.testing.assert_allclose(result[0], samples.mean(axis=0), rtol=1e-12)


def test_a_weighted_float16_mean_is_scaled_without_overflow() -> None:
    trees = [[np.full(3, 60000, np.float16)] for _ in range(2)]
    for result in on_ranks(2, lambda ctx: average_gradients(ctx, trees[ctx.rank], weight=1000 * (1 + ctx.rank))):
        np.testing.assert_allclose(result[0].astype(np.float64), 60000, rtol=2e-3)


@pytest.mark.parametrize("bucket_bytes", [1, 1024])
def test_a_rank_of_weight_zero_contributes_nothing_even_if_it_holds_nan(bucket_bytes: int) -> None:
    trees = [{"a": np.full(3, np.nan), "b": np.full(2, np.inf)}, {"a": np.full(3, 2.0), "b": np.full(2, 4.0)}]

    def work(ctx: Any) -> Any:
        return average_gradients(ctx, trees[ctx.rank], weight=ctx.rank * 8, bucket_bytes=bucket_bytes)

    for result in on_ranks(2, work):
        assert result["a"].tolist() == [2.0] * 3
        assert result["b"].tolist() == [4.0] * 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_that_are_all_zero_are_an_error_at_every_rank(world_size: int) -> None:
    errors = averaged([[np.ones(2)] for _ in range(world_size)], weight=0)
    assert [type(error) for error in errors] == [InvalidArgumentError] * world_size
    assert all("weight=0: the weights of all ranks add up to 0" in str(error) for error in errors)


# --- trees and arrays -------------------------------------------------------------------------------------------------


def test_arrays_that_are_not_contiguous_are_averaged_in_place() -> None:
    wholes = [np.full((4, 6), float(rank)) for rank in range(2)]
    averaged([[whole[:, ::2]] for whole in wholes])
    for rank, whole in enumerate(wholes):
        assert (whole[:, ::2] == 0.5).all()
        assert (whole[:, 1::2] == rank).all()


def test_dict_and_tuple_kinds_survive() -> None:
    trees = [OrderedDict(a=defaultdict(list, b=(np.full(2, float(rank)),))) for rank in range(2)]
    for result in averaged(trees):
        assert type(result) is OrderedDict
        assert type(result["a"]) is defaultdict
        assert result["a"]["b"][0].tolist() == [0.5, 0.5]


def test_arrays_that_were_replaced_are_put_in_new_containers_of_the_same_kinds() -> None:
    # As for JAX and MLX, whose arrays cannot be written: numbers stand for them here.
    tree = OrderedDict(a=[1, Layer(2, (3, None))], b=defaultdict(int, c=4), d=[5])
    result = rebuild(tree, iter([10, 20, 30, None, 40, 5]))
    assert result == OrderedDict(a=[10, Layer(20, (30, None))], b={"c": 40}, d=[5])
    assert [type(part) for part in (result, result["a"][1], result["b"])] == [OrderedDict, Layer, defaultdict]
    assert tree == OrderedDict(a=[1, Layer(2, (3, None))], b={"c": 4}, d=[5])
    assert result["d"] is tree["d"]


def test_a_tree_without_arrays_comes_back_as_it_was() -> None:
    tree: dict[str, Any] = {"a": None, "b": [], "c": ()}
    assert averaged([tree, tree]) == [tree, tree]


def test_a_bare_array_is_a_tree() -> None:
    assert [result.tolist() for result in averaged([np.array([1.0]), np.array([3.0])])] == [[2.0], [2.0]]


@pytest.mark.parametrize("bucket_bytes", [1, 1024])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_tensors_are_averaged_in_place(dtype: str, bucket_bytes: int) -> None:
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    trees = [{"w": torch.full((2, 3), 1.0 + 2 * rank, dtype=kind), "b": torch.ones(2, dtype=kind)} for rank in range(2)]
    for tree, result in zip(trees, averaged(trees, bucket_bytes=bucket_bytes), strict=True):
        assert result is tree
        assert tree["w"].dtype is kind
        assert tree["w"].tolist() == [[2.0] * 3] * 2
        assert tree["b"].tolist() == [1.0, 1.0]


def test_ranks_may_hold_the_same_gradients_in_different_libraries() -> None:
    torch = pytest.importorskip("torch")
    trees = [[torch.ones(3), torch.zeros(2)], [np.full(3, 3, np.float32), np.full(2, 2, np.float32)]]
    for result in averaged(trees):
        assert [array.tolist() for array in result] == [[2.0] * 3, [1.0] * 2]


# --- wrong arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), True, "3", 10**400])
def test_a_weight_that_is_no_sample_count_is_refused(weight: Any) -> None:
    (error,) = averaged([[np.ones(2)]], weight=weight)
    assert isinstance(error, InvalidArgumentError)
    assert str(error).startswith(f"weight={weight!r}")


@pytest.mark.parametrize("bucket_bytes", [0, -5, 1.5, True])
def test_a_bucket_size_that_cannot_work_is_refused(bucket_bytes: Any) -> None:
    (error,) = averaged([[np.ones(2)]], bucket_bytes=bucket_bytes)
    assert isinstance(error, InvalidArgumentError)
    assert str(error).startswith(f"bucket_bytes={bucket_bytes!r}")


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_a_leaf_that_is_not_of_floats_is_named(dtype: str) -> None:
    (error,) = averaged([{"layers": [Layer(np.ones(2), np.ones(2, dtype))]}])
    assert isinstance(error, InvalidArgumentError)
    assert str(error) == f"tree['layers'][0].bias={dtype!r}: must be an array of floats; convert it or leave it out"


@pytest.mark.parametrize("leaf", [1.5, "text", object()])
def test_a_leaf_that_is_no_array_is_named(leaf: Any) -> None:
    (error,) = averaged([{"a": leaf}])
    assert isinstance(error, UnsupportedArrayError)
    assert "tree['a']" in str(error)


def test_a_read_only_array_is_refused_even_in_a_world_of_one() -> None:
    array = np.ones(2)
    array.flags.writeable = False
    (error,) = averaged([[array]])
    assert isinstance(error, UnsupportedArrayError)
    assert "tree[0]" in str(error)


# --- ranks that disagree ----------------------------------------------------------------------------------------------

f32 = np.float32


@pytest.mark.parametrize(
    ("mine", "theirs", "first"),
    [
        (
            {"a": np.ones(2), "b": np.ones(3)},
            {"a": np.ones(2), "b": None},
            ("tree['b']: float64(3,)", "tree['b']: None"),
        ),
        ([np.ones((2, 3), f32)], [np.ones((3, 2), f32)], ("tree[0]: float32(2, 3)", "tree[0]: float32(3, 2)")),
        ([np.ones(2)], [np.ones(2, f32)], ("tree[0]: float64(2,)", "tree[0]: float32(2,)")),
        ([np.ones(2)], [np.ones(2), np.ones(2)], ("no more leaves", "tree[1]: float64(2,)")),
        ({"a": np.ones(2)}, {"b": np.ones(2)}, ("tree['a']: float64(2,)", "tree['b']: float64(2,)")),
    ],
)
def test_trees_that_differ_are_an_error_at_every_rank_that_names_the_first_leaf(
    mine: Any, theirs: Any, first: tuple[str, str]
) -> None:
    errors = averaged([mine, mine, theirs])
    assert [type(error) for error in errors] == [GradientMismatchError] * 3
    assert [(error.rank, error.peer) for error in errors] == [(0, 2), (1, 2), (2, 0)]
    for error, (ours, others) in zip(errors, [first, first, first[::-1]], strict=True):
        assert (error.ours, error.theirs) == (ours, others)
        assert f"has {ours}, rank" in str(error)


def test_the_group_goes_on_after_trees_that_differed() -> None:
    def work(ctx: Any) -> Any:
        with pytest.raises(GradientMismatchError) as caught:
            average_gradients(ctx, [np.ones(2 + ctx.rank)])
        assert isinstance(caught.value, CollectiveMismatchError)
        assert not caught.value.is_fatal
        return average_gradients(ctx, [np.full(2, float(ctx.rank))])[0].tolist()

    assert on_ranks(2, work) == [[0.5, 0.5]] * 2


def test_a_weight_at_one_rank_only_is_an_error_at_every_rank() -> None:
    def work(ctx: Any) -> Any:
        return average_gradients(ctx, [np.ones(2)], weight=[None, 3][ctx.rank])

    errors = on_ranks(2, work)
    assert [(error.ours, error.theirs) for error in errors] == [
        ("no weight", "a weight"),
        ("a weight", "no weight"),
    ]


def test_two_agreed_trees_are_never_mixed_up() -> None:
    # Each rank has agreed on both trees before, they have equal sizes, and only the leaf's name differs: averaging
    # them would be silent and wrong.
    def work(ctx: Any) -> Any:
        average_gradients(ctx, {"expert0": np.ones(2), "expert1": None})
        average_gradients(ctx, {"expert0": None, "expert1": np.ones(2)})
        present = f"expert{ctx.rank}"
        return average_gradients(
            ctx, {name: np.ones(2) if name == present else None for name in ("expert0", "expert1")}
        )

    changed, kept = on_ranks(2, work)
    assert isinstance(changed, CollectiveMismatchError)
    assert isinstance(kept, CollectiveMismatchError)
    assert "tree['expert0']: float64(2,), where its last call had tree['expert0']: None" in changed.ours


def test_the_ranks_compare_notes_only_when_something_changed() -> None:
    def work(ctx: Any) -> list[int]:
        asked: list[int] = []
        for tree in ([np.ones(2)], [np.ones(2)], [np.ones(3)], [np.ones(3)]):
            average_gradients(ctx, tree)
            asked.append(ctx.calls.count("all_gather_object"))
        return asked

    assert on_ranks(2, work) == [[1, 1, 2, 2]] * 2


# --- buckets ----------------------------------------------------------------------------------------------------------

sizes = st.lists(st.tuples(st.sampled_from(["float16", "float32"]), st.integers(0, 100)), max_size=30)


@given(sizes, st.integers(1, 120))
def test_a_plan_moves_every_leaf_that_has_bytes_exactly_once(leaves: list[tuple[str, int]], bucket_bytes: int) -> None:
    moved = [index for bucket in plan_buckets(leaves, bucket_bytes) for index in bucket]
    assert sorted(moved) == [index for index, (_, nbytes) in enumerate(leaves) if nbytes]


@given(sizes, st.integers(1, 120))
def test_a_bucket_has_one_element_type_and_keeps_its_size(leaves: list[tuple[str, int]], bucket_bytes: int) -> None:
    for bucket in plan_buckets(leaves, bucket_bytes):
        assert len({leaves[index][0] for index in bucket}) == 1
        assert bucket == sorted(bucket, reverse=True)
        assert len(bucket) == 1 or sum(leaves[index][1] for index in bucket) <= bucket_bytes


@given(sizes, st.integers(1, 120))
def test_two_buckets_of_a_type_in_a_row_would_not_have_fitted_in_one(
    leaves: list[tuple[str, int]], bucket_bytes: int
) -> None:
    for kind in ("float16", "float32"):
        small = [
            bucket
            for bucket in plan_buckets(leaves, bucket_bytes)
            if leaves[bucket[0]][0] == kind and leaves[bucket[0]][1] <= bucket_bytes // 2
        ]
        for bucket, following in pairwise(small):
            assert sum(leaves[index][1] for index in bucket) + leaves[following[0]][1] > bucket_bytes


def test_a_leaf_over_half_a_bucket_travels_alone_and_the_last_leaf_first() -> None:
    leaves = [("float32", 20), ("float32", 60), ("float32", 30), ("float16", 40), ("float32", 50)]
    assert plan_buckets(leaves, 100) == [[1], [4, 2, 0], [3]]


def test_small_leaves_travel_in_one_message() -> None:
    def work(ctx: Any) -> list[str]:
        average_gradients(ctx, [np.ones(10, f32) for _ in range(50)])
        return ctx.calls

    assert on_ranks(2, work) == [["all_gather_object", "all_reduce(float32, 500)"]] * 2


def test_at_most_two_buckets_take_memory_at_once() -> None:
    def work(ctx: Any) -> tuple[int, int]:
        average_gradients(ctx, [np.ones(10, f32) for _ in range(50)], bucket_bytes=100)
        return len(ctx.calls) - 1, ctx.most_under_way

    assert on_ranks(2, work) == [(25, 2)] * 2


# --- the real thing ---------------------------------------------------------------------------------------------------


def test_real_ranks_average_trees_of_numpy_and_torch_alike() -> None:
    torch = pytest.importorskip("torch")

    def average(ctx: DistributedContext) -> tuple[Any, Any]:
        tree = {
            "layers": [np.full((3, 4), ctx.rank, np.float32), np.full(70_000, ctx.rank, np.float16)],
            "head": (torch.full((5,), float(ctx.rank), dtype=torch.bfloat16), None),
        }
        again = average_gradients(ctx, tree, bucket_bytes=4096)
        weighted = average_gradients(ctx, [np.full(3, float(ctx.rank))], weight=ctx.rank)
        return again, weighted

    backends = SimulatedBackend.create_group(3)
    contexts = [DistributedContext(backend) for backend in backends]
    for tree, weighted in results(run_ranks(contexts, average)):
        assert (tree["layers"][0] == 1).all()
        assert (tree["layers"][1] == 1).all()
        assert (tree["head"][0] == 1).all()
        assert tree["head"][1] is None
        np.testing.assert_allclose(weighted[0], 5 / 3)
    results(run_ranks(contexts, lambda ctx: ctx.close()))
