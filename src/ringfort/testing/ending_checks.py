"""Rules of timeouts, aborts, closing and lost peers. Never a hang, and the error names the peer."""

from __future__ import annotations

import time
from collections.abc import Callable

from ringfort.backends.base import Backend
from ringfort.config import MIB
from ringfort.errors import AbortedError, ChannelClosedError, DistributedError, OperationTimeoutError, PeerLostError
from ringfort.testing.check import check, expect, expect_exchange, leave, outermost_rank, pattern, raises, refuses
from ringfort.testing.faults import FaultTimetable
from ringfort.testing.ranks import at_once

SHORT = 0.05
"""Seconds for a wait that should time out."""

PROMPT = 5.0
"""Seconds within which an immediate effect is seen, even on a busy machine. Well below the timeout of a call."""

LARGE = 4 * MIB


def _calls_to(backend: Backend, peer: int) -> list[Callable[[], None]]:
    """Calls that need `peer`, one of each kind. The first waits for news of it: a send may not have heard them yet."""
    return [
        lambda: backend.recv(bytearray(1), peer),
        lambda: backend.send(b"x", peer),
        lambda: backend.exchange(b"", peer, bytearray(), peer),
    ]


@check(ranks=2)
def a_receive_that_times_out_leaves_the_link_usable(backend: Backend) -> None:
    if backend.rank == 0:
        for receive in (
            lambda: backend.recv(bytearray(5), 1, timeout=SHORT),
            lambda: backend.recv_timeout(bytearray(5), 1, SHORT),
            lambda: backend.exchange(b"", 1, bytearray(5), 1, timeout=SHORT),
        ):
            with raises(OperationTimeoutError, naming=outermost_rank(backend, 1)) as caught:
                receive()
            assert isinstance(caught.error, TimeoutError)
            assert caught.error.timeout == SHORT
        backend.send(b"now", 1)
        expect(backend, b"hello", 1)
    else:
        expect(backend, b"", 0)
        expect(backend, b"now", 0)
        backend.send(b"hello", 0)


def _is_sent(backend: Backend, data: bytes) -> bool:
    """Send to rank 1, which does not receive yet: only a backend with large buffers takes it before the timeout."""
    try:
        backend.send(data, 1, timeout=SHORT)
    except OperationTimeoutError:
        return False
    return True


@check(ranks=2)
def a_send_that_times_out_leaves_the_link_usable(backend: Backend) -> None:
    flag = 1
    if backend.rank == 0:
        outcomes = bytearray(_is_sent(backend, pattern(seed, LARGE)) for seed in range(3))
        at_once(lambda: backend.send(outcomes, 1, tag=flag), lambda: backend.send(pattern(9, 3 * MIB), 1))
        expect(backend, b"thanks", 1)
    else:
        outcomes = bytearray(3)
        backend.recv(outcomes, 0, tag=flag)
        for seed, was_sent in enumerate(outcomes):
            if was_sent:
                expect(backend, pattern(seed, LARGE), 0)
        expect(backend, pattern(9, 3 * MIB), 0)
        backend.send(b"thanks", 0)


@check(ranks=2)
def a_timeout_in_the_middle_of_a_message_never_puts_the_link_out_of_step(backend: Backend) -> None:
    tries = 12
    if backend.rank == 0:
        for seed in range(tries + 1):
            backend.send(pattern(seed, LARGE), 1)
        backend.send(b"end", 1, tag=1)
    else:
        # Each try receives at most one message: it times out before, in the middle of or after one. So the last one is
        # always received.
        into = bytearray(LARGE)
        seen = -1
        for number in range(100):
            try:
                backend.recv(into, 0, timeout=0.0002 * 1.5**number if number < tries else None)
            except OperationTimeoutError:
                continue
            newest = next((seed for seed in range(seen + 1, tries + 1) if bytes(into) == pattern(seed, LARGE)), None)
            assert newest is not None, f"after message {seen} came something that was never sent whole"
            seen = newest
            if seen == tries:
                break
        expect(backend, b"end", 0, tag=1)


