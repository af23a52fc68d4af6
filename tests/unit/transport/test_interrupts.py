"""Ctrl-C at each place where Python can deliver it, one after the other.

CPython handles signals in the main thread when a Python function begins and when a call of a C function has returned.
(Also when a loop goes back, where nothing has just been taken.) Those are the events of `sys.setprofile`, and what its
function raises is raised there. So each scenario is run once to count its events, and then once for each of them.
"""

from __future__ import annotations

import gc
import signal
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
from ringfort.errors import AbortedError, DistributedError
from ringfort.transport.locks import Condition, Event, Future, Signal, is_mine
from ringfort.transport.socket_streams import SocketPoller, SocketStream

CONFIG = DistributedConfig(timeout=30)
BOUND = 10.0
"""Seconds in which everything must have ended: a hang is longer, whatever the machine does."""
SMALL, MIDDLE = np.ones(4, np.float32), np.ones(100_000, np.float32)


def interrupt() -> None:
    raise KeyboardInterrupt


class _Interrupter:
    """Calls `handler` in this thread at the events with the numbers `at`, as a signal would; without any, counts
    events."""

    def __init__(self, *at: int, handler: Callable[[], None] = interrupt) -> None:
        self.events, self._at, self._handler = 0, at, handler

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event in ("call", "c_return"):
            self.events += 1
            if self.events in self._at:
                if self.events == max(self._at):
                    sys.setprofile(None)
                self._handler()

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


def once(make: Callable[[], list[DistributedContext]], work: Callable[[DistributedContext], None], *at: int) -> int:
    """Interrupts `work` at the events `at`, and closes; both ranks must end. Returns how many events there were."""
    ctx, other = make()
    interrupter = _Interrupter(*at)
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
    assert was_interrupted == (bool(at) and interrupter.events >= at[0]), f"swallowed at event {at}"
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


@pytest.mark.timeout(120)
@pytest.mark.parametrize("gap", [1, 2, 3, 5, 8, 13, 21, 34])
def test_a_second_interrupt_while_the_first_is_handled_ends_both_ranks_too(gap: int) -> None:
    """The first leaves the lead held by the thread; the next call of the thread, the close, must find that."""
    for at in range(1, once(over_sockets, small) + 1):
        once(over_sockets, small, at, at + gap)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("work", [small, middle, messages])
def test_a_signal_handler_that_aborts_in_the_middle_of_a_call_ends_both_ranks(
    work: Callable[[DistributedContext], None],
) -> None:
    for at in range(1, once(over_sockets, work) + 1):
        ctx, other = over_sockets()
        peer = _Peer(other, work)
        interrupter = _Interrupter(at, handler=lambda ctx=ctx: ctx.backend.abort("by a handler"))  # type: ignore[misc]
        with suppress(AbortedError), interrupter.armed():
            while interrupter.events < at:  # how many events a call has depends on how long it waits for the peer
                work(ctx)
        with pytest.raises(AbortedError, match="by a handler"):
            work(ctx)
        ctx.close()
        peer.join()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [over_sockets, in_memory])
def test_a_signal_handler_that_calls_the_group_is_refused_while_a_call_leads_and_spoils_nothing(
    make: Callable[[], list[DistributedContext]],
) -> None:
    """The handler's message either goes out, before or after the suspended call leads, or is refused with a word."""
    refused = 0
    for at in range(1, once(make, messages) + 1):
        ctx, other = make()
        said: list[str] = []

        def call(ctx: DistributedContext = ctx, said: list[str] = said) -> None:
            try:
                ctx.backend.send(b"x", 1, tag=9, timeout=BOUND)
                said.append("sent")
            except AbortedError as exc:
                said.append(str(exc))

        peer = threading.Thread(target=messages, args=(other,), daemon=True)
        peer.start()
        with _Interrupter(at, handler=call).armed():
            messages(ctx)
        peer.join(BOUND)
        assert not peer.is_alive(), f"the other rank waits for ever, event {at}"
        if said == ["sent"]:
            into = bytearray(1)
            other.backend.recv(into, 0, tag=9, timeout=BOUND)
            assert into == b"x"
        elif said:  # the last events are those of other threads' work: there may be fewer than in the run before
            assert "signal handler" in said[0], said
            refused += 1
        closing = threading.Thread(target=ctx.close)
        closing.start()
        other.close()
        closing.join()
    assert refused > 5


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


def test_no_signal_is_handled_between_plain_assignments() -> None:
    """What the engine's flags rest on: see transport/locks.py."""

    class Flags:
        is_led = is_interrupted = False

    def lead(flags: Flags) -> bool:
        leads = False
        try:
            while True:
                nothing()
                flags.is_led = leads = True
                nothing()
                flags.is_led = leads = False
        except KeyboardInterrupt:
            if leads:
                flags.is_interrupted = True
        return leads

    def nothing() -> None: ...

    before = signal.signal(signal.SIGALRM, lambda *_: interrupt())
    try:
        seen: set[tuple[bool, bool, bool]] = set()
        for turn in range(300):
            flags, leads = Flags(), False
            with suppress(KeyboardInterrupt):  # it may come before `lead` has begun
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + turn * 1e-6)
                leads = lead(flags)
            seen.add((leads, flags.is_led, flags.is_interrupted))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen == {(True, True, True), (False, False, False)}
