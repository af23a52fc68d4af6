"""The receiving half, fed by the sending half in any pieces, whatever the callers do meanwhile; and by garbage."""

from __future__ import annotations

import tracemalloc
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from ringfort.errors import ProtocolError, SizeMismatchError
from ringfort.testing.check import pattern
from ringfort.transport.frames import (
    ABORT,
    CANCEL,
    CLEAR_TO_SEND,
    DATA,
    GOODBYE,
    MAX_FRAGMENT,
    MAX_MESSAGE,
    NO_CALL,
    RENDEZVOUS,
    WINDOW,
    pack,
    parse,
)
from ringfort.transport.inbound import Cancelled, Cleared, Control, Disagreement, Inbound, Reply
from ringfort.transport.messages import Envelope, Receive, Scratch, Send
from ringfort.transport.outbound import Outbound
from ringfort.transport.reducer import Reducer
from tests.helpers import small

ADD = Reducer(np.dtype("<u2"), lambda into, span: np.add(into, span, out=into))
LIMIT = 1 << 20
KEYS = ((0, 0), (0, 1), (7, 0))


def replies_of(inbound: Inbound) -> list[Reply]:
    return [event for event in inbound.events if isinstance(event, Reply)]


class Wire:
    """Both halves, with the bytes between them, and what callers have done."""

    def __init__(self) -> None:
        self.outbound = Outbound()
        self.inbound = Inbound(3, Scratch(), LIMIT)
        self.sends: list[Send] = []
        self.receives: list[Receive] = []
        self.withdrawn: list[Send | Receive] = []

    def send(self, key: tuple[int, int], size: int) -> None:
        data = pattern(len(self.sends), size)
        send = Send(memoryview(bytearray(data)), Envelope(*key), is_rendezvous=size > small.WINDOW)
        self.sends.append(send)
        self.outbound.post(send)

    def receive(self, key: tuple[int, int], size: int, *, reducer: bool = False) -> Receive:
        receive = Receive(memoryview(bytearray(size)), Envelope(*key), ADD if reducer and size % 2 == 0 else None)
        self.receives.append(receive)
        self.inbound.post(receive)
        self._settle()
        return receive

    def move(self, count: int) -> None:
        """Moves up to `count` bytes: what is written is read at once, in pieces as both sides want them."""
        while count > 0:
            head, body = self.outbound.pieces()
            piece = bytes(head) + bytes(body)
            if not piece:
                return
            taken = piece[:count]
            self.outbound.wrote(len(taken))
            count -= len(taken)
            self.feed(taken)

    def feed(self, data: bytes) -> None:
        while data:
            space = self.inbound.want()
            assert len(space) > 0, "nowhere to put the bytes that come"
            taken = data[: len(space)]
            space[: len(taken)] = taken
            self.inbound.took(len(taken))
            data = data[len(taken) :]
            self._settle()

    def _settle(self) -> None:
        for reply in replies_of(self.inbound):
            self.inbound.events.remove(reply)
            self.outbound.cleared(*reply)

    def withdraw(self, half: Send | Receive) -> None:
        if half.done or half in self.withdrawn:
            return
        self.withdrawn.append(half)
        if isinstance(half, Send):
            self.outbound.withdraw(half)
            half.data[:] = b"\xee" * len(half.data)  # the caller uses its memory again
        else:
            self.inbound.withdraw(half)
            half.into[:] = b"\xdd" * len(half.into)

    def drain(self) -> None:
        """Receives everything that is left, whatever its size."""
        self.move(1 << 30)
        for key in KEYS:
            while True:
                receive = self.receive(key, 0)
                self.move(1 << 30)
                if not receive.done:
                    self.inbound.withdraw(receive)
                    self.receives.remove(receive)
                    break


actions = st.one_of(
    st.tuples(st.just("send"), st.sampled_from(KEYS), st.sampled_from(small.SIZES)),
    st.tuples(st.just("receive"), st.sampled_from(KEYS), st.none(), st.booleans()),
    st.tuples(st.just("receive"), st.sampled_from(KEYS), st.sampled_from(small.SIZES), st.booleans()),
    st.tuples(st.just("move"), st.one_of(st.integers(1, 30), st.integers(1, 300))),
    st.tuples(st.just("withdraw send"), st.integers(0, 20)),
    st.tuples(st.just("withdraw receive"), st.integers(0, 20)),
)


