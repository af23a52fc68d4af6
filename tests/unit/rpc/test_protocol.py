"""Messages over a wire that cuts and joins as it likes, and what is no message."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from ringfort.errors import DistributedError, ProtocolError
from ringfort.rpc.outbound import Outbound, Outgoing
from ringfort.rpc.protocol import (
    CHUNK,
    HEADER,
    MAX_BUFFERS,
    Cancelled,
    Count,
    Event,
    Head,
    Inbound,
    Kind,
    Lost,
    Message,
    Reference,
    pack_cancel,
    pack_count,
    pack_goodbye,
    pack_lost,
)

references = st.builds(Reference, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
kinds = st.sampled_from([Kind.REQUEST, Kind.RESPONSE, Kind.ERROR])
small = st.lists(st.sampled_from([0, 1, 100]), min_size=1, max_size=4)
large = st.lists(st.sampled_from([0, 5000, 70_000, CHUNK - 1, CHUNK, CHUNK + 1, 600_000]), min_size=1, max_size=3)
names = st.lists(references, max_size=3)
Sent = list[tuple[Kind, list[int], list[Reference]]]


def content(size: int, mark: int) -> bytes:
    return bytes([mark % 251]) * size


def feed(inbound: Inbound, data: bytes) -> list[Event]:
    """Gives `data` to `inbound`, as much at a time as it has room for."""
    while data:
        place = inbound.want()
        assert len(place) > 0
        count = min(len(place), len(data))
        place[:count] = data[:count]
        inbound.took(count)
        data = data[count:]
    events, inbound.events = inbound.events, []
    return events


def drain(outbound: Outbound, most: int = 1 << 30) -> bytes:
    """All that there is to write, `most` bytes at a time."""
    out = bytearray()
    while outbound.is_active:
        head, body = outbound.pieces()
        piece = bytes(head[:most] or body[:most]) if most < len(head) + len(body) else bytes(head) + bytes(body)
        if not piece:
            break
        out += piece
        outbound.wrote(len(piece))
    return bytes(out)


@given(st.lists(st.tuples(kinds, small, names), min_size=1, max_size=4), st.integers(1, 300), st.integers(1, 300))
def test_small_messages_arrive_whole_however_the_wire_cuts_them(sent: Sent, written: int, read: int) -> None:
    there(sent, written, read)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(kinds, large, names), min_size=1, max_size=4),
    st.sampled_from([4999, 70_001, 1 << 20]),
    st.sampled_from([4999, 70_001, 1 << 20]),
)
def test_large_messages_arrive_whole_however_the_wire_cuts_them(sent: Sent, written: int, read: int) -> None:
    there(sent, written, read)


def there(sent: Sent, written: int, read: int) -> None:
    outbound, inbound = Outbound(), Inbound(lambda _: True)
    wanted: dict[int, Message] = {}
    done: list[int] = []
    for number, (kind, sizes, names) in enumerate(sent):
        buffers = [content(size, number + place) for place, size in enumerate(sizes)]
        wanted[number] = Message(kind, number, buffers, names)
        outbound.post(Outgoing(wanted[number], done=lambda number=number: done.append(number)))
    wire = drain(outbound, written)
    events: list[Event] = []
    for at in range(0, len(wire), read):
        events += feed(inbound, wire[at : at + read])
    assert sorted(done) == sorted(wanted)
    assert len(events) == len(wanted)
    for event in events:
        assert isinstance(event, Message)
        expected = wanted[event.call]
        assert event.kind is expected.kind
        assert list(event.references) == list(expected.references)
        assert [bytes(data) for data in event.buffers] == list(expected.buffers)
    assert inbound.arriving == 0


def test_a_small_message_waits_for_one_frame_of_a_large_one() -> None:
    outbound = Outbound()
    for number in range(3):
        outbound.post(Outgoing(Message(Kind.REQUEST, number, [bytes(16 * CHUNK)])))
    for _ in range(8):
        head, body = outbound.pieces()
        outbound.wrote(len(head) + len(body))
    outbound.pieces()  # a frame has begun
    outbound.post(Outgoing(Message(Kind.REQUEST, 99, [b"small"])))
    head, body = outbound.pieces()
    outbound.wrote(len(head) + len(body))
    head, _ = outbound.pieces()
    assert HEADER.unpack_from(head)[-1] == 99


def test_a_stream_of_small_messages_does_not_starve_a_large_one() -> None:
    outbound = Outbound()
    outbound.post(Outgoing(Message(Kind.REQUEST, 1, [bytes(4 * CHUNK)])))
    seen: list[int] = []
    for number in range(100, 112):
        outbound.post(Outgoing(Message(Kind.REQUEST, number, [b"small"])))
        head, body = outbound.pieces()
        seen.append(HEADER.unpack_from(head)[-1])
        outbound.wrote(len(head) + len(body))
    assert seen.count(1) >= 4


def test_what_is_not_admitted_is_read_and_dropped_and_the_next_message_arrives() -> None:
    heads: list[Head] = []

    def admit(head: Head) -> bool:
        heads.append(head)
        return head.call != 1

    outbound, inbound = Outbound(), Inbound(admit)
    name = Reference(0, 1, 2)
    outbound.post(Outgoing(Message(Kind.REQUEST, 1, [b"x" * 300_000, b"y" * 300_000], [name])))
    outbound.post(Outgoing(Message(Kind.REQUEST, 2, [b"z" * 10])))
    events = feed(inbound, drain(outbound))
    assert [event.call for event in events if isinstance(event, Message)] == [2]
    assert (heads[0].size, heads[0].references) == (600_000, (name,))
    assert inbound.arriving == 0


def test_a_request_that_was_given_up_is_forgotten_and_not_sent_on() -> None:
    outbound, inbound = Outbound(), Inbound(lambda _: True)
    done: list[bool] = []
    outgoing = Outgoing(Message(Kind.REQUEST, 5, [bytes(10 * CHUNK)]), done=lambda: done.append(True))
    outbound.post(outgoing)
    head, body = outbound.pieces()
    first = bytes(head) + bytes(body)
    outbound.wrote(len(first))
    feed(inbound, first)
    assert inbound.arriving == 1
    outgoing.withdrawn = True
    outbound.post(pack_cancel(5))
    rest = drain(outbound)
    assert len(rest) == HEADER.size
    assert feed(inbound, rest) == [Cancelled(5)]
    assert inbound.arriving == 0
    assert done == [True]


def test_a_response_that_was_given_up_is_no_cancel_of_a_request_of_the_same_number() -> None:
    outbound, inbound = Outbound(), Inbound(lambda _: True)
    for kind in (Kind.REQUEST, Kind.RESPONSE):
        outbound.post(Outgoing(Message(kind, 5, [bytes(2 * CHUNK)])))
    outbound.post(pack_cancel(5, of_response=True))
    frames: list[bytes] = []
    while outbound.is_active:
        head, body = outbound.pieces()
        frames.append(bytes(head) + bytes(body))
        outbound.wrote(len(frames[-1]))
    cancel, *frames = frames
    events = feed(inbound, frames[0] + frames[1] + cancel)
    assert events == []
    assert inbound.arriving == 1


def test_other_frames_come_as_they_were_sent() -> None:
    inbound = Inbound(lambda _: True)
    count, lost = Count(Reference(1, 2, 3), 4, 5, -1), Lost(6)
    assert feed(inbound, pack_count(count) + pack_lost(lost) + pack_goodbye()) == [count, lost, Kind.GOODBYE]


def test_a_message_without_a_byte_arrives() -> None:
    outbound, inbound = Outbound(), Inbound(lambda _: True)
    outbound.post(Outgoing(Message(Kind.RESPONSE, 1, [b""])))
    (event,) = feed(inbound, drain(outbound))
    assert isinstance(event, Message)
    assert [len(data) for data in event.buffers] == [0]


def test_very_many_buffers_arrive() -> None:
    outbound, inbound = Outbound(), Inbound(lambda _: True)
    outbound.post(Outgoing(Message(Kind.REQUEST, 1, [b"%d" % n for n in range(MAX_BUFFERS)])))
    (event,) = feed(inbound, drain(outbound))
    assert isinstance(event, Message)
    assert bytes(event.buffers[-1]) == b"%d" % (MAX_BUFFERS - 1)


def header(kind: int, flags: int, buffers: int, names: int, zero: int, length: int, call: int = 1) -> bytes:
    return HEADER.pack(kind, flags, buffers, names, zero, length, call)


@pytest.mark.parametrize(
    "data",
    [
        header(99, 0, 0, 0, 0, 0),
        header(Kind.REQUEST, 0, 0, 0, 0, 10),
        header(Kind.REQUEST, 1, 0, 0, 0, 0),
        header(Kind.REQUEST, 1, 1, 0, 0, 4),
        header(Kind.REQUEST, 1, 1, 0, 1, 8),
        header(Kind.REQUEST, 1, 1, 0, 0, 1 << 31),
        header(Kind.REQUEST, 1, MAX_BUFFERS + 1, 0, 0, CHUNK),
        header(Kind.REQUEST, 1, 1, 0, 0, 8 + 5) + (4).to_bytes(8, "little") + b"12345",
        header(Kind.COUNT, 0, 0, 0, 0, 3) + b"abc",
        header(Kind.COUNT, 0, 0, 0, 0, 5000),
    ],
    ids=[
        "kind",
        "continues nothing",
        "no buffer",
        "short table",
        "reserved",
        "length",
        "buffers",
        "overrun",
        "count",
        "long",
    ],
)
def test_what_cannot_be_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        feed(Inbound(lambda _: True), data)


def test_a_call_that_begins_twice_is_refused() -> None:
    data = header(Kind.REQUEST, 1, 1, 0, 0, 8 + 1) + (9).to_bytes(8, "little") + b"1"
    with pytest.raises(ProtocolError):
        feed(Inbound(lambda _: True), data + data)


def test_a_frame_that_continues_another_kind_of_message_is_refused() -> None:
    inbound = Inbound(lambda _: True)
    feed(inbound, header(Kind.RESPONSE, 1, 1, 0, 0, 8 + 1) + (9).to_bytes(8, "little") + b"1")
    for kind in (Kind.ERROR, Kind.REQUEST):
        with pytest.raises(ProtocolError):
            feed(inbound, header(kind, 0, 0, 0, 0, 1) + b"2")


def test_a_claim_takes_no_memory() -> None:
    inbound = Inbound(lambda head: head.size <= 1000)
    feed(inbound, header(Kind.REQUEST, 1, 1, 0, 0, 8) + (1 << 62).to_bytes(8, "little"))
    assert len(inbound.want()) <= 1 << 20


@given(st.binary(max_size=2000))
def test_strange_bytes_are_refused_or_wait_for_more(data: bytes) -> None:
    inbound = Inbound(lambda head: head.size < 10_000)
    try:
        feed(inbound, data)
    except DistributedError:
        return
    assert len(inbound.want()) > 0
