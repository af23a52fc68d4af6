"""Works and the runner: what is queued runs in order, whoever runs it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ringfort.collectives.work import Runner, Work


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
