"""Rules of messages: each is received whole, in order and by the right rank."""

from __future__ import annotations

import time
from array import array
from itertools import product
from typing import Any

import numpy as np

from ringfort.backends.base import Backend
from ringfort.backends.group import MAX_TAG, Traffic
from ringfort.backends.sub import SubBackend
from ringfort.config import MIB
from ringfort.errors import (
    InvalidArgumentError,
    InvalidRankError,
    SelfSendError,
    SizeMismatchError,
    UnsupportedArrayError,
)
from ringfort.testing.check import check, deliver, expect, expect_exchange, outermost_rank, pattern, raises, refuses_any
from ringfort.testing.ranks import at_once
from ringfort.transport.reducer import Array, Reducer

SIZES = (5, 0, 1, 4095, 4096, 4097, 65536, 0, 0, 3, MIB - 1, MIB, MIB + 1, 2)
"""Bytes: around the sizes at which messages share a frame with their header, are cut, or wait for their receiver."""

LARGE = 5 * MIB + 3
"""Bytes: more than any buffer on the way holds, so that both sides must send and receive at the same time."""


@check(ranks=3)
def every_rank_knows_its_place(backend: Backend) -> None:
    n = backend.world_size
    assert n == 3
    assert len(backend.group.members) == n
    after, before = (backend.rank + 1) % n, (backend.rank - 1) % n
    expect_exchange(backend, bytes([backend.rank]), after, bytes([before]), before)
    assert f"rank {backend.rank}" in repr(backend)


@check(ranks=2)
def messages_keep_their_order_within_a_tag(backend: Backend) -> None:
    for seed, size in enumerate(SIZES):
        deliver(backend, pattern(seed, size), tag=MAX_TAG)


@check(ranks=2)
def messages_of_other_tags_wait_for_their_receive(backend: Backend) -> None:
    tags = (7, 3, 7, 0, MAX_TAG)
    if backend.rank == 0:
        for seed, tag in enumerate(tags):
            backend.send(pattern(seed, 1000 + seed), 1, tag=tag)
    else:
        for seed in (4, 3, 1, 0, 2):
            expect(backend, pattern(seed, 1000 + seed), 0, tag=tags[seed])


@check(ranks=2)
def tags_may_be_used_from_threads_at_once_and_never_mix(backend: Backend) -> None:
    other = 1 - backend.rank

    def talk(tag: int) -> None:
        for turn in range(12):
            size = (tag * 7919 + turn * 104729) % 90_000
            data = pattern(100 * tag + turn, size)
            expect_exchange(backend, data, other, data, other, tag=tag)

    at_once(*(lambda tag=tag: talk(tag) for tag in range(6)))


@check(ranks=4)
def sub_groups_and_their_parent_work_at_once_and_never_mix(backend: Backend) -> None:
    low, even = backend.rank // 2 * 2, backend.rank % 2
    groups: list[Backend] = [
        backend,
        SubBackend(backend, [low, low + 1]),
        SubBackend(backend, [even, even + 2]),
        SubBackend(backend, range(4)),
        SubBackend(backend, range(4)),  # a twin of the last
    ]

    def talk(index: int) -> None:
        group = groups[index]
        after, before = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
        for turn in range(8):
            out, data = (pattern(10_000 * index + 100 * turn + rank, 3000) for rank in (group.rank, before))
            expect_exchange(group, out, after, data, before)
            group.barrier()

    at_once(*(lambda index=index: talk(index) for index in range(len(groups))))


