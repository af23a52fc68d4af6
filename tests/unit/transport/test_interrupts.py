"""Ctrl-C at each place where Python can deliver it, one after the other.

CPython handles signals in the main thread when a Python function begins and when a call of a C function has returned.
(Also when a loop goes back, where nothing has just been taken.) Those are the events of `sys.setprofile`, and what its
function raises is raised there. So each scenario is run once to count its events, and then once for each of them.
"""

from __future__ import annotations

import gc
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import numpy as np
import pytest

from ringfort.backends.mesh import MeshBackend
from ringfort.backends.simulated import SimulatedBackend
from ringfort.config import DistributedConfig
from ringfort.context import DistributedContext
from ringfort.errors import DistributedError
from ringfort.transport.locks import Condition, Event, Future, Signal, is_mine
from ringfort.transport.tcp import SocketPoller, SocketStream

CONFIG = DistributedConfig(timeout=30)
BOUND = 10.0
"""Seconds in which everything must have ended: a hang is longer, whatever the machine does."""
SMALL, MIDDLE = np.ones(4, np.float32), np.ones(100_000, np.float32)


class _Interrupter:
    """Raises `KeyboardInterrupt` in this thread at the event number `at`; without one, counts events."""

    def __init__(self, at: int | None = None) -> None:
        self.events, self._at = 0, at

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event in ("call", "c_return"):
            self.events += 1
            if self.events == self._at:
                sys.setprofile(None)
                raise KeyboardInterrupt

    @contextmanager
    def armed(self) -> Iterator[None]:
        gc.disable()  # the events of a run must be those of the one before
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            gc.enable()


def over_sockets() -> list[DistributedContext]:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    return [
        DistributedContext(
            MeshBackend(rank, 2, CONFIG, {1 - rank: SocketStream(end)}, SocketPoller({1 - rank: end}))  # type: ignore[dict-item]
        )
        for rank, end in enumerate(ends)
    ]


def in_memory() -> list[DistributedContext]:
    return [DistributedContext(backend) for backend in SimulatedBackend.create_group(2, config=CONFIG)]


def small(ctx: DistributedContext) -> None:
    for _ in range(2):
        ctx.all_reduce(SMALL.copy())


def middle(ctx: DistributedContext) -> None:
    ctx.all_reduce(MIDDLE.copy())


def in_background(ctx: DistributedContext) -> None:
    ctx.all_reduce(SMALL.copy(), async_op=True).wait()


def messages(ctx: DistributedContext) -> None:
    ctx.sendrecv(SMALL, 1 - ctx.rank, SMALL.copy(), 1 - ctx.rank)
    ctx.barrier()


class _Peer:
    """The other rank, in a thread of its own: works until it fails."""

    def __init__(self, ctx: DistributedContext, work: Callable[[DistributedContext], None]) -> None:
        self._ctx, self._work = ctx, work
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                self._work(self._ctx)
        except BaseException as exc:
            self.error = exc
        finally:
            self._ctx.close()

    def join(self) -> None:
        self._thread.join(BOUND)
        assert not self._thread.is_alive(), "the other rank waits for ever"
        assert isinstance(self.error, DistributedError), self.error


def once(
    make: Callable[[], list[DistributedContext]], work: Callable[[DistributedContext], None], at: int | None = None
) -> int:
    """Interrupts `work` at one event, and closes; both ranks must end. Returns how many events there were."""
    ctx, other = make()
    interrupter = _Interrupter(at)
    peer = _Peer(other, work)
    work(ctx)
    was_interrupted = False
    try:
        with interrupter.armed():
            work(ctx)
    except KeyboardInterrupt:
        was_interrupted = True
    ctx.close()
    peer.join()
    assert was_interrupted == (at is not None and interrupter.events >= at), f"swallowed at event {at}"
    return interrupter.events


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("make", "work"),
    [
        (over_sockets, small),
        (over_sockets, middle),
        (over_sockets, in_background),
        (over_sockets, messages),
        (in_memory, small),
        (in_memory, messages),
    ],
)
def test_an_interrupt_anywhere_reaches_the_caller_and_ends_both_ranks(
    make: Callable[[], list[DistributedContext]], work: Callable[[DistributedContext], None]
) -> None:
    for at in range(1, once(make, work) + 1):
        once(make, work, at)


def test_what_an_interrupted_thread_waited_for_is_not_left_locked() -> None:
    def wait(what: Future[int] | Event | Signal | Condition) -> None:
        if isinstance(what, Condition):
            with what:
                what.wait(0)
        elif isinstance(what, Future):
            what.is_done_within(0)
        else:
            what.wait(0)

    for make in (Future[int], Event, Signal, Condition):
        counter = _Interrupter()
        with counter.armed():
            wait(make())
        for at in range(1, counter.events + 1):
            what = make()
            with suppress(KeyboardInterrupt), _Interrupter(at).armed():
                wait(what)
            lock = what._condition if isinstance(what, Future) else getattr(what, "_cond", what)
            assert isinstance(lock, Signal) or not is_mine(lock), f"{make.__name__}, event {at}"
