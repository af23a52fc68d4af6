"""What the benchmark of slow links says of runs and times that are known."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks import slow_links as bench, slow_links_learning as learning

ENDS = {
    "alone": 2.0,
    "alone, 1.25 times as long": 1.9,
    "alone, 1.5 times as long": 1.7,
    "DDP": 2.0,
    "two fast machines": 2.0,
}


def run(name: str, loss: float, units: int = 100, seed: int = 0) -> dict[str, Any]:
    """Loss falls in a straight line from 4."""
    curve = [[share * units, 4 - (4 - loss) * share] for share in (0.25, 0.5, 0.75, 1.0)]
    return {"name": name, "seed": seed, "loss": loss, "units": units, "curve": curve, "parameters": 1}


def outcomes(loss: float = 1.9, **times: Any) -> bench.Outcomes:
    runs = {arm.name: [run(arm.name, ENDS.get(arm.name, loss), int(100 * arm.longer))] for arm in learning.ARMS}
    ways = {row.way: {"seconds": 1.0, "bytes": 10.0} for row in bench.ROWS}
    ways["DDP"] = {"seconds": 20.0, "bytes": 5000.0}
    ways["auto"] = {"seconds": 1.0, "bytes": 10.0, "every": 6, "codec": "int4", "why": ""}
    return bench.Outcomes(runs, ways | times)


def judged(found: bench.Outcomes, what: str) -> bench.Judgement:
    return next(one for one in found.judge() if what in one.what)


def test_a_way_is_compared_by_when_it_has_the_loss_of_the_other() -> None:
    one = judged(outcomes(), "DDP over Gloo")
    assert one.auto == pytest.approx(2000 / (100 * 2 / 2.1))  # loss 2 on the way from 4 to 1.9
    assert one.keeps(one.auto)
    assert judged(outcomes(loss=2.1), "DDP over Gloo").auto is None  # it never gets there
    assert not one.keeps(None)


def test_the_machine_alone_has_runs_of_several_lengths_to_compare_with() -> None:
    assert judged(outcomes(loss=1.9), "machine alone").auto == pytest.approx(1.25)
    assert judged(outcomes(loss=1.85), "machine alone").auto == pytest.approx(1.3125)
    slow = {"seconds": 2.0, "bytes": 10.0, "every": 6, "codec": "int4", "why": ""}
    assert judged(outcomes(auto=slow), "machine alone").auto == pytest.approx(0.625)


def test_a_share_is_kept_below_and_a_factor_above() -> None:
    assert bench.Judgement("", 0.015, 0.0, None, None, "", is_share=True).keeps(0.01)
    assert not bench.Judgement("", 0.015, 0.0, None, None, "", is_share=True).keeps(0.02)
    assert not bench.Judgement("", 10, 0.0, None, None, "").keeps(9.9)


def test_arms_that_are_compared_have_the_same_seeds() -> None:
    runs = {arm.name: [run(arm.name, 2.0, seed=seed) for seed in (0, 1)] for arm in learning.ARMS}
    runs["DDP"].pop()
    runs[learning.FOUR].clear()
    found = bench._complete(runs)
    assert [one["seed"] for one in found["alone"]] == [0]
    assert len(found["DDP, accumulation 4"]) == 2
    assert learning.FOUR not in found


@pytest.mark.parametrize(
    ("every", "codec", "arm"), [(7, "sparse", "local, 6, sparse, 3"), (30, "none", "local, 20, none, 1")]
)
def test_auto_learns_like_the_arm_that_is_the_most_like_it(every: int, codec: str, arm: str) -> None:
    found = outcomes(auto={"seconds": 1.0, "bytes": 1.0, "every": every, "codec": codec, "why": ""})
    assert found.arm(bench.ROWS[-1]) == arm
