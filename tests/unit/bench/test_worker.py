"""How many calls a case gets, and what happens to an engine that lacks it or lies."""

from __future__ import annotations

import json
from typing import Any, cast

import numpy as np
import pytest

from ringfort.bench.engines import ENGINES, Bound, Engine, choose_engines
from ringfort.bench.machine import describe_machine
from ringfort.bench.options import MAX_REPEATS, MIN_REPEATS, Case, Options
from ringfort.bench.patterns import WrongResultError, new_source
from ringfort.bench.worker import MAX_BURST, prepare, schedule
from ringfort.errors import PeerLostError


class FakeContext:
    rank = 0
    world_size = 2
    is_master = True


class FakeEngine:
    """Answers whatever it is given, or raises it."""

    name = "fake"

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def bind(self, case: Case, strategy: str, source: Any) -> Bound:
        if isinstance(self.answer, Exception):
            raise self.answer
        return Bound(lambda: None, lambda: self.answer)


CASE = Case.of("all_reduce", 400, "float32", 2)


def prepared(answer: Any) -> Bound | None:
    engine = cast("Engine", FakeEngine(answer))
    return prepare(cast("Any", FakeContext()), engine, CASE, new_source(CASE, 0), "auto")


def test_a_wrong_result_ends_the_run() -> None:
    with pytest.raises(
        WrongResultError, match="fake: all_reduce of 400 bytes of float32 among 2 ranks is wrong at rank 0"
    ):
        prepared(np.zeros(100, np.float32))


def test_an_engine_without_the_operation_is_left_out_with_its_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert prepared(RuntimeError("cannot do that\nat some line of C++")) is None
    told = json.loads(capsys.readouterr().out)
    assert told == {"kind": "skipped", "engine": "fake", "bytes": 400, "why": "cannot do that"}


def test_a_lost_peer_is_no_reason_to_leave_an_engine_out() -> None:
    with pytest.raises(PeerLostError):
        prepared(PeerLostError(1, "its process died"))


@pytest.mark.parametrize("repeat", [1, 7, 50, 51, 1000])
def test_the_wanted_number_of_calls_is_made_exactly(repeat: int) -> None:
    bursts = schedule([1e-4, 3e-4], Options(repeat=repeat))
    assert sum(bursts) == repeat
    assert max(bursts) <= MAX_BURST


@pytest.mark.parametrize(
    ("seconds", "calls"), [([1e-7], MAX_REPEATS), ([10.0, 20.0], MIN_REPEATS), ([0.01, 0.03], 75), ([0.02], 75)]
)
def test_calls_fill_the_time_within_bounds(seconds: list[float], calls: int) -> None:
    assert sum(schedule(seconds, Options(min_time=1.5))) == calls


def test_slow_calls_take_turns_one_by_one() -> None:
    assert set(schedule([0.5, 1.0], Options())) == {1}


def test_the_engines_that_are_installed_are_compared_with_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENGINES["gloo"], "available", classmethod(lambda cls: True))
    assert choose_engines(None) == ("gloo",)
    monkeypatch.setattr(ENGINES["gloo"], "available", classmethod(lambda cls: False))
    assert choose_engines(None) == ()
    assert choose_engines("none") == ()


def test_the_machine_is_described_with_versions_of_what_is_installed() -> None:
    machine = describe_machine(["numpy", "no-such-package"])
    assert machine["processor"]
    assert machine["threads"] >= machine["cores"] >= 1
    assert set(machine["versions"]) == {"python", "numpy"}
