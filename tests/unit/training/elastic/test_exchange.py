"""What members send each other, over a group of one."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest

from ringfort import Backend, DistributedConfig, DistributedContext
from ringfort.errors import ProtocolError
from ringfort.testing.groups import tcp_group
from ringfort.testing.ranks import results, run_ranks
from ringfort.training.elastic.exchange import SUMS, Exchange, inspect, nonfinite_of
from ringfort.training.elastic.local_sum import LocalSum
from ringfort.training.elastic.protocol import Mark, Report, Result, Token
from ringfort.training.elastic.state_tree import StateTree, hashed
from ringfort.training.elastic.token_codec import TokenCodec


class Alone:
    """A group of one rank that may receive something else from rank 0."""

    def __init__(self) -> None:
        self.wire = b""
        self.reductions = 0

    def all_gather_object(self, value: bytes) -> list[bytes]:
        return [value]

    def all_gather(self, x: Any) -> Any:
        return x[None]

    rank, world_size = 0, 1

    def all_reduce(self, x: Any, out: Any = None) -> Any:
        self.reductions += 1
        if out is None:
            return x
        out[...] = x
        return out

    def broadcast_object(self, value: bytes, root: int) -> bytes:
        self.wire = value or self.wire
        return self.wire

    def broadcast(self, x: Any, root: int) -> Any:
        return x


def exchange() -> tuple[Exchange, LocalSum]:
    local = LocalSum()
    local.add({"w": np.arange(3, dtype=np.float32)}, 2.0)
    return Exchange(local, TokenCodec(4)), local


ALONE = cast("Any", Alone())


def test_a_result_that_somebody_has_is_not_overwritten() -> None:
    local = LocalSum()
    local.add({"w": np.arange(100_000, dtype=np.float32)}, 2.0)
    found = Exchange(local, TokenCodec(4))
    results = [found.reduce(ALONE) for _ in range(5)]
    assert len({result["float32"].ctypes.data for result in (*results, local.buffers)}) == 6
    for result in results:
        np.testing.assert_array_equal(result["float32"], 2 * np.arange(100_000))
        np.testing.assert_array_equal(result[SUMS], [2, 0])


@pytest.mark.parametrize("size", [0, 1, 1000, 1 << 19])
@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_weights_and_losses_travel_with_the_gradients_and_nothing_is_rounded(kind: str, size: int) -> None:
    """Each member's as they are, however small one is beside another, infinite or not a number."""
    weights, losses = (0.0, 2.0**24 + 1, 1 / 3), (1e-300, -0.1, 1e16)

    def work(backend: Backend) -> tuple[list[float], list[float]]:
        context, local = DistributedContext(backend), LocalSum()
        local.add({"w": np.full(size, 2, kind), "v": np.ones(3)}, 1.0)
        local.count, local.loss = weights[backend.rank], losses[backend.rank]
        found = Exchange(local, TokenCodec(4))
        first = found.reduce(context)
        means = local.mean(first, 1.0)
        assert (means["w"] == 6).all()
        assert means["v"].tolist() == [3, 3, 3]
        local.loss = (1.0, float("inf"), float("-inf"))[backend.rank]
        return first[SUMS].tolist(), found.reduce(context)[SUMS].tolist()

    with tcp_group(3, DistributedConfig(timeout=30, shared_memory="off")) as backends:
        found = results(run_ranks(backends, work))
    for first, second in found:
        assert first == [0.0 + (2.0**24 + 1) + 1 / 3, 1e-300 - 0.1 + 1e16]
        assert math.isnan(second[1])


@pytest.mark.parametrize(("members", "collectives"), [(1, 1), (64, 1), (65, 2)])
def test_a_step_has_one_reduction_unless_there_are_very_many_members(members: int, collectives: int) -> None:
    found, local = exchange()
    local.loss = 3.0
    group = Alone()
    group.world_size = members
    result = found.reduce(cast("Any", group))
    assert (group.reductions, result[SUMS].tolist(), result["float32"].tolist()) == (collectives, [2, 3], [0, 2, 4])


def test_gradients_must_be_finite_and_a_state_need_not_be() -> None:
    values = np.ones(10, np.float32)
    result = Result("b", 1, 1, {"float32": values, SUMS: np.ones(2)})
    assert [inspect(result, me, 2)[1] for me in range(2)] == [True, True]
    values[7] = np.nan
    assert [inspect(result, me, 2)[1] for me in range(2)] == [False, True]
    values[7], result.payload[SUMS][1] = 1, np.inf
    assert [inspect(result, me, 2)[1] for me in range(2)] == [True, False]
    state = Result("b", 1, 1, StateTree({"w": np.full(3, np.nan)}).image(), is_state=True)
    assert inspect(state, 0, 1)[1]


def test_what_is_not_finite_is_named() -> None:
    found, local = exchange()
    local.add({"w": np.ones(3, np.float32)}, 1.0)
    assert nonfinite_of(found.own_sums) == ""
    local.loss = float("nan")
    assert nonfinite_of(found.own_sums) == nonfinite_of(found.reduce(ALONE)) == "loss"
    local.add({"w": np.full(3, np.inf, np.float32)}, 1.0)
    assert nonfinite_of(found.own_sums) == nonfinite_of(found.reduce(ALONE)) == "gradients and loss"
    local.loss = 0.0
    assert nonfinite_of(found.own_sums) == "gradients"


def test_reports_and_tokens_go_round() -> None:
    found, _ = exchange()
    report = Report(Mark("b@1", 3), covered=frozenset({1}), speed=5)
    assert found.reports(ALONE, report) == [report]
    assert found.tokens(ALONE, Token(("b", 1, 2, 3), 9))[0].digest == 9
    assert found.flags(ALONE, False) == [False]
    found.agree(ALONE)


def test_a_result_or_state_of_another_size_is_refused_before_memory_is_taken() -> None:
    sender, receiver, group = exchange()[0], exchange()[0], cast("Any", Alone())
    own = StateTree({"w": np.zeros(3)})
    good = Result("b", 1, 1, {"float32": np.ones(3, np.float32), SUMS: np.ones(2)})
    assert sender.share(group, 0, good, own) is good
    found = receiver.share(group, 0, None, own)
    assert (found, set(found.payload)) == (good, {"float32", SUMS})
    for bad in (
        Result("b", 1, 1, {"float32": np.ones(4, np.float32), SUMS: np.ones(2)}),
        Result("b", 1, 1, {"float64": np.ones(3), SUMS: np.ones(2)}),
        Result("b", 1, 1, StateTree({"w": np.zeros(4)}).image(), is_state=True),
    ):
        sender.share(group, 0, bad, own)
        with pytest.raises(ProtocolError):
            receiver.share(group, 0, None, own)
    later = StateTree({"w": np.zeros(3), "late": np.ones(5)}).image()
    for image in (later, hashed(later)):  # that of a checkpoint has hashes
        sender.share(group, 0, Result("b", 1, 1, image, is_state=True), own)
        assert receiver.share(group, 0, None, own).payload.data.nbytes == later.data.nbytes
    large = StateTree({"w": np.zeros(3), "late": np.ones((64 << 20) // 8 + 100)}).image()
    sender.share(group, 0, Result("b", 1, 1, large, is_state=True), own)
    with pytest.raises(ProtocolError, match="the limit is"):
        receiver.share(group, 0, None, own)
    group.wire = b"\xc1"
    with pytest.raises(ProtocolError, match="malformed"):
        receiver.share(group, 0, None, own)