@check(ranks=2)
def a_receive_is_not_held_up_by_a_send_that_has_timed_out(backend: Backend) -> None:
    if backend.rank == 0:
        backend.send(bytes([_is_sent(backend, pattern(1, LARGE))]), 1, tag=1)
        start = time.monotonic()
        expect(backend, b"hello", 1)
        assert time.monotonic() - start < PROMPT
        backend.send(b"done", 1, tag=2)
    else:
        backend.send(b"hello", 0)
        was_sent = bytearray(1)
        backend.recv(was_sent, 0, tag=1)
        if was_sent[0]:
            expect(backend, pattern(1, LARGE), 0)
        expect(backend, b"done", 0, tag=2)


@check(ranks=2)
def a_barrier_that_times_out_ends_the_collectives_of_the_group_for_all(backend: Backend) -> None:
    if backend.rank == 0:
        with raises(OperationTimeoutError, naming=outermost_rank(backend, 1)):
            backend.barrier(timeout=SHORT)
        backend.send(b"late", 1)
        with raises(DistributedError):
            backend.barrier()
    else:
        expect(backend, b"late", 0)
        with raises(AbortedError, naming=outermost_rank(backend, 0)):
            backend.barrier()
    other = 1 - backend.rank
    expect_exchange(backend, b"x", other, b"x", other, tag=1)  # messages between two ranks still work


@check(ranks=3)
def an_abort_wakes_every_waiter_here_and_at_the_peers(backend: Backend) -> None:
    def wait(tag: int) -> None:
        naming = None if backend.rank == 0 else outermost_rank(backend, 0)
        with raises(AbortedError, saying="enough of this", naming=naming):
            backend.recv(bytearray(1), (backend.rank + 1) % 3, tag=tag)

    def give_up() -> None:
        if backend.rank == 0:
            for peer in (1, 2):
                expect(backend, b"here", peer, tag=9)
            backend.abort("enough of this")
        else:
            backend.send(b"here", 0, tag=9)

    at_once(lambda: wait(0), lambda: wait(1), give_up)
    refuses(AbortedError, *_calls_to(backend, (backend.rank + 1) % 3), backend.barrier)
    if backend.rank == 0:
        backend.abort("once more")


@check(ranks=2)
def an_abort_gets_past_messages_that_nobody_receives(backend: Backend) -> None:
    if backend.rank == 0:

        def clog() -> None:
            with raises(AbortedError):
                while True:
                    backend.send(pattern(1, LARGE), 1, tag=1)

        def give_up() -> None:
            expect(backend, b"here", 1)
            time.sleep(SHORT)  # the link is full by now; where it is not, the check is only easier
            backend.abort("enough of this")

        at_once(clog, give_up)
    else:
        backend.send(b"here", 0)
        start = time.monotonic()
        with raises(AbortedError, saying="enough of this", naming=outermost_rank(backend, 0)):
            backend.recv(bytearray(1), 0, tag=2)
        assert time.monotonic() - start < PROMPT


@check(ranks=2)
def close_may_be_called_twice_and_ends_what_waits(backend: Backend) -> None:
    other = 1 - backend.rank

    def wait() -> None:
        with raises(ChannelClosedError):
            backend.recv(bytearray(1), other, tag=1)

    def go() -> None:
        backend.exchange(b"", other, bytearray(), other)
        leave(backend)

    at_once(wait, go)
    leave(backend)
    refuses(ChannelClosedError, *_calls_to(backend, other), backend.barrier)
    backend.abort("too late")


@check(ranks=3)
def a_peer_that_closed_is_named_by_those_who_need_it(backend: Backend) -> None:
    gone = outermost_rank(backend, 2)
    if backend.rank == 2:
        leave(backend)
        return
    refuses(ChannelClosedError, *_calls_to(backend, 2), naming=gone)
    other = 1 - backend.rank  # the others can still exchange messages
    expect_exchange(backend, pattern(backend.rank, LARGE), other, pattern(other, LARGE), other)


