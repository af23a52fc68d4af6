"""What a participant adds up for its program, in no cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

import ringfort
from ringfort.config import AutoDiscoveryConfig
from ringfort.errors import InvalidArgumentError
from ringfort.training.elastic import local_sum
from ringfort.training.elastic.array_source import ArraySource
from ringfort.training.elastic.dealing import Data, RunEnd
from ringfort.training.elastic.exchange import SUMS, inspect
from ringfort.training.elastic.journal import Journal
from ringfort.training.elastic.local_sum import LocalSum
from ringfort.training.elastic.options import Options
from ringfort.training.elastic.participant import Participant
from ringfort.training.elastic.protocol import Compute, Mark, Result
from ringfort.training.elastic.state_tree import StateTree
from ringfort.training.elastic.step import Turn

DATA = Data(samples=8, batch=8, microbatch=4)
W = {"w": np.ones(3)}


@pytest.fixture
def run() -> Iterator[Participant]:
    options = Options(
        name="alone", nodes="1:", checkpoint=None, every=1, keep=1, patience=None, nonfinite="error",
        config=AutoDiscoveryConfig(interfaces=["127.0.0.1"]), group=None,
    )  # fmt: skip
    state, journal = StateTree({"w": np.zeros(3)}), Journal(lambda *_: None)
    participant = Participant(options, state, LocalSum(), DATA, RunEnd(5), journal)
    yield participant
    participant.close("the test is over")


def added(run: Participant, found: Turn, gradients: Any, count: Any, loss: Any) -> None:
    ArraySource(run, cast("LocalSum", run.local)).add(found, gradients, count, loss)


def turn(run: Participant, part: int) -> Turn:
    found = Turn(Compute(1, part, run.replica.span), run.replica.mark)
    run.samples_of(found)
    return found


@pytest.mark.parametrize("loss", ["0.5", b"1", None, True, [1.0], np.ones(1), np.ones(2), 1j, {}, 10**400])
def test_a_loss_that_is_no_number_is_named_and_nothing_is_added(run: Participant, loss: Any) -> None:
    added(run, turn(run, 0), W, None, 2.0)
    second = turn(run, 1)
    with pytest.raises(InvalidArgumentError, match=r"^loss=.*must be one number"):
        added(run, second, W, None, loss)
    assert (run.replica.covered, run.local.count) == ({0}, 0.5)
    added(run, second, W, None, 4.0)  # a program that caught it
    assert (run.replica.covered, run.local.count, run.local.loss) == ({0, 1}, 1.0, 3.0)
    assert run.local.own()["float64"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("loss", [1, 1.0, np.float32(1), np.array(1.0), np.int64(1)])
def test_a_loss_is_a_number_of_any_framework(run: Participant, loss: Any) -> None:
    added(run, turn(run, 0), W, None, loss)
    assert run.local.loss == 0.5


@pytest.mark.parametrize("count", [-1, float("nan"), float("inf"), "4", True, np.ones(1)])
def test_a_weight_that_is_none_is_named_before_the_first_sum_is_begun(run: Participant, count: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^count="):
        added(run, turn(run, 0), W, count, 0.0)
    assert (run.replica.covered, run.local.count) == (set(), 0.0)


@pytest.mark.parametrize("counts", [(0, 4), (4, 0), (0.0, np.int64(4))])
def test_a_micro_batch_of_padding_alone_counts_for_nothing(run: Participant, counts: Any) -> None:
    """Its means are those of nothing: NaN."""
    for part, count in enumerate(counts):
        values = {"w": np.full(3, 6.0 if count else np.nan)}
        added(run, turn(run, part), values, count, 3.0 if count else float("nan"))
    assert run.replica.covered == {0, 1}
    assert (run.local.count, run.local.loss) == (0.5, 1.5)
    assert cast("LocalSum", run.local).mean(run.local.own(), run.local.count)["w"].tolist() == [6, 6, 6]


@pytest.mark.parametrize("where", ["in the sum", "before it is noted"])
def test_a_micro_batch_whose_addition_was_interrupted_never_counts_twice(
    run: Participant, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The handler of a signal, such as that of an alarm, raises an error that the program catches. Nobody knows then
    how much was added, and sums cannot be taken apart."""
    both = {"a": np.ones(3), "b": np.ones(3)}
    added(run, turn(run, 0), both, None, 0.0)
    second = turn(run, 1)
    with monkeypatch.context() as patched:
        if where == "in the sum":
            whole, calls = local_sum._add_scaled, list[int]()

            def interrupted(*arguments: Any) -> None:
                calls.append(1)
                if len(calls) == 2:
                    raise TimeoutError
                whole(*arguments)

            patched.setattr(local_sum, "_add_scaled", interrupted)
        else:
            patched.setattr(run.replica, "add", raises_timeout)
        with pytest.raises(TimeoutError):
            added(run, second, both, None, 0.0)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="was interrupted"):
            added(run, second, both, None, 0.0)
    assert run.replica.covered == {0}


def raises_timeout(*_: Any) -> None:
    raise TimeoutError


def test_the_first_micro_batch_of_a_step_is_added_anew_after_an_interrupt(
    run: Participant, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(run.replica, "add", raises_timeout)
        with pytest.raises(TimeoutError):
            added(run, turn(run, 0), W, None, 2.0)
    added(run, turn(run, 0), W, None, 2.0)
    assert (run.local.count, run.local.loss, run.local.own()["float64"].tolist()) == (0.5, 1.0, [0.5] * 3)


def test_a_micro_batch_is_added_once_if_the_interrupt_came_when_all_was_done(run: Participant) -> None:
    first, second = turn(run, 0), turn(run, 1)
    for one in (first, first, second, second):
        added(run, one, W, None, 2.0)
    assert (run.local.count, run.local.loss, run.local.own()["float64"].tolist()) == (1.0, 2.0, [1] * 3)


def test_a_step_of_padding_alone_is_skipped_by_everybody_who_applies_it(run: Participant) -> None:
    for part in range(2):
        added(run, turn(run, part), {"w": np.full(3, np.nan)}, 0, float("nan"))
    sums = {**run.local.own(), SUMS: np.array([run.local.count, run.local.loss])}
    result = Result("b@1", 1, 8, sums)
    assert inspect(result, 0, 1)[1]  # an error for non-finite gradients would be a wrong one
    assert run.done(result, Mark(), is_finite=True).is_empty


@pytest.mark.parametrize("size", [3, 100_000])
def test_a_mean_that_was_changed_in_place_is_an_error_if_it_is_the_result_itself(size: int) -> None:
    state, applied = {"w": np.zeros(size)}, list[int]()
    config = AutoDiscoveryConfig(interfaces=["127.0.0.1"])

    def train(batch: int) -> None:
        with ringfort.elastic(state, nodes="1:", name=f"alone-{batch}", config=config) as run:
            for step in run.steps(3, samples=batch, batch=batch, microbatch=batch):
                for _ in step:
                    step.add({"w": np.ones(size)})
                mean = step.mean()["w"]
                state["w"] += mean
                if step.number == 2:
                    mean.flags.writeable = True  # what torch.from_numpy does, in effect
                    mean *= 0.5
                applied.append(step.number)

    with pytest.raises(InvalidArgumentError, match=r"^step\.mean\(\)=.*of step 2.*change a copy"):
        train(8)
    assert applied == [1, 2]
    train(6)  # the mean has its own memory
    assert applied == [1, 2, 1, 2, 3]
