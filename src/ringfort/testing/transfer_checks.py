"""Rules of the collectives that move data without computing, and of arrays between two ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringfort.config import BroadcastStrategy
from ringfort.context import DistributedContext
from ringfort.testing.check import collective_check
from ringfort.testing.reference import DTYPES, SHAPES, Array, assert_equal, part_of, parts_of

BROADCAST = (
    None,
    BroadcastStrategy.RING,
    BroadcastStrategy.TREE,
    BroadcastStrategy.tree(3),
    BroadcastStrategy.DIRECT,
    BroadcastStrategy.HIERARCHICAL,
)


@collective_check(ranks=4)
def broadcast_gives_everybody_the_roots_array(context: DistributedContext) -> None:
    for strategy in BROADCAST:
        for root in range(4):
            for count in (0, 1, 1001, 70_001):
                parts = parts_of(4, (count,), "int32", seed=root)
                x = parts[context.rank].copy()
                assert context.broadcast(x, root, strategy=strategy) is x
                assert_equal(x, parts[root], f"{strategy} of {count} from {root}")


@collective_check(ranks=3)
def gathers_stack_what_the_ranks_have(context: DistributedContext) -> None:
    for dtype in DTYPES:
        for turn, shape in enumerate(SHAPES):
            parts = parts_of(3, shape, dtype)
            x = parts[context.rank].copy()
            assert_equal(context.all_gather(x), np.stack(parts), f"all_gather of {dtype}{shape}")
            gathered = context.gather(x, turn % 3)
            if context.rank == turn % 3:
                assert_equal(gathered, np.stack(parts), f"gather of {dtype}{shape}")
            else:
                assert gathered is None
            assert_equal(x, parts[context.rank], "what was passed is kept")


@collective_check(ranks=3)
def scatter_gives_each_rank_its_part(context: DistributedContext) -> None:
    for dtype in DTYPES:
        for turn, shape in enumerate(SHAPES):
            root = turn % 3
            whole = part_of(root, (3, *shape), dtype).astype(dtype)
            part = context.scatter(whole if context.rank == root else None, root)
            assert_equal(np.asarray(part), whole[context.rank : context.rank + 1].reshape(shape), f"{dtype}{shape}")


@collective_check(ranks=3)
def all_to_all_turns_rows_into_columns(context: DistributedContext) -> None:
    for dtype in ("bool", "uint8", "float16", "float64", "complex64"):
        for shape in (*SHAPES, (100_003,)):
            parts = parts_of(3, (3, *shape), dtype)
            result = context.all_to_all(parts[context.rank])
            assert_equal(result, np.stack([part[context.rank] for part in parts]), f"{dtype}{shape}")


@collective_check(ranks=3)
def all_to_all_takes_parts_of_any_shapes_and_types(context: DistributedContext) -> None:

    def part(src: int, dst: int) -> Array:
        shape = ((), (0,), (src + 1, dst + 2), (70_001,))[(src + 2 * dst) % 4]
        return part_of(src, shape, ("float32", "bool", "int64")[(src + dst) % 3], seed=dst)

    result = context.all_to_all([part(context.rank, dst) for dst in range(3)])
    assert isinstance(result, list)
    for src, got in enumerate(result):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        assert_equal(got, part(src, context.rank), f"from {src}")


@collective_check(ranks=3)
def arrays_go_between_two_ranks(context: DistributedContext) -> None:
    n, rank = 3, context.rank
    for dtype in DTYPES:
        for shape in SHAPES:
            parts = parts_of(n, shape, dtype)
            into = np.zeros(shape, dtype)
            assert context.sendrecv(parts[rank], (rank + 1) % n, into, (rank - 1) % n, tag=5) is into
            assert_equal(into, parts[(rank - 1) % n], f"sendrecv of {dtype}{shape}")
    parts = parts_of(n, (6, 4), "float32")
    if rank == 0:
        context.send(parts[0][:, ::2], 1, tag=3)
    elif rank == 1:
        into = np.zeros((4, 6), np.float32)
        assert context.recv(into[::2].T, 0, tag=3) is not None
        assert_equal(into[::2].T.reshape(6, 2), parts[0][:, ::2], "a transposed target")
    context.barrier()


@collective_check(ranks=3)
def objects_are_the_same_everywhere(context: DistributedContext) -> None:
    for root in range(3):
        plain: dict[str, Any] = {
            "rank": root,
            "list": [1, 2.5, None, True, "naïve"],
            "bytes": b"\0\xff",
            "dict": {"a": {}},
        }
        thing: dict[str, Any] = {"plain": plain, "array": part_of(root, (2, 3), "float32")}
        got = context.broadcast_object(thing if context.rank == root else None, root)
        assert got["plain"] == plain
        assert_equal(got["array"], part_of(root, (2, 3), "float32"), "array")
    gathered = context.all_gather_object(["rank", context.rank, "x" * 70_000 * context.rank])
    assert gathered == [["rank", rank, "x" * 70_000 * rank] for rank in range(3)]