def carry_out(wire: Wire, action: tuple[Any, ...]) -> None:
    match action:
        case ("send", key, size):
            wire.send(key, size)
        case ("receive", key, None, reducer):  # of the size of the message that is next, if all goes well
            mine = [send.size for send in wire.sends if send.key == key and send not in wire.withdrawn]
            asked = sum(receive.key == key for receive in wire.receives)
            wire.receive(key, mine[asked] if asked < len(mine) else 8, reducer=reducer)
        case ("receive", key, size, reducer):
            wire.receive(key, size, reducer=reducer)
        case ("move", count):
            wire.move(count)
        case ("withdraw send", index) if wire.sends:
            wire.withdraw(wire.sends[index % len(wire.sends)])
        case ("withdraw receive", index) if wire.receives:
            wire.withdraw(wire.receives[index % len(wire.receives)])


@settings(max_examples=400)
@given(st.lists(actions, max_size=40))
@example([("send", (0, 0), 100), ("move", 70), ("receive", (0, 0), None, True), ("withdraw send", 0), ("move", 300)])
@example([("receive", (0, 0), 8, False), ("send", (0, 0), 100), ("move", 90), ("withdraw receive", 0), ("move", 300)])
def test_what_is_received_was_sent_whole_in_order_and_nothing_else_is_lost(script: list[tuple[Any, ...]]) -> None:
    with small.small_limits():
        wire = Wire()
        for action in script:
            carry_out(wire, action)
        wire.drain()
    assert not wire.inbound._inbox
    assert wire.inbound.stored_bytes == 0
    for key in KEYS:
        check_conversation(wire, key)


def check_conversation(wire: Wire, key: tuple[int, int]) -> None:
    sent = {index: send for index, send in enumerate(wire.sends) if send.key == key}
    texts: dict[bytes, list[int]] = defaultdict(list)
    for index, send in sent.items():
        texts[pattern(index, send.size)].append(index)
    consumed, last = 0, -1
    for receive in (receive for receive in wire.receives if receive.key == key):
        if receive in wire.withdrawn:
            assert not receive.done
            assert receive.into == b"\xdd" * receive.total, "memory was written that its owner had taken back"
            continue
        if not receive.done:  # there were more receives than messages, or its sender gave up on a reduce
            continue
        consumed += 1
        if isinstance(receive.error, SizeMismatchError):
            assert receive.error.got in {send.size for send in sent.values()} - {receive.total}
            continue
        assert receive.error is None
        newest = next((index for index in texts[bytes(receive.into)] if index > last), None)
        assert newest is not None, "something was received that was not sent, or out of order"
        last = newest
    given_up = [send for send in sent.values() if send in wire.withdrawn]
    dropped = [receive for receive in wire.receives if receive.key == key and receive in wire.withdrawn]
    assert all(send.done for send in sent.values() if send not in given_up)
    assert len(sent) - len(given_up) - len(dropped) <= consumed <= len(sent), "a message was lost, or came twice"


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(small.SIZES), st.booleans()), max_size=12),
    st.lists(st.integers(1, 60), min_size=1, max_size=30),
    st.booleans(),
)
def test_every_split_of_a_stream_delivers_the_same(
    messages: list[tuple[tuple[int, int], int, bool]], cuts: list[int], posted_first: bool
) -> None:
    with small.small_limits():
        wire = Wire()

        def receive_all() -> list[Receive]:
            return [wire.receive(key, size, reducer=reducer) for key, size, reducer in messages]

        receives = receive_all() if posted_first else []
        for key, size, _ in messages:
            wire.send(key, size)
        for cut in cuts:
            wire.move(cut)
        receives = receives or receive_all()
        wire.move(1 << 30)
    for index, receive in enumerate(receives):
        assert receive.done
        assert receive.error is None
        assert receive.into == pattern(index, receive.total)
    assert all(send.done for send in wire.sends)
    assert wire.inbound.messages == wire.outbound.messages == len(messages)
    assert wire.inbound.bytes == wire.outbound.bytes == sum(size for _, size, _ in messages)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 5])
@pytest.mark.parametrize("posted_first", [True, False])
@pytest.mark.parametrize("reducer", [True, False])
def test_messages_of_real_sizes_arrive_whole(size: int, posted_first: bool, reducer: bool) -> None:
    wire = Wire()
    size += size % 2 if reducer else 0
    data = pattern(1, size)
    send = Send(memoryview(data), Envelope(*KEYS[0]), is_rendezvous=size > WINDOW)
    if posted_first:
        wire.receive(KEYS[0], size, reducer=reducer)
    wire.outbound.post(send)
    wire.move(1 << 30)
    assert wire.inbound.stored_bytes <= WINDOW
    if not posted_first:
        wire.receive(KEYS[0], size, reducer=reducer)
        wire.move(1 << 30)
    assert send.done
    assert wire.receives[0].done
    assert wire.receives[0].into == data


# --- what a peer must not do ------------------------------------------------------------------------------------------

