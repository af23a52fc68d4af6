"""The all-reduce that compresses: the same bits everywhere, nothing lost, and clear errors where ranks disagree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ringfort import (
    CollectiveConfig,
    CollectiveMismatchError,
    CompressionStrategy,
    DistributedConfig,
    DistributedContext,
    DistributedError,
    GradientCompressor,
    InvalidArgumentError,
    NonFiniteError,
    PeerLostError,
    ReduceOp,
    SimulatedBackend,
    UnsupportedOpError,
)
from ringfort.compression import auto, calls
from ringfort.compression.calls import Compressed
from ringfort.compression.collective import reduce_scatter
from ringfort.testing.groups import closing_all
from ringfort.testing.ranks import results, run_ranks
from ringfort.training import average_gradients

NAMES = (
    "none", "fp16", "bf16", "int8", "int4", "onebit", "topk(0.05)", "topk(0.05)+int4", "randomk(0.1)",
    "randomk(0.1)+int8", "powersgd(2)",
)  # fmt: skip
EXACT_ENOUGH = {"none": 1e-6, "fp16": 0.001, "bf16": 0.008, "int8": 0.04, "int4": 0.5}
"""How far from the mean of all ranks, as a share of its length."""
Array = Any


def group(n: int, **settings: Any) -> list[DistributedContext]:
    return [DistributedContext(backend) for backend in SimulatedBackend.create_group(n, **settings)]


def on_all(contexts: list[DistributedContext], program: Callable[[DistributedContext], Any]) -> list[Any]:
    with closing_all(contexts):
        return run_ranks(contexts, program)


def noise(seed: int, shape: tuple[int, ...]) -> Array:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape), np.float32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_all_ranks_end_with_the_same_bits_and_nothing_is_lost(name: str, n: int) -> None:
    shapes = [(), (0,), (3,), (40, 70), (70_003,)]

    def program(ctx: DistributedContext) -> list[tuple[Array, Array, Array]]:
        compressor = GradientCompressor(name)
        found: list[tuple[Array, Array, Array]] = []
        for number, shape in enumerate(shapes):
            given, got = np.zeros(shape), np.zeros(shape)
            for step in range(3):
                x = noise(100 * ctx.rank + step, shape)
                given += x
                assert ctx.all_reduce(x, compression=compressor, name=f"t{number}") is x
                got += x
            kept = compressor.residual(f"t{number}")
            found.append((given, got, np.zeros(shape) if kept is None else kept.reshape(shape)))
        return found

    outcomes = results(on_all(group(n), program))
    for number in range(len(shapes)):
        given = sum(outcome[number][0] for outcome in outcomes)
        kept = sum(outcome[number][2] for outcome in outcomes)
        for outcome in outcomes:
            np.testing.assert_array_equal(outcome[number][1], outcomes[0][number][1])
        np.testing.assert_allclose(outcomes[0][number][1] + kept, given, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", EXACT_ENOUGH)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_a_strategy_alone_gives_about_the_mean(name: str, dtype: str) -> None:
    pytest.importorskip("ml_dtypes", reason="pip install ml_dtypes: NumPy has no bfloat16 of its own")

    def program(ctx: DistributedContext) -> Array:
        return ctx.all_reduce(noise(ctx.rank, (999,)).astype(dtype), ReduceOp.MEAN, compression=name)

    outcomes = results(on_all(group(3), program))
    mean = np.mean([noise(rank, (999,)) for rank in range(3)], axis=0)
    assert all(outcome.dtype == dtype and outcome.tobytes() == outcomes[0].tobytes() for outcome in outcomes)
    off = np.linalg.norm(outcomes[0].astype(np.float64) - mean) / np.linalg.norm(mean)
    assert off <= EXACT_ENOUGH[name] + (0.01 if dtype == "bfloat16" else 1e-3)


@pytest.mark.parametrize("name", ["int8", "int4", "randomk(0.25)", "randomk(0.25)+int8"])
def test_the_sum_is_right_on_average_where_that_is_claimed(name: str) -> None:
    assert CompressionStrategy.parse(name).is_unbiased
    x = [noise(rank, (500,)) for rank in range(3)]

    def program(ctx: DistributedContext) -> tuple[Array, Array]:
        tries = np.array([ctx.all_reduce(x[ctx.rank].copy(), compression=name) for _ in range(100)])
        return tries.mean(axis=0), tries.std(axis=0).max()

    mean, deviation = results(on_all(group(3), program))[0]
    assert np.abs(mean - sum(x)).max() < 5.5 * deviation / np.sqrt(100) + 1e-4


def test_a_weighted_sum_and_arrays_that_are_not_contiguous() -> None:
    def program(ctx: DistributedContext) -> Array:
        whole = np.tile(noise(ctx.rank, (100, 1)), (1, 4))
        ctx.all_reduce(whole[:, ::2], ReduceOp.premul_sum(ctx.rank + 1), compression="fp16")
        return whole

    outcomes = results(on_all(group(2), program))
    expected = noise(0, (100, 1)) + 2 * noise(1, (100, 1))
    for rank, outcome in enumerate(outcomes):
        np.testing.assert_allclose(outcome[:, [0, 2]], np.tile(expected, (1, 2)), atol=0.02)
        np.testing.assert_array_equal(outcome[:, 1:2], noise(rank, (100, 1)))


def test_asynchronous_ones_run_in_order() -> None:
    def program(ctx: DistributedContext) -> list[Array]:
        compressor = GradientCompressor("int8")
        works = [
            ctx.all_reduce(noise(ctx.rank + i, (100,)), compression=compressor, name=str(i % 2), async_op=True)
            for i in range(6)
        ]
        return [work.wait() for work in works]

    one, other = results(on_all(group(2), program))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


# --- several ranks per host -------------------------------------------------------------------------------------------

LAYOUTS = ([0, 0, 2, 2], [0, 1, 1, 0, 1])
"""The hosts of the ranks. In the second, rank 4 holds no lane."""


@pytest.mark.parametrize("name", ["int8", "topk(0.05)+int4", "randomk(0.1)", "powersgd(2)"])
@pytest.mark.parametrize("hosts", LAYOUTS)
def test_ranks_of_a_host_add_up_first_and_nothing_is_lost(name: str, hosts: list[int]) -> None:
    shapes = [(), (3,), (40, 70), (150_003,)]

    def program(ctx: DistributedContext) -> list[tuple[Array, Array, Array]]:
        compressor = GradientCompressor(name)
        found: list[tuple[Array, Array, Array]] = []
        for number, shape in enumerate(shapes):
            given, got = np.zeros(shape), np.zeros(shape)
            for step in range(2):
                x = noise(100 * ctx.rank + step, shape)
                given += x
                got += ctx.all_reduce(x, compression=compressor, name=f"t{number}")
            kept = compressor.residual(f"t{number}")
            found.append((given, got, np.zeros(shape) if kept is None else kept.reshape(shape)))
        return found

    outcomes = results(on_all(group(len(hosts), hosts=hosts), program))
    for number in range(len(shapes)):
        given = sum(outcome[number][0] for outcome in outcomes)
        kept = sum(outcome[number][2] for outcome in outcomes)
        for outcome in outcomes:
            np.testing.assert_array_equal(outcome[number][1], outcomes[0][number][1])
        np.testing.assert_allclose(outcomes[0][number][1] + kept, given, rtol=1e-4, atol=2e-3)
    if name == "int8":  # the error is that of one rank of the host
        lanes = [outcome[3][2] != 0 for outcome in outcomes]
        for host in set(hosts):
            kept = sum(lane.astype(int) for rank, lane in enumerate(lanes) if hosts[rank] == host)
            assert kept.max() == 1
            assert kept.mean() > 0.9


@pytest.mark.parametrize("error_feedback", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_host_that_adds_up_gives_about_the_mean(error_feedback: bool, dtype: str) -> None:
    def program(ctx: DistributedContext) -> Array:
        compressor = GradientCompressor("int8", error_feedback=error_feedback)
        x = noise(ctx.rank, (999,)).astype(dtype)
        return ctx.all_reduce(x, ReduceOp.MEAN, compression=compressor, name="w")

    outcomes = results(on_all(group(4, hosts=[0, 0, 2, 2]), program))
    mean = np.mean([noise(rank, (999,)) for rank in range(4)], axis=0)
    assert all(outcome.tobytes() == outcomes[0].tobytes() for outcome in outcomes)
    assert np.linalg.norm(outcomes[0] - mean) / np.linalg.norm(mean) < 0.03


@pytest.mark.parametrize(
    ("name", "share"), [("int8", 1 / 1.75), ("powersgd(2)", 1 / 1.75), ("topk(0.01)", 1 / 3), ("sparse", 1 / 3)]
)
def test_two_hosts_of_two_ranks_send_about_half(name: str, share: float) -> None:
    def program(ctx: DistributedContext) -> tuple[int, Any]:
        ctx.all_reduce(noise(ctx.rank, (500, 400)), compression=GradientCompressor(name), name="w")
        there = {2, 3} if ctx.rank < 2 else {0, 1}
        sent, _ = ctx.group.sent()
        return sum(sent[peer] for peer in there), ctx.metrics_snapshot().compression[name]

    flat = results(on_all(group(4), program))
    by_hosts = results(on_all(group(4, hosts=[0, 0, 2, 2]), program))
    before, after = (sum(sent for sent, _ in outcomes) for outcomes in (flat, by_hosts))
    assert after < 1.03 * share * before
    assert sum(one.bytes_after for _, one in by_hosts) == pytest.approx(after, rel=0.02)
    assert sum(one.bytes_before for _, one in by_hosts) == 2 * 800_000  # of each host, what a ring of two would send


@pytest.mark.parametrize("name", ["int8", "topk(0.05)", "powersgd(2)"])
@pytest.mark.parametrize("odd", [1, 4])
def test_a_nan_at_one_rank_of_a_host_is_an_error_at_all(name: str, odd: int) -> None:
    def program(ctx: DistributedContext) -> tuple[dict[int, int], Array]:
        compressor = GradientCompressor(name)
        ctx.all_reduce(noise(ctx.rank, (50, 60)), compression=compressor, name="w")
        before = compressor.residual("w")
        x = noise(ctx.rank, (50, 60))
        if ctx.rank == odd:
            x[7, 7:9] = np.nan
        given = x.copy()
        with pytest.raises(NonFiniteError) as caught:
            ctx.all_reduce(x, compression=compressor, name="w")
        assert compressor.residual("w") is before
        np.testing.assert_array_equal(x, given)
        return caught.value.found, ctx.all_reduce(noise(ctx.rank, (50, 60)), compression=compressor, name="w")

    outcomes = results(on_all(group(5, hosts=LAYOUTS[1]), program))
    assert all(found == {odd: 2} for found, _ in outcomes)
    assert all(np.array_equal(x, outcomes[0][1]) for _, x in outcomes)


@pytest.mark.parametrize("hosts", LAYOUTS)
@pytest.mark.parametrize("odd", [0, -1])
def test_every_rank_of_every_host_hears_that_the_strategies_differ(hosts: list[int], odd: int) -> None:
    odd %= len(hosts)

    def program(ctx: DistributedContext) -> None:
        ctx.all_reduce(noise(0, (64, 64)), compression="int4" if ctx.rank == odd else "int8")

    for outcome in on_all(group(len(hosts), hosts=hosts, config=DistributedConfig(timeout=5)), program):
        assert isinstance(outcome, CollectiveMismatchError)
        assert "compression=int8" in str(outcome)
        assert "compression=int4" in str(outcome)


@pytest.mark.parametrize("hosts", LAYOUTS)
def test_every_rank_of_every_host_hears_of_a_lost_one(hosts: list[int]) -> None:
    backends = SimulatedBackend.create_group(len(hosts), hosts=hosts)
    backends[-1].kill()
    contexts = [DistributedContext(backend) for backend in backends]
    compressors = [GradientCompressor("int8") for _ in hosts]

    def program(ctx: DistributedContext) -> None:
        ctx.all_reduce(noise(ctx.rank, (600, 500)), compression=compressors[ctx.rank], name="w")

    outcomes = on_all(contexts[:-1], program)
    contexts[-1].close()
    assert [type(outcome) for outcome in outcomes] == [PeerLostError] * (len(hosts) - 1)
    assert not any(compressor.names for compressor in compressors)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in NAMES if name != "none"])
@pytest.mark.parametrize("n", [2, 4])
def test_a_nan_at_one_rank_is_an_error_at_all_and_the_group_goes_on(name: str, n: int) -> None:
    def program(ctx: DistributedContext) -> tuple[dict[int, int], Array, Array]:
        compressor = GradientCompressor(name)
        x = noise(ctx.rank, (50, 60))
        ctx.all_reduce(x, compression=compressor, name="w")
        before = compressor.residual("w")
        assert before is not None
        before = before.copy()
        x = noise(ctx.rank, (50, 60))
        if ctx.rank == 1:
            x[7, 7:9] = np.nan
        with pytest.raises(NonFiniteError) as caught:
            ctx.all_reduce(x, compression=compressor, name="w")
        np.testing.assert_array_equal(compressor.residual("w"), before)
        np.testing.assert_array_equal(np.isnan(x).sum(), 2 if ctx.rank == 1 else 0)
        x = noise(ctx.rank, (50, 60))
        return caught.value.found, ctx.all_reduce(x, compression=compressor, name="w"), before

    outcomes = results(on_all(group(n), program))
    assert all(found == {1: 2} for found, _, _ in outcomes)
    assert all(np.array_equal(x, outcomes[0][1]) for _, x, _ in outcomes)


@pytest.mark.parametrize(("name", "n"), [("auto", 2), ("auto", 1), ("int8", 1)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_nan_is_an_error_also_where_nothing_is_compressed(name: str, n: int, dtype: str) -> None:
    kind = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.dtype(dtype)

    def program(ctx: DistributedContext) -> tuple[Array, dict[int, int], int]:
        x = np.ones(5, kind)
        x[2:4] = np.nan if ctx.rank == n - 1 else 1
        with pytest.raises(NonFiniteError) as caught:
            ctx.all_reduce(x, compression=name)
        assert np.isnan(x.astype(np.float32)).sum() == (2 if ctx.rank == n - 1 else 0), "it has changed"
        ctx.all_reduce(x, compression=GradientCompressor(name, on_nonfinite="skip"), name="w")
        return x, caught.value.found, ctx.metrics_snapshot().compression["none"].nonfinite

    outcomes = results(on_all(group(n), program))
    assert [found for _, found, _ in outcomes] == [{n - 1: 2}] * n
    assert all(x.tolist() == [n, n, n - 1, n - 1, n] for x, _, _ in outcomes)
    assert [skipped for _, _, skipped in outcomes] == [0] * (n - 1) + [2]


def test_a_nan_that_is_skipped_is_counted() -> None:
    def program(ctx: DistributedContext) -> tuple[Array, int]:
        x = np.array([1.0, np.inf if ctx.rank else 2.0], np.float32)
        ctx.all_reduce(x, compression=GradientCompressor("fp16", on_nonfinite="skip"), name="w")
        return x, ctx.metrics_snapshot().compression["fp16"].nonfinite

    outcomes = results(on_all(group(2), program))
    np.testing.assert_array_equal(outcomes[0][0], [2, 2])
    assert [count for _, count in outcomes] == [0, 1]


@pytest.mark.parametrize(
    ("one", "other"),
    [("int8", "int4"), ("int8", None), ("topk(0.01)", "topk(0.02)"), ("powersgd(2)", "powersgd(4)"), ("auto", "int8")],
)
def test_ranks_with_different_strategies_are_told_what_each_called(one: str, other: str | None) -> None:
    def program(ctx: DistributedContext) -> None:
        ctx.all_reduce(noise(0, (64, 64)), compression=one if ctx.rank == 0 else other)

    config = DistributedConfig(timeout=5)
    for outcome in on_all(group(2, config=config), program):
        assert isinstance(outcome, CollectiveMismatchError)
        # Without links to measure, auto is by now in the all-reduce that it has chosen.
        assert (f"compression={one}" if one != "auto" else "all_reduce(float32[4096], SUM") in str(outcome)
        assert (f"compression={other}" if other else "all_reduce(float32[4096], SUM") in str(outcome)


def test_a_call_of_every_strategy_is_put_into_words() -> None:
    for name in (*NAMES, "auto", "auto(0.05)", "topk(0.003)+int4"):
        call = calls.encode(Compressed.ALL_REDUCE, CompressionStrategy.parse(name), kind=12, count=9, op=1, keeps=True)
        assert calls.describe(call) == f"all_reduce(float32[9], SUM, compression={name})"
    assert "does not know" in calls.describe(b"\xff" * 16)
    assert calls.describe(b"\x01" + bytes(15)) == "barrier()"


def test_bad_arguments_are_refused_before_a_byte_moves() -> None:
    [ctx, other] = group(2)
    x = np.ones(4, np.float32)
    with pytest.raises(InvalidArgumentError, match="unknown strategy; use one of"):
        ctx.all_reduce(x, compression="zip")
    with pytest.raises(InvalidArgumentError, match="only float16"):
        ctx.all_reduce(np.ones(4, np.int32), compression="int8")
    with pytest.raises(UnsupportedOpError, match="SUM, MEAN or PREMUL_SUM"):
        ctx.all_reduce(x, ReduceOp.MAX, compression="int8")
    with pytest.raises(InvalidArgumentError, match="name"):
        ctx.all_reduce(x, compression=GradientCompressor("int8"))
    with pytest.raises(InvalidArgumentError, match="must have the 4 elements"):
        ctx.all_reduce_compressed(x, ReduceOp.SUM, "int8", [("a", (3,))])
    assert ctx.metrics_snapshot().messages_sent == 0
    ctx.close()
    other.close()


# --- a peer is lost ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8", "topk(0.1)", "powersgd(2)"])
def test_a_step_is_tried_again_after_a_lost_peer_and_nothing_is_lost_or_sent_twice(name: str) -> None:
    compressors = [GradientCompressor(name) for _ in range(3)]

    def step(ctx: DistributedContext, seed: int) -> Array:
        x = noise(seed + ctx.rank, (60, 50))
        ctx.all_reduce(x, compression=compressors[ctx.rank], name="w")
        return x

    first = results(on_all(group(3), lambda ctx: step(ctx, 0)))[0]
    kept = [compressor.residual("w") for compressor in compressors]
    backends = SimulatedBackend.create_group(3)
    backends[2].kill()
    contexts = [DistributedContext(backend) for backend in backends]
    outcomes = on_all(contexts[:2], lambda ctx: step(ctx, 10))
    contexts[2].close()
    assert all(isinstance(outcome, DistributedError) for outcome in outcomes)
    for compressor, before in zip(compressors, kept, strict=True):
        assert compressor.residual("w") is before
    second = results(on_all(group(2), lambda ctx: step(ctx, 10)))[0]
    given = sum(noise(rank, (60, 50)).astype(np.float64) for rank in range(3))
    given = given + sum(noise(10 + rank, (60, 50)) for rank in range(2))
    left = sum(np.asarray(compressor.residual("w")).reshape(60, 50) for compressor in compressors)
    np.testing.assert_allclose(first + second + left, given, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("hosts", [None, [0, 0, 2], [0, 1, 1]])
def test_powersgd_begins_anew_where_a_rank_has_come_later(hosts: list[int] | None) -> None:
    compressors = [GradientCompressor("powersgd(2)") for _ in range(3)]

    def step(ctx: DistributedContext) -> Array:
        x = noise(ctx.rank, (60, 50))
        ctx.all_reduce(x, compression=compressors[ctx.rank], name="w")
        return x

    results(on_all(group(2), step))
    outcomes = results(on_all(group(3, hosts=hosts), step))
    assert all(np.array_equal(outcome, outcomes[0]) for outcome in outcomes)
    factors = [compressor.state_dict()["tensors"]["w"]["factor"] for compressor in compressors]
    assert all(np.array_equal(factor, factors[0]) for factor in factors)


# --- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [[0, 0, 2, 2], [0, 1, 0, 1], [0, 0, 2, 0]])
def test_a_reduce_scatter_adds_up_inside_hosts_of_one_size(hosts: list[int]) -> None:
    def program(ctx: DistributedContext) -> tuple[Array, Array, Array, int, Any, dict[int, int]]:
        compressor = GradientCompressor("int8")
        given, got, part = np.zeros((4, 5000)), np.zeros(5000), np.empty(5000, np.float32)

        def scatter(x: Array) -> None:
            operation = reduce_scatter(ctx.group, x, part, compression=compressor, name="w", metrics=ctx.metrics)
            ctx.issue(operation, async_op=False)

        for step in range(2):
            x = noise(10 * step + ctx.rank, (4, 5000))
            given += x
            scatter(x)
            got += part
        kept = compressor.residual("w")
        assert kept is not None
        sent, _ = ctx.group.sent()
        away = sum(count for peer, count in sent.items() if hosts[peer] != hosts[ctx.rank])
        x = noise(0, (4, 5000))
        x[ctx.rank, 0] = np.inf if ctx.rank == 2 else 0
        with pytest.raises(NonFiniteError) as caught:
            scatter(x)
        assert compressor.residual("w") is kept
        return given, got, kept.reshape(4, 5000), away, ctx.metrics_snapshot().compression["int8"], caught.value.found

    outcomes = results(on_all(group(4, hosts=hosts), program))
    given, kept = sum(outcome[0] for outcome in outcomes), sum(outcome[2] for outcome in outcomes)
    np.testing.assert_allclose(np.array([outcome[1] for outcome in outcomes]) + kept, given, rtol=1e-4, atol=1e-3)
    assert all(outcome[5] == {2: 1} for outcome in outcomes)
    if hosts.count(0) == 2:
        assert sum(outcome[3] for outcome in outcomes) < 1.05 * 2 * 20_000  # one part per rank and step, not two
        assert all(outcome[4].bytes_before == 2 * 20_000 for outcome in outcomes)


@pytest.mark.parametrize("name", ["none", "fp16", "int8", "int4", "onebit"])
def test_reduce_scatter_gives_each_rank_its_part_and_loses_nothing(name: str) -> None:
    def program(ctx: DistributedContext) -> tuple[Array, Array, Array]:
        compressor = GradientCompressor(name)
        given, got = np.zeros((3, 500)), np.zeros(500)
        for step in range(4):
            x, part = noise(10 * step + ctx.rank, (3, 500)), np.empty(500, np.float32)
            given += x
            operation = reduce_scatter(ctx.group, x, part, ReduceOp.SUM, compression=compressor, name="w")
            ctx.issue(operation, async_op=False)
            got += part
        kept = compressor.residual("w")
        assert kept is not None
        return given, got, kept.reshape(3, 500)

    outcomes = results(on_all(group(3), program))
    given, kept = sum(outcome[0] for outcome in outcomes), sum(outcome[2] for outcome in outcomes)
    np.testing.assert_allclose(np.array([outcome[1] for outcome in outcomes]) + kept, given, rtol=1e-4, atol=1e-3)


def test_reduce_scatter_can_only_quantize() -> None:
    [ctx, other] = group(2)
    with pytest.raises(InvalidArgumentError, match="can only quantize"):
        reduce_scatter(ctx.group, noise(0, (2, 3)), np.empty(3, np.float32), compression="topk(0.1)")
    with pytest.raises(InvalidArgumentError, match="2 times the 4 elements"):
        reduce_scatter(ctx.group, noise(0, (2, 3)), np.empty(4, np.float32), compression="int8")
    ctx.close()
    other.close()


# --- average_gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bucket_bytes", [1000, 1 << 20])
def test_gradients_are_averaged_and_what_is_missing_comes_later(name: str, bucket_bytes: int) -> None:
    shapes, steps = {"a": (30, 20), "b": (7,), "c": (2, 3, 40), "d": ()}, 80

    def program(ctx: DistributedContext) -> dict[str, Array]:
        got = {key: np.zeros(shape) for key, shape in shapes.items()}
        for _ in range(steps):
            tree = {key: noise(ctx.rank, shape) for key, shape in shapes.items()}
            average_gradients(ctx, tree, compression=name, bucket_bytes=bucket_bytes)
            for key in got:
                got[key] += tree[key] / steps
        return got

    outcomes = results(on_all(group(2), program))
    for key, shape in shapes.items():
        np.testing.assert_array_equal(outcomes[0][key], outcomes[1][key])
        mean = (noise(0, shape) + noise(1, shape)) / 2
        assert np.linalg.norm(outcomes[0][key] - mean) < 0.3 * np.linalg.norm(mean) + 0.15, key


def test_ranks_that_average_with_different_compression_are_told() -> None:
    def program(ctx: DistributedContext) -> None:
        average_gradients(ctx, {"a": noise(0, (9,))}, compression="int8" if ctx.rank else "int4")

    for outcome in on_all(group(2), program):
        assert isinstance(outcome, CollectiveMismatchError)
        assert "compression=int8" in str(outcome)
        assert "compression=int4" in str(outcome)


# --- auto -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bandwidth", "asked", "chosen"),
    [
        (12.5e6, "auto", "int4"),
        (12.5e6, "auto(0.05)", "int8"),
        (12.5e6, "auto(0.0001)", "none"),
        (12.5e6, "auto(1)", "topk(0.01)+int4"),
        (125e6, "auto", "int4"),
        (10e9, "auto", "none"),
    ],
)
def test_auto_takes_what_is_quickest_within_the_error(bandwidth: float, asked: str, chosen: str) -> None:
    config = DistributedConfig(collective=CollectiveConfig(latency=1e-4, bandwidth=bandwidth))

    def program(ctx: DistributedContext) -> dict[str, Any]:
        ctx.all_reduce(noise(ctx.rank, (400, 500)), compression=asked)
        return dict(ctx.metrics_snapshot().compression)

    for found in results(on_all(group(2, config=config), program)):
        assert list(found) == [chosen]


def test_auto_counts_what_leaves_a_host() -> None:
    config = DistributedConfig(collective=CollectiveConfig(latency=1e-4, bandwidth=12.5e6))

    def program(ctx: DistributedContext) -> tuple[list[str], Any]:
        ctx.all_reduce(noise(ctx.rank, (400, 500)), compression="auto")
        return list(ctx.metrics_snapshot().compression), auto.table_of(ctx.group)

    chosen, table = results(on_all(group(4, config=config, hosts=[0, 0, 2, 2]), program))[0]
    assert chosen == ["int4"]
    count, inside = 200_000, 4 * 200_000 / 2e9  # half of the array each way, twice, between the ranks of a host
    none, int8 = (table.predict(CompressionStrategy.parse(name), [(count,)]) for name in ("none", "int8"))
    speed = table.speeds[CompressionStrategy.INT8]
    assert none == pytest.approx(2e-4 + 4 * count / 12.5e6 + inside)
    codec = count / 2 * (speed.write + 1.5 * speed.read)
    assert int8 == pytest.approx(2e-4 + count * (1 + 4 / 512) / 12.5e6 + codec + inside, rel=1e-3)


def test_auto_is_off_for_ranks_of_one_host(caplog: pytest.LogCaptureFixture) -> None:
    config = DistributedConfig(collective=CollectiveConfig(latency=1e-4, bandwidth=1e6))
    caplog.set_level("INFO", "ringfort.compression")

    def program(ctx: DistributedContext) -> list[str]:
        ctx.all_reduce(noise(ctx.rank, (400, 500)), compression="auto")
        return list(ctx.metrics_snapshot().compression)

    assert results(on_all(group(2, config=config, hosts=[0, 0]), program)) == [["none"], ["none"]]
    assert "auto chose none for 200000 elements: the ranks" in caplog.text


def test_what_was_kept_is_sent_when_auto_turns_compression_off() -> None:
    compressors = [GradientCompressor("topk(0.01)") for _ in range(2)]

    def program(ctx: DistributedContext) -> Array:
        x = noise(ctx.rank, (1000,))
        ctx.all_reduce(x, ReduceOp.MEAN, compression=compressors[ctx.rank], name="w")
        return x

    first = results(on_all(group(2), program))[0]
    for compressor in compressors:
        compressor.strategy = CompressionStrategy.AUTO
    second = results(on_all(group(2, hosts=[0, 0]), program))[0]
    np.testing.assert_allclose(first + second, noise(0, (1000,)) + noise(1, (1000,)), atol=1e-5)
    assert compressors[0].residual("w") is None


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_say_how_many_bytes_and_what_is_left() -> None:
    def program(ctx: DistributedContext) -> Any:
        compressor = GradientCompressor("int8")
        ctx.all_reduce(noise(ctx.rank, (100_000,)), compression=compressor, name="w")
        snapshot = ctx.metrics_snapshot()
        return snapshot, np.linalg.norm(np.asarray(compressor.residual("w")))

    for snapshot, kept in results(on_all(group(2), program)):
        one = snapshot.compression["int8"]
        assert one.count == 1
        assert one.bytes_before == 400_000
        assert one.bytes_after == snapshot.bytes_sent
        assert 3.9 < one.ratio < 4
        assert one.codec_seconds > 0
        assert one.residual_norm == pytest.approx(kept)
        assert snapshot.to_dict()["compression"]["int8"]["ratio"] == one.ratio
        assert "compressed by int8" in str(snapshot)