@check(ranks=3)
def a_peer_that_has_done_its_part_may_close(backend: Backend) -> None:
    if backend.rank == 0:
        expect_exchange(backend, pattern(0, LARGE), 1, b"hello", 2)  # rank 2 sends after rank 1 has received and left
    elif backend.rank == 1:
        expect(backend, pattern(0, LARGE), 0)
        leave(backend)
    else:
        with raises(ChannelClosedError):
            backend.recv(bytearray(1), 1)
        backend.send(b"hello", 0)


@check(ranks=4)
def a_collective_that_a_peer_has_left_ends_at_every_rank(backend: Backend) -> None:
    if backend.rank == 2:
        leave(backend)
        return
    start = time.monotonic()
    with raises(DistributedError, saying=f"rank {outermost_rank(backend, 2)}"):
        while True:
            backend.barrier()
    assert time.monotonic() - start < PROMPT


@check(ranks=3)
def what_was_sent_before_a_close_is_still_received(backend: Backend) -> None:
    sizes = (5, 0, 300_000)
    if backend.rank == 0:
        for seed, size in enumerate(sizes):
            backend.send(pattern(seed, size), 1, tag=1)
        backend.send(b"sent", 2)
        leave(backend)
    elif backend.rank == 1:
        backend.send(pattern(7, 1000), 0, tag=3)  # nobody will receive this one
        expect(backend, b"gone", 2)
        with raises(OperationTimeoutError):
            backend.recv(bytearray(1), 2, timeout=SHORT)  # meanwhile all messages of rank 0 arrive, and its goodbye
        for seed, size in enumerate(sizes):
            expect(backend, pattern(seed, size), 0, tag=1)
        with raises(ChannelClosedError, naming=outermost_rank(backend, 0)):
            backend.recv(bytearray(5), 0, tag=1)
        backend.send(b"done", 2)
    else:
        expect(backend, b"sent", 0)
        with raises(ChannelClosedError):
            backend.recv(bytearray(1), 0)
        backend.send(b"gone", 1)
        expect(backend, b"done", 1)


@check(ranks=2)
def a_close_does_not_take_back_what_is_still_on_its_way(backend: Backend) -> None:
    if backend.rank == 0:
        expect(backend, b"unread is on its way", 1, tag=2)
        backend.send(pattern(1, MIB), 1)
        backend.send(pattern(2, 1000), 1)
        leave(backend)
    else:
        backend.send(pattern(3, 50_000), 0, tag=1)  # nobody receives it: a close finds it unread
        backend.send(b"unread is on its way", 0, tag=2)
        expect(backend, pattern(1, MIB), 0)
        expect(backend, pattern(2, 1000), 0)


@check(ranks=3, faults=FaultTimetable().kill(rank=1, at=3))
def a_killed_peer_is_named_by_every_survivor(backend: Backend) -> None:
    lost = outermost_rank(backend, 1)
    with raises(PeerLostError, naming=lost) as caught:
        while True:
            backend.barrier()
    assert isinstance(caught.error, ConnectionError)
    refuses(PeerLostError, backend.barrier, *_calls_to(backend, 1), naming=lost)
    other = 2 - backend.rank  # the survivors can still exchange messages
    expect_exchange(backend, pattern(backend.rank, LARGE), other, pattern(other, LARGE), other)


@check(ranks=3, faults=FaultTimetable().kill(rank=2, at=2))
def a_kill_ends_messages_in_the_middle(backend: Backend) -> None:
    lost = outermost_rank(backend, 2)
    if backend.rank == 0:
        with raises(PeerLostError, naming=lost):
            backend.send(pattern(0, LARGE), 2)
    elif backend.rank == 1:
        backend.send(b"begin", 2)
        with raises(PeerLostError, naming=lost):
            backend.exchange(pattern(1, LARGE), 2, bytearray(LARGE), 2)
    else:
        expect(backend, b"begin", 1)
        backend.barrier()  # not reached
        raise AssertionError("should have been killed")