near_headers = st.builds(
    lambda kind, flags, length, epoch, tag, operation, total, tail: (
        pack(kind, flags=flags, length=length, epoch=epoch, tag=tag, operation=operation, total=total) + tail
    ),
    st.integers(0, 7),
    st.integers(0, 255),
    st.one_of(st.integers(0, 50), st.just(MAX_FRAGMENT), st.just(2**32 - 1)),
    st.sampled_from([0, 0, 0, 1]),
    st.integers(0, 2),
    st.integers(0, 3),
    st.one_of(st.integers(0, 60), st.just(MAX_MESSAGE), st.just(2**64 - 1)),
    st.binary(max_size=60),
)


@settings(max_examples=400)
@given(st.lists(st.one_of(st.binary(max_size=300), near_headers), max_size=12), st.integers(1, 5000), st.booleans())
def test_garbage_ends_in_a_protocol_error_or_waits_for_more_and_takes_no_memory(
    pieces: list[bytes], cut: int, reducer: bool
) -> None:
    wire = Wire()
    for size in (8, 40):
        for key in KEYS:
            wire.receive(key, size, reducer=reducer)
    data = b"".join(pieces)
    try:
        for start in range(0, len(data), cut):
            wire.feed(data[start : start + cut])
    except ProtocolError:
        pass
    held = sum(len(stored.data) for queue in wire.inbound._inbox.values() for stored in queue)
    assert wire.inbound.stored_bytes == held <= len(data)


@pytest.mark.parametrize(
    "second",
    [
        pack(DATA, length=100, total=1000),
        pack(DATA, length=6, total=10),
        pack(DATA, length=5, total=11),
        pack(DATA, length=0, total=10),
        pack(DATA, length=5, total=10, epoch=1),
    ],
    ids=["another total", "too long", "a larger total", "nothing", "another epoch"],
)
@pytest.mark.parametrize("waits", ["receive", "reduce", "nobody", "another size"])
def test_a_frame_that_does_not_continue_its_message_is_a_protocol_error(second: bytes, waits: str) -> None:
    wire = Wire()
    if waits != "nobody":
        wire.receive((0, 0), 8 if waits == "another size" else 10, reducer=waits == "reduce")
    wire.feed(pack(DATA, length=5, total=10) + b"12345")
    with pytest.raises(ProtocolError):
        wire.feed(second + bytes(parse(second).length))


def test_a_claimed_length_takes_no_memory() -> None:
    wire = Wire()
    tracemalloc.start()
    try:
        for tag in range(50):
            wire.feed(pack(DATA, tag=tag, length=0, total=MAX_MESSAGE, flags=RENDEZVOUS))
        wire.feed(pack(DATA, tag=99, length=MAX_FRAGMENT, total=MAX_MESSAGE))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert wire.inbound.stored_bytes == 0


# --- what is told to the engine ---------------------------------------------------------------------------------------

CALL_A, CALL_B = b"a" * 16, b"b" * 16


def of_collective(operation: int, call: bytes) -> Envelope:
    return Envelope(0, 1 << 63, operation, call, frozenset({0, 3}))


@pytest.mark.parametrize(("operation", "call"), [(5, CALL_B), (6, CALL_A), (4, CALL_A)])
@pytest.mark.parametrize("posted_first", [True, False])
def test_a_message_of_another_collective_is_a_disagreement_and_gets_no_clear_to_send(
    operation: int, call: bytes, posted_first: bool
) -> None:
    wire = Wire()
    receive = Receive(memoryview(bytearray(4)), of_collective(5, CALL_A), None)
    frame = pack(DATA, tag=1 << 63, operation=operation, call=call, length=4, total=4, flags=RENDEZVOUS) + b"1234"
    if posted_first:
        wire.inbound.post(receive)
    wire.feed(frame)
    if not posted_first:
        assert [seen for _, seen in wire.inbound.early(0)] == [call]
        assert wire.inbound.early(1) == []
        wire.inbound.post(receive)
    assert list(wire.inbound.events) == [Disagreement(receive.envelope, operation, call)]
    assert replies_of(wire.inbound) == []
    assert not receive.done


@pytest.mark.parametrize("posted_first", [True, False])
def test_a_message_that_wants_a_clear_to_send_is_answered_when_it_is_received(posted_first: bool) -> None:
    inbound = Inbound(3, Scratch(), LIMIT)
    receive = Receive(memoryview(bytearray(2)), Envelope(0, 4), None)
    if posted_first:
        inbound.post(receive)
    frame = pack(DATA, tag=4, operation=77, length=2, total=2, flags=RENDEZVOUS) + b"ab"
    inbound.want()[: len(frame)] = frame
    inbound.took(len(frame))
    if not posted_first:
        assert replies_of(inbound) == []
        assert inbound.holds_whole((0, 4))
        inbound.post(receive)
    assert replies_of(inbound) == [((0, 4), 77)]
    assert receive.done


