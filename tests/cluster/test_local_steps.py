"""`LocalSteps` between processes: unequal speeds, the same bits after every round, a peer that dies."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

import ringfort
from ringfort import DistributedContext, LocalSteps


def train(ctx: DistributedContext, codec: str, rounds: int, delays: tuple[float, ...], *, doomed: int = -1) -> Any:
    """Train a linear model, each rank on samples of its own and at its own speed. Return what it saw."""
    random = np.random.default_rng(100 + ctx.rank)
    truth = np.random.default_rng(7).standard_normal(300).astype(np.float32)
    tree = {"w": np.random.default_rng(ctx.rank).standard_normal(300).astype(np.float32)}
    local = LocalSteps(ctx, tree, every=10, codec=codec, outer_rate=1.0, outer_momentum=0.0)  # type: ignore[arg-type]
    bits, steps, last = [], [], 0
    for step in range(10_000):
        x = random.standard_normal((16, 300)).astype(np.float32)
        tree["w"] -= 0.02 * x.T @ (x @ (tree["w"] - truth)) / 16
        time.sleep(delays[ctx.rank])
        local.step(samples=16)
        if local.ended_round:
            bits.append(tree["w"].tobytes())
            steps.append(step + 1 - last)
            last = step + 1
            if local.number == 2 and ctx.rank == doomed:
                os.kill(os.getpid(), signal.SIGKILL)
        if local.number == rounds:
            return bits, steps, float(np.linalg.norm(tree["w"] - truth) / np.linalg.norm(truth)), local.samples
    raise AssertionError


@pytest.mark.parametrize(("codec", "most"), [("none", 0.2), ("int4", 0.2), ("sparse", 0.9)])  # 5 of 300 each
def test_unequal_ranks_agree_to_the_bit_after_each_round_and_learn(codec: str, most: float) -> None:
    with ringfort.local(2) as group:
        (one, fast, error, samples), (other, slow, _, same) = group.run(train, codec, 25, (0.004, 0.012))
    assert one == other
    assert len(set(one)) == 25
    assert samples == same == 16 * (sum(fast) + sum(slow))
    assert fast[1:] == [10] * 24
    assert all(1 <= count <= 8 for count in slow[3:]), slow  # a third, if nothing else used the processor
    assert error < most, error


def train_in_turns(ctx: DistributedContext, samples: int, delays: tuple[float, ...]) -> Any:
    """The same with parts that take turns, beside collectives of the program's own."""
    random = np.random.default_rng(100 + ctx.rank)
    truth = np.random.default_rng(7).standard_normal(300).astype(np.float32)
    tree = {"w": np.random.default_rng(ctx.rank).standard_normal(300).astype(np.float32)}
    local = LocalSteps(ctx, tree, every=8, codec="int8", fragments=4)
    steps, sums = 0, []
    while local.samples < samples:
        x = random.standard_normal((16, 300)).astype(np.float32)
        tree["w"] -= 0.02 * x.T @ (x @ (tree["w"] - truth)) / 16
        time.sleep(delays[ctx.rank])
        local.step(samples=16)
        steps += 1
        if steps <= 5:  # as many as every rank makes in the first round
            sums.append(float(ctx.all_reduce(np.ones(1))[0]))
    local.end_round()
    error = float(np.linalg.norm(tree["w"] - truth) / np.linalg.norm(truth))
    return tree["w"].tobytes(), error, local.samples, sums


def test_unequal_ranks_whose_parts_take_turns_end_with_the_same_bits() -> None:
    with ringfort.local(2) as group:
        one, other = group.run(train_in_turns, 5000, (0.004, 0.01))
    assert one == other
    _, error, samples, sums = one
    assert error < 0.2, error
    assert samples >= 5000
    assert sums == [2.0] * 5


def test_a_peer_that_dies_in_a_round_is_an_error_and_not_a_hang() -> None:
    with ringfort.local(2) as group, pytest.raises(ringfort.DistributedError, match=r"ank 1"):
        group.run(train, "int8", 25, (0.001, 0.001), doomed=1)
