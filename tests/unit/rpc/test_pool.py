"""A fixed number of workers, a bounded queue, and workers that help while they wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from ringfort.rpc.pool import Pool
from tests.helpers.agents import until


class Task:
    def __init__(self, action: Callable[[], object], depth: int = 0) -> None:
        self.action = action
        self.depth = depth
        self.is_cancelled = False
        self.ended = threading.Event()


def run(task: Task) -> None:
    task.action()
    task.ended.set()


@contextmanager
def pool(workers: int, max_queued: int = 100) -> Iterator[Pool]:
    made = Pool("test", workers, max_queued, run)
    try:
        yield made
    finally:
        made.close()


def test_no_more_run_at_once_than_there_are_workers_and_the_queue_has_a_bound() -> None:
    gate = threading.Event()
    with pool(2, max_queued=3) as made:
        tasks = [Task(lambda: gate.wait(20)) for _ in range(5)]
        assert [made.submit(task) for task in tasks] == [True] * 5
        assert made.queued == 3
        assert made.is_running
        refused = Task(lambda: None)
        assert not made.submit(refused)
        tasks[4].is_cancelled = True  # given up: makes room
        assert made.submit(refused)
        gate.set()
        assert all(task.ended.wait(20) for task in [*tasks[:4], refused])


def test_a_worker_that_waits_runs_what_is_deeper_and_nothing_else() -> None:
    future: Future[Any] = Future()
    order: list[str] = []
    with pool(1) as made:

        def outer() -> None:
            waits.set()
            assert made.help_until(future, 1)
            order.append("outer")

        waits = threading.Event()
        first = Task(outer, depth=1)
        assert made.submit(first)
        assert waits.wait(20)
        until(lambda: bool(made._waiting), "it does not help")
        shallow = Task(lambda: order.append("shallow"), depth=1)
        deep = Task(lambda: order.append("deep"), depth=2)
        assert made.submit(shallow)
        assert made.submit(deep)
        assert deep.ended.wait(20)
        assert not shallow.ended.is_set()
        future.set_result(None)
        assert shallow.ended.wait(20)
        assert order == ["deep", "outer", "shallow"]


def test_a_worker_helps_also_within_what_it_helps_with() -> None:
    futures: list[Future[Any]] = [Future(), Future(), Future()]
    with pool(1) as made:

        def level(depth: int) -> Callable[[], None]:
            def act() -> None:
                started[depth].set()
                made.help_until(futures[depth], depth)

            return act

        started = [threading.Event() for _ in futures]
        tasks = [Task(level(depth), depth) for depth in range(3)]
        for depth, task in enumerate(tasks):
            assert made.submit(task)
            assert started[depth].wait(20)
        futures[0].set_result(None)  # the outer ones first: the inner ones still help
        futures[1].set_result(None)
        deepest = Task(lambda: None, depth=3)
        assert made.submit(deepest)
        assert deepest.ended.wait(20)
        futures[2].set_result(None)
        assert all(task.ended.wait(20) for task in tasks)
        last = Task(lambda: None)
        assert made.submit(last)
        assert last.ended.wait(20)


def test_who_is_no_worker_does_not_help() -> None:
    with pool(1) as made:
        assert not made.help_until(Future(), 0)


def test_without_workers_tasks_wait_for_who_runs_them() -> None:
    with pool(0) as made:
        assert not made.run_one(0.001)
        given_up, task = Task(lambda: None), Task(lambda: None)
        given_up.is_cancelled = True
        assert made.submit(given_up)
        assert made.submit(task)
        assert made.run_one(20)
        assert task.ended.is_set()
        assert not given_up.ended.is_set()


def test_a_pool_that_is_closed_takes_nothing() -> None:
    with pool(1) as made:
        pass
    assert not made.submit(Task(lambda: None))
