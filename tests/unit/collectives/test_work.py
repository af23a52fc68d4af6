"""Works and the runner: what is queued runs in order, whoever runs it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ringfort.collectives.work import Runner, Work
from ringfort.telemetry import step_time
from ringfort.telemetry.step_time import Phase, StepTime
from ringfort.telemetry.trace import own_trace


@pytest.fixture
def runner() -> Iterator[Runner]:
    runner = Runner("test")
    yield runner
    runner.close(wait=True)


@pytest.fixture
def threadless(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that is so busy that the runner's own thread never comes to run."""
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    monkeypatch.setattr(threading.Thread, "join", lambda self, timeout=None: None)


@pytest.mark.usefixtures("threadless")
def test_who_waits_runs_what_is_queued_before_it_and_nothing_behind_it() -> None:
    runner, ran = Runner("test"), list[tuple[str, int]]()
    works = [
        runner.submit(name, lambda name=name: ran.append((name, threading.get_ident()))) for name in ("a", "b", "c")
    ]
    works[1].wait()
    assert ran == [("a", threading.get_ident()), ("b", threading.get_ident())]
    assert [work.is_completed() for work in works] == [True, True, False]
    works[2].wait()
    assert [name for name, _ in ran] == ["a", "b", "c"]


@pytest.mark.usefixtures("threadless")
def test_an_error_of_one_that_was_run_on_the_way_belongs_to_who_waits_for_that() -> None:
    runner = Runner("test")
    bad, good = runner.submit("bad", lambda: 1 // 0), runner.submit("good", lambda: 7)
    assert good.wait() == 7
    with pytest.raises(ZeroDivisionError):
        bad.wait()


@pytest.mark.usefixtures("threadless")
def test_the_main_thread_runs_nothing_with_callbacks_for_an_interrupt_would_lose_them() -> None:
    runner, ran = Runner("test"), list[str]()
    runner.submit("a", lambda: ran.append("a"))
    last = runner.submit("b", lambda: ran.append("b"))
    last.add_done_callback(lambda _: ran.append("called"))
    runner._help_out(last)
    assert ran == ["a"]


def test_nobody_overtakes_what_is_running(runner: Runner) -> None:
    begun, go = threading.Event(), threading.Event()
    ran: list[str] = []

    def first() -> None:
        begun.set()
        go.wait(10)
        ran.append("first")

    runner.submit("first", first)
    assert begun.wait(10)
    second = runner.submit("second", lambda: ran.append("second"))
    waiter = threading.Thread(target=second.wait)
    waiter.start()
    go.set()
    waiter.join(10)
    assert ran == ["first", "second"]


def test_a_callback_is_called_once_whether_it_came_early_or_late() -> None:
    work, called = Work("x"), list[Work]()
    work.add_done_callback(called.append)
    assert called == []
    work.run(lambda: 1)
    work.add_done_callback(called.append)
    assert called == [work, work]


def test_a_callback_may_wait_for_what_is_queued_behind_it_and_for_what_it_queues(runner: Runner) -> None:
    go, ended = threading.Event(), threading.Event()
    results: list[int] = []
    first = runner.submit("first", lambda: go.wait(10))
    second = runner.submit("second", lambda: 2)

    def follow(_: Work) -> None:
        # By the future: who waits for it inside C++ cannot help out.
        results.append(second._future.result(10))
        results.append(runner.submit("third", lambda: 3)._future.result(10))
        results.append(runner.run("fourth", lambda: 4))
        ended.set()

    first.add_done_callback(follow)
    go.set()
    assert ended.wait(10)
    assert results == [2, 3, 4]


def test_callbacks_wait_for_each_other_however_deep(runner: Runner) -> None:
    def descend(level: int) -> None:
        done = threading.Event()
        work = runner.submit("level", lambda: None)
        work.add_done_callback(lambda _: (descend(level - 1) if level else None, done.set()))
        assert done.wait(10)

    descend(20)


def test_one_thread_serves_again_when_callbacks_have_ended(runner: Runner) -> None:
    threads: set[str] = set()
    for _ in range(50):
        done = threading.Event()
        work = runner.submit("x", lambda: threads.add(threading.current_thread().name))
        work.add_done_callback(lambda _, done=done: done.set())
        assert done.wait(10)
    assert len(runner._threads) <= 2


def test_what_a_callback_raises_is_logged_and_the_next_is_called(caplog: pytest.LogCaptureFixture) -> None:
    work, called = Work("x"), list[Work]()
    work.add_done_callback(lambda _: 1 // 0)
    work.add_done_callback(called.append)
    work.run(lambda: 1)
    assert called == [work]
    assert "A callback of <Work x: done> failed" in caplog.text


class Ticks:
    """A clock that counts how often it is looked at; each look takes a second."""

    looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return float(self.looks)


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    found = Ticks()
    monkeypatch.setattr(step_time, "perf_counter", found)
    monkeypatch.setattr(own_trace(), "time", StepTime(lambda: 100.0))
    return found


def exchanged() -> float:
    return own_trace().time._spent[Phase.EXCHANGE]


def test_only_a_wait_that_blocks_looks_at_the_clock(runner: Runner, ticks: Ticks) -> None:
    begun, go = threading.Event(), threading.Event()

    def action() -> None:
        begun.set()
        go.wait()

    work = runner.submit("slow", action)
    begun.wait()
    work.add_done_callback(lambda _: None)
    waiter = threading.Thread(target=work.wait)
    waiter.start()
    while not ticks.looks:
        pass
    go.set()
    waiter.join()
    assert (ticks.looks, exchanged()) == (2, 1.0)
    work.wait()
    work.result()
    assert (ticks.looks, exchanged()) == (2, 1.0)
    runner.run("in this thread", lambda: None)
    assert (ticks.looks, exchanged()) == (4, 2.0)


def test_what_callbacks_wait_for_is_not_waited_for_by_the_program(runner: Runner, ticks: Ticks) -> None:
    done = threading.Event()

    def callback(_: Work) -> None:
        runner.submit("more", lambda: None).wait()
        done.set()

    runner.submit("first", lambda: None).add_done_callback(callback)
    done.wait()
    assert exchanged() == 0.0