def test_control_frames_are_passed_on_in_order_however_they_are_cut() -> None:
    frames = (
        pack(CLEAR_TO_SEND, comm_id=7, tag=2, operation=9) + pack(ABORT, comm_id=7, length=3) + b"why" + pack(GOODBYE)
    )
    for cut in range(1, len(frames)):
        wire = Wire()
        wire.feed(frames[:cut])
        wire.feed(frames[cut:])
        assert wire.inbound.events[0] == Cleared((7, 2), 9)
        kinds = [(event.header.kind, event.payload) for event in wire.inbound.events if isinstance(event, Control)]
        assert kinds == [(ABORT, b"why"), (GOODBYE, b"")]


@pytest.mark.parametrize("size", [4, 10], ids=["another size", "its size"])
def test_a_message_that_is_taken_back_leaves_its_receive_first_in_line(size: int) -> None:
    wire = Wire()
    first, second = wire.receive((0, 0), size), wire.receive((0, 0), 10)
    wire.feed(pack(DATA, length=3, total=10) + b"bad" + pack(CANCEL))
    assert not first.done
    wire.feed(pack(DATA, length=size, total=size) + pattern(1, size))
    wire.feed(pack(DATA, length=10, total=10) + pattern(2, 10))
    assert (first.done, first.error, first.into) == (True, None, pattern(1, size))
    assert (second.done, second.error, second.into) == (True, None, pattern(2, 10))


def test_a_message_that_is_taken_back_before_its_receive_leaves_nothing_behind() -> None:
    wire = Wire()
    wire.feed(pack(DATA, length=3, total=10) + b"bad" + pack(CANCEL))
    assert wire.inbound.stored_bytes == 0
    assert not wire.inbound._inbox
    wire.feed(pack(DATA, length=2, total=2) + b"ok")
    assert wire.receive((0, 0), 2).into == b"ok"


def test_a_reduce_cannot_begin_again_when_its_message_is_taken_back() -> None:
    wire = Wire()
    receive = wire.receive((0, 0), 10, reducer=True)
    wire.feed(pack(DATA, length=3, total=10) + b"bad" + pack(CANCEL))
    assert list(wire.inbound.events) == [Cancelled(receive)]


def test_that_a_message_is_taken_back_comes_behind_the_reason_of_it() -> None:
    """They may come in one read: then whoever heeds the events in their order hears the reason first."""
    wire = Wire()
    receive = wire.receive((0, 0), 10, reducer=True)
    wire.feed(pack(DATA, length=3, total=10) + b"bad" + pack(ABORT) + pack(CANCEL))
    assert not receive.done
    reason, given_up = wire.inbound.events
    assert isinstance(reason, Control)
    assert given_up == Cancelled(receive)


@pytest.mark.parametrize("reducer", [True, False])
@pytest.mark.parametrize("had", [3, 10], ids=["in a frame", "between frames"])
def test_a_receive_that_is_withdrawn_is_written_no_more(reducer: bool, had: int) -> None:
    wire = Wire()
    receive = wire.receive((0, 0), 20, reducer=reducer)
    wire.feed(pack(DATA, length=10, total=20) + bytes(had))
    wire.withdraw(receive)
    wire.feed(bytes(10 - had) + pack(DATA, length=10, total=20) + bytes(10))
    wire.feed(pack(DATA, length=2, total=2) + b"ok")
    assert receive.into == b"\xdd" * 20
    assert wire.receive((0, 0), 2).into == b"ok"


def test_a_cancel_of_nothing_is_no_error() -> None:
    wire = Wire()
    wire.feed(pack(CANCEL, tag=1) + pack(DATA, tag=1, length=1, total=1) + b"x")
    assert wire.receive((0, 1), 1).into == b"x"


def test_the_inbox_is_full_when_its_limit_is_stored_and_no_longer_when_it_is_received() -> None:
    inbound = Inbound(3, Scratch(), 100)
    wire = Wire()
    wire.inbound = inbound
    for tag in (1, 2):
        assert not inbound.is_full
        wire.feed(pack(DATA, tag=tag, length=50, total=50) + bytes(50))
    assert inbound.is_full
    wire.receive((0, 2), 50)
    assert not inbound.is_full
    assert inbound.stored_bytes == 50


def test_a_plain_message_matches_whatever_its_number_is() -> None:
    wire = Wire()
    wire.feed(pack(DATA, operation=123, length=1, total=1, call=NO_CALL) + b"x")
    assert wire.receive((0, 0), 1).done
