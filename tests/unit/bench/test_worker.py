"""How many calls a case gets, and what happens to an engine that lacks it or lies."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from ringfort.bench.engines import ENGINES, OTHERS, choose_engines
from ringfort.bench.engines.base import Bound, Engine
from ringfort.bench.machine import describe_machine
from ringfort.bench.options import MAX_ROUNDS, MIN_ROUNDS, Case, Options
from ringfort.bench.patterns import WrongResultError, new_source
from ringfort.bench.runner import MAX_BURST, Schedule, plan_rounds
from ringfort.bench.worker import UnsupportedError, prepare
from ringfort.bench.workers import WorkersFailedError
from ringfort.errors import InvalidArgumentError, PeerLostError


class FakeEngine:
    """Answers whatever it is given, or raises it."""

    name = "fake"

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def bind(self, case: Case, source: Any) -> Bound:
        if isinstance(self.answer, Exception):
            raise self.answer
        return Bound(lambda: None, lambda: self.answer)


CASE = Case.of("all_reduce", 400, "float32", 2)


def prepared(answer: Any) -> Bound:
    return prepare(cast("Engine", FakeEngine(answer)), 0, CASE, new_source(CASE, 0))


def test_a_wrong_result_ends_the_run() -> None:
    with pytest.raises(
        WrongResultError, match="fake: all_reduce of 400 bytes of float32 among 2 ranks is wrong at rank 0"
    ):
        prepared(np.zeros(100, np.float32))


def test_an_engine_without_the_operation_says_so_with_its_first_line() -> None:
    with pytest.raises(UnsupportedError, match=r"^cannot do that$"):
        prepared(RuntimeError("cannot do that\nat some line of C++"))


def test_a_lost_peer_is_no_reason_to_leave_an_engine_out() -> None:
    with pytest.raises(PeerLostError):
        prepared(PeerLostError(1, "its process died"))


@pytest.mark.parametrize("repeat", [1, 7, 50, 51, 1000])
def test_the_wanted_number_of_calls_is_made_exactly(repeat: int) -> None:
    rounds = plan_rounds({"a": 1e-4, "b": 3e-4}, Options(repeat=repeat))
    assert [sum(calls[name] for calls in rounds) for name in ("a", "b")] == [repeat, repeat]
    assert max(max(calls.values()) for calls in rounds) <= MAX_BURST


@pytest.mark.parametrize(
    ("seconds", "rounds"), [([1e-7], MAX_ROUNDS), ([10.0, 20.0], MIN_ROUNDS), ([0.125, 0.25], 16), ([0.125], 24)]
)
def test_rounds_fill_the_time_within_bounds(seconds: list[float], rounds: int) -> None:
    assert len(plan_rounds({str(taken): taken for taken in seconds}, Options(min_time=3.0))) == rounds


def test_a_slow_engine_does_not_shorten_the_turns_of_a_fast_one() -> None:
    assert plan_rounds({"slow": 0.5, "fast": 1e-3, "tiny": 1e-6}, Options())[0] == {
        "slow": 1,
        "fast": 20,
        "tiny": MAX_BURST,
    }


class FakeWorkers:
    """Answers every command as two ranks would, and fails at the burst of a given number."""

    def __init__(self, name: str, fails_at: int = -1) -> None:
        self.name = name
        self.asked: list[str] = []
        self.fails_at = fails_at

    def ask(self, **command: Any) -> list[dict[str, Any]]:
        self.asked.append(command["do"])
        if self.asked.count("burst") == self.fails_at:
            raise WorkersFailedError(self.name, "rank 1 ended", ["Traceback", "bad"])
        if command["do"] == "burst":
            return [{"nanoseconds": [1000] * command["calls"]}, {"nanoseconds": [2000] * command["calls"]}]
        return [{"nanoseconds": [10**9]}, {"nanoseconds": [2 * 10**9]}]


def schedule(*workers: FakeWorkers) -> Schedule:
    return Schedule({one.name: one.ask for one in workers}, {}, Options(repeat=3))


def test_every_engine_has_its_turn_in_every_round() -> None:
    done: list[float] = []
    row = schedule(FakeWorkers("ringfort"), FakeWorkers("gloo")).measure(CASE, done.append)
    assert {name: (timing.calls, timing.median_us) for name, timing in row.timings.items()} == {
        "ringfort": (3, 2.0),
        "gloo": (3, 2.0),
    }
    assert done == [1 / 3, 2 / 3, 1.0]


def test_another_engine_that_fails_is_left_out_from_then_on_and_said() -> None:
    gloo = FakeWorkers("gloo", fails_at=2)
    both = schedule(FakeWorkers("ringfort"), gloo)
    for _ in range(2):
        row = both.measure(CASE, lambda _: None)
        assert set(row.timings) == {"ringfort"}
        assert row.skipped == {"gloo": "gloo: rank 1 ended"}
    assert gloo.asked.count("prepare") == 1


def test_one_of_ours_that_fails_ends_the_run() -> None:
    with pytest.raises(WorkersFailedError, match="plain: rank 1 ended"):
        schedule(FakeWorkers("ringfort"), FakeWorkers("plain", fails_at=1)).measure(CASE, lambda _: None)


def test_the_engines_that_are_installed_are_compared_with_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENGINES["gloo"], "available", classmethod(lambda cls: True))
    assert choose_engines(None) == (("gloo",), {})
    monkeypatch.setattr(ENGINES["gloo"], "available", classmethod(lambda cls: False))
    assert choose_engines(None) == ((), {})
    assert choose_engines("none") == ((), {})


def test_what_was_asked_for_and_is_missing_is_named_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENGINES["mlx"], "available", classmethod(lambda cls: False))
    assert choose_engines("plain, mlx") == (("plain",), {"mlx": "pip install 'ringfort[bench]'"})
    assert set(choose_engines("all").names) | set(choose_engines("all").missing) == set(OTHERS)
    with pytest.raises(InvalidArgumentError, match="against='nccl'"):
        choose_engines("plain,nccl")


def test_the_machine_is_described_with_versions_of_what_is_installed() -> None:
    machine = describe_machine(["numpy", "no-such-package"])
    assert machine["processor"]
    assert machine["threads"] >= machine["cores"] >= 1
    assert set(machine["versions"]) == {"python", "numpy"}