@check(ranks=4)
def sub_groups_nest(backend: Backend) -> None:
    if backend.rank == 0:
        return
    outer = SubBackend(backend, [3, 1, 2, 1])
    assert (outer.parent, outer.world_size, outer.rank) == (backend, 3, backend.rank - 1)
    assert [outer.to_global(rank) for rank in range(3)] == [1, 2, 3]
    assert [outer.to_local(rank) for rank in (1, 2, 3)] == [0, 1, 2]
    if outer.rank != 1:
        inner = SubBackend(outer, [0, 2])
        assert (inner.world_size, inner.rank) == (2, outer.rank // 2)
        other = 1 - inner.rank
        expect_exchange(inner, bytes([backend.rank]), other, bytes([4 - backend.rank]), other)
        inner.barrier()
    outer.barrier()


@check(ranks=2)
def a_message_of_another_size_is_refused_and_the_next_one_is_whole(backend: Backend) -> None:
    flag = 1
    pairs = ((10, 6), (4, 6), (0, 6), (6, 0), (MIB, 10), (3 * MIB, 2 * MIB), (10, 3 * MIB))  # sent, expected
    for is_early, (seed, (size, room)) in product((True, False), enumerate(pairs)):
        if backend.rank == 0:
            for data, tag in ((pattern(seed, size), 0), (pattern(seed, 777), 0), (b"!", flag)):
                backend.send(data, 1, tag=tag)
            continue
        is_there = is_early and size <= MIB  # a larger one need not be sent before its receive
        if is_there:
            expect(backend, b"!", 0, tag=flag)
        with raises(SizeMismatchError, naming=outermost_rank(backend, 0)) as caught:
            backend.recv(bytearray(room), 0)
        assert (caught.error.expected, caught.error.got) == (room, size)
        assert isinstance(caught.error, ValueError)
        expect(backend, pattern(seed, 777), 0)
        if not is_there:
            expect(backend, b"!", 0, tag=flag)


@check(ranks=2)
def empty_messages_are_messages(backend: Backend) -> None:
    other = 1 - backend.rank
    for data in (b"", b"a", b"", b""):
        deliver(backend, data)
    backend.exchange(b"", other, bytearray(), other)
    if backend.rank == 0:
        with raises(SizeMismatchError):
            backend.recv(bytearray(1), 1)
    else:
        backend.send(np.empty((0, 3), np.float64), 0)


@check(ranks=2)
def large_messages_cross_without_a_deadlock(backend: Backend) -> None:
    other = 1 - backend.rank
    expect_exchange(backend, pattern(backend.rank, LARGE), other, pattern(other, LARGE), other)
    at_once(
        lambda: backend.send(pattern(10 + backend.rank, LARGE), other, tag=backend.rank),
        lambda: expect(backend, pattern(10 + other, LARGE), other, tag=other),
    )


@check(ranks=3)
def large_messages_go_round_a_ring(backend: Backend) -> None:
    after, before = (backend.rank + 1) % backend.world_size, (backend.rank - 1) % backend.world_size
    expect_exchange(backend, pattern(backend.rank, LARGE), after, pattern(before, LARGE), before)


def _add(into: Array, span: Array) -> None:
    into += span


@check(ranks=2)
def an_exchange_reduces_what_arrives(backend: Backend) -> None:
    other = 1 - backend.rank
    for dtype in (np.uint8, np.float32, np.float64, np.complex128):
        reducer = Reducer(np.dtype(dtype), _add)
        for count in (0, 1, 1000, 70_001):
            mine, theirs = ((np.arange(count) * 3 + rank).astype(dtype) for rank in (backend.rank, other))
            into = mine.copy()
            backend.exchange(mine, other, into, other, reduce=reducer)
            assert np.array_equal(into, mine + theirs), f"{count} of {np.dtype(dtype)}"
            into = mine.copy()
            at_once(lambda: backend.send(mine, other), lambda: backend.recv(into, other, reduce=reducer))  # noqa: B023
            assert np.array_equal(into, mine + theirs), f"{count} of {np.dtype(dtype)}, by send and recv"


@check(ranks=2)
def memory_may_be_used_again_when_send_returns(backend: Backend) -> None:
    for seed, size in enumerate((10, 4097, MIB, 3 * MIB)):
        if backend.rank == 0:
            data = bytearray(pattern(seed, size))
            backend.send(data, 1)
            data[:] = bytes(size)
        else:
            expect(backend, pattern(seed, size), 0)


@check(ranks=2)
def anything_with_contiguous_memory_can_be_sent(backend: Backend) -> None:
    out: list[Any] = [
        bytes(range(24)),
        bytearray(range(24)),
        memoryview(bytes(range(24))),
        array("d", [1, 2, 3]),
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(3, dtype=np.complex64),
        np.array(2.5),
        np.array([True, False]),
        np.arange(4, dtype=np.float16)[1:3],
    ]
    for item in out:
        deliver(backend, item)
    if backend.rank == 0:
        backend.send(np.arange(6, dtype=np.float32), 1)
    else:
        into = np.zeros((3, 2), np.float32)
        backend.recv(into, 0)
        assert np.array_equal(into, np.arange(6, dtype=np.float32).reshape(3, 2))


@check(ranks=2)
def wrong_arguments_raise_before_a_byte_moves(backend: Backend) -> None:
    before = backend.traffic()
    me, other = backend.rank, 1 - backend.rank
    for wrong, ranks, name in (
        (InvalidRankError, (-1, 2, 7, True, 1.0, "1", None), "dst"),
        (SelfSendError, (me,), "rank"),
    ):
        refuses_any(wrong, ranks, lambda peer: backend.send(b"x", peer), saying=f"{name}={{!r}}")
        refuses_any(
            wrong,
            ranks,
            lambda peer: backend.recv(bytearray(1), peer),
            lambda peer: backend.recv_timeout(bytearray(1), peer, 1),
            lambda peer: backend.exchange(b"x", peer, bytearray(1), other),
            lambda peer: backend.exchange(b"x", other, bytearray(1), peer),
            saying="{!r}",
        )
    refuses_any(
        InvalidArgumentError,
        (-1, MAX_TAG + 1, True, 1.0, "1", None),
        lambda tag: backend.send(b"x", other, tag=tag),
        lambda tag: backend.recv(bytearray(1), other, tag=tag),
        saying="tag={!r}",
    )
    refuses_any(
        InvalidArgumentError,
        (0, -1, float("nan"), float("inf"), True, "1"),
        lambda timeout: backend.send(b"x", other, timeout=timeout),
        lambda timeout: backend.recv(bytearray(1), other, timeout=timeout),
        lambda timeout: backend.barrier(timeout=timeout),
        saying="timeout={!r}",
    )
    assert backend.traffic() == before
    expect_exchange(backend, b"x", other, b"x", other)


@check(ranks=2)
def memory_that_cannot_be_used_is_refused_before_a_byte_moves(backend: Backend) -> None:
    before = backend.traffic()
    other = 1 - backend.rank
    read_only = np.zeros(4)
    read_only.flags.writeable = False
    scattered = np.zeros((4, 4))[:, 1]
    unreadable: list[Any] = [scattered, None, 4, "text", [1, 2]]
    refuses_any(
        UnsupportedArrayError,
        (bytes(4), read_only, memoryview(b"1234"), *unreadable),
        lambda into: backend.recv(into, other),
        lambda into: backend.exchange(b"1234", other, into, other),
        saying="into",
    )
    refuses_any(UnsupportedArrayError, unreadable, lambda data: backend.send(data, other), saying="data")
    assert backend.traffic() == before
    expect_exchange(backend, b"x", other, b"x", other)


@check(ranks=1)
def a_world_of_one_works_and_moves_no_bytes(backend: Backend) -> None:
    assert (backend.rank, backend.world_size) == (0, 1)
    backend.barrier()
    alone = SubBackend(backend, [0])
    alone.barrier()
    groups = (backend, alone)
    refuses_any(SelfSendError, groups, lambda group: group.send(b"x", 0), lambda group: group.recv(bytearray(1), 0))
    refuses_any(InvalidRankError, groups, lambda group: group.send(b"x", 1))
    assert backend.traffic() == Traffic()


@check(ranks=3)
def nobody_leaves_a_barrier_before_all_have_come(backend: Backend) -> None:
    for turn in range(5):
        if backend.rank == turn % 3:
            time.sleep(0.01)  # arrives late, so that the others would leave early if they could
        came = time.monotonic()  # one clock for all processes of a machine
        backend.barrier()
        went = time.monotonic()
        for other in range(3):
            if other != backend.rank:
                theirs = np.zeros(1)
                backend.exchange(np.array([came]), other, theirs, other, tag=turn)
                assert theirs[0] <= went, f"turn {turn}: rank {other} came after rank {backend.rank} had left"
