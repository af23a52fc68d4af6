"""The sending half: what goes out when, and what a caller that gives up leaves behind."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from ringfort.testing.check import pattern
from ringfort.transport.frames import (
    CANCEL,
    CLEAR_TO_SEND,
    DATA,
    FIRST_FRAGMENT,
    GOODBYE,
    HEADER_BYTES,
    MAX_FRAGMENT,
    RENDEZVOUS,
    WINDOW,
    Header,
    pack,
    parse,
)
from ringfort.transport.messages import Envelope, Send
from ringfort.transport.outbound import Outbound
from tests.helpers import small


def message(data: bytes, *, tag: int = 0, comm_id: int = 0, is_rendezvous: bool | None = None) -> Send:
    wants = len(data) > WINDOW if is_rendezvous is None else is_rendezvous
    return Send(memoryview(bytearray(data)), Envelope(comm_id, tag), is_rendezvous=wants)


def written(outbound: Outbound, limit: int = 1 << 30) -> bytes:
    """Everything that goes out now, up to `limit` bytes."""
    out = b""
    while len(out) < limit:
        head, body = outbound.pieces()
        piece = (bytes(head) + bytes(body))[: limit - len(out)]
        if not piece:
            break
        outbound.wrote(len(piece))
        out += piece
    return out


def frames(data: bytes) -> list[tuple[Header, bytes]]:
    """The frames of a stream that ends at the end of one."""
    found: list[tuple[Header, bytes]] = []
    while data:
        header = parse(data)
        end = HEADER_BYTES + header.length
        assert len(data) >= end, "the stream ends inside a frame"
        found.append((header, data[HEADER_BYTES:end]))
        data = data[end:]
    return found


def test_nothing_is_offered_when_there_is_nothing() -> None:
    outbound = Outbound()
    assert not outbound.is_active
    assert outbound.pieces() == (b"", b"")


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, WINDOW])
def test_a_message_within_the_window_is_one_frame_and_done_when_it_is_out(size: int) -> None:
    outbound = Outbound(epoch=4)
    send = message(pattern(1, size), tag=9, comm_id=8)
    outbound.post(send)
    out = written(outbound, HEADER_BYTES + size - 1)
    assert not send.done
    out += written(outbound)
    assert send.done
    [(header, body)] = frames(out)
    assert (header.kind, header.flags, header.epoch) == (DATA, 0, 4)
    assert (header.comm_id, header.tag, header.total) == (8, 9, size)
    assert body == pattern(1, size)
    assert (outbound.messages, outbound.bytes) == (1, size)
    assert not outbound.is_active


def test_a_short_payload_is_joined_to_its_header() -> None:
    outbound = Outbound()
    outbound.post(message(bytes(4096)))
    assert [len(piece) for piece in outbound.pieces()] == [HEADER_BYTES + 4096, 0]


def test_a_large_message_stops_at_the_window_until_its_go_comes() -> None:
    outbound = Outbound()
    send = message(pattern(1, 3 * WINDOW))
    outbound.post(send)
    first = frames(written(outbound))
    assert [len(body) for _, body in first] == [FIRST_FRAGMENT, WINDOW - FIRST_FRAGMENT]
    assert all(header.flags & RENDEZVOUS for header, _ in first)
    assert not outbound.is_active
    outbound.cleared(send.key, send.serial + 1)  # for another message
    outbound.cleared((0, 5), send.serial)  # on another key
    assert not outbound.is_active
    outbound.cleared(send.key, send.serial)
    rest = frames(written(outbound))
    assert [len(body) for _, body in rest] == [MAX_FRAGMENT, MAX_FRAGMENT]
    assert b"".join(body for _, body in first + rest) == pattern(1, 3 * WINDOW)
    assert send.done


def test_a_small_message_that_wants_a_go_is_done_when_it_comes() -> None:
    outbound = Outbound()
    send = message(b"abc", is_rendezvous=True)
    outbound.post(send)
    assert len(frames(written(outbound))) == 1
    assert not send.done
    outbound.cleared(send.key, send.serial)
    assert send.done
    assert outbound.is_idle


def test_a_go_before_the_message_has_begun_is_not_for_it() -> None:
    outbound = Outbound()
    send = message(b"abc", is_rendezvous=True)
    outbound.post(send)
    outbound.cleared(send.key, send.serial)
    written(outbound)
    assert not send.done


def test_messages_of_one_key_keep_their_order_and_those_of_others_take_turns() -> None:
    outbound = Outbound()
    for tag, name in ((1, b"a"), (2, b"x"), (1, b"b"), (2, b"y"), (1, b"c")):
        outbound.post(message(name, tag=tag))
    bodies = [body for _, body in frames(written(outbound))]
    assert [body for body in bodies if body < b"m"] == [b"a", b"b", b"c"]
    assert [body for body in bodies if body > b"m"] == [b"x", b"y"]


def test_a_message_that_waits_for_its_go_lets_those_of_other_keys_pass() -> None:
    outbound = Outbound()
    large, small_one, behind = message(bytes(2 * WINDOW), tag=1), message(b"small", tag=2), message(b"behind", tag=1)
    for send in (large, behind, small_one):
        outbound.post(send)
    written(outbound)
    assert (large.done, small_one.done, behind.done) == (False, True, False)


def test_frames_of_large_messages_take_turns() -> None:
    outbound = Outbound()
    for tag in (1, 2):
        send = message(bytes(4 * WINDOW), tag=tag, is_rendezvous=False)
        outbound.post(send)
    tags = [header.tag for header, _ in frames(written(outbound))]
    assert tags == [1, 2] * 4


def test_control_frames_go_before_any_further_data_but_never_inside_a_frame() -> None:
    outbound = Outbound()
    outbound.post(message(bytes(5000)))
    outbound.post(message(b"next"))
    out = written(outbound, 100)
    outbound.control(pack(GOODBYE))
    assert outbound.has_control
    kinds = [header.kind for header, _ in frames(out + written(outbound))]
    assert kinds == [DATA, GOODBYE, DATA]
    assert not outbound.has_control


def test_a_go_is_owed_until_it_is_out() -> None:
    outbound = Outbound(epoch=2)
    outbound.reply_clear((5, 6), 7)
    assert outbound.owes_clear
    out = written(outbound, 10)
    assert outbound.owes_clear
    [(header, _)] = frames(out + written(outbound))
    assert (header.kind, header.epoch, header.comm_id, header.tag, header.operation) == (CLEAR_TO_SEND, 2, 5, 6, 7)
    assert not outbound.owes_clear


def test_a_message_that_is_withdrawn_before_it_begins_leaves_no_trace() -> None:
    outbound = Outbound()
    first, second = message(b"first"), message(b"second")
    outbound.post(first)
    outbound.post(second)
    outbound.withdraw(first)
    assert [body for _, body in frames(written(outbound))] == [b"second"]
    assert (outbound.messages, outbound.bytes) == (1, 6)


@pytest.mark.parametrize("count", [0, 1, HEADER_BYTES, HEADER_BYTES + 5000, HEADER_BYTES + WINDOW - 1])
def test_a_frame_that_has_begun_goes_out_whole_though_its_caller_uses_its_memory_again(count: int) -> None:
    outbound = Outbound()
    send = message(pattern(1, WINDOW))
    outbound.post(send)
    outbound.pieces()  # it was offered, so it has begun, even if no byte of it was taken
    out = written(outbound, count)
    outbound.withdraw(send)
    send.data[:] = bytes(WINDOW)
    outbound.post(message(b"next"))
    assert [body for _, body in frames(out + written(outbound))] == [pattern(1, WINDOW), b"next"]


@pytest.mark.parametrize("count", [10, HEADER_BYTES + FIRST_FRAGMENT, HEADER_BYTES + FIRST_FRAGMENT + 100, 1 << 30])
def test_a_message_that_is_withdrawn_in_the_middle_is_cancelled_after_its_frame(count: int) -> None:
    outbound = Outbound(epoch=3)
    send = message(pattern(1, 2 * WINDOW), tag=4)
    outbound.post(send)
    out = written(outbound, count)
    outbound.withdraw(send)
    outbound.post(message(b"next", tag=4))
    found = frames(out + written(outbound))
    kinds = [header.kind for header, _ in found]
    assert kinds[-2:] == [CANCEL, DATA]
    assert (found[-2][0].epoch, found[-2][0].tag) == (3, 4)
    assert found[-1][1] == b"next"
    outbound.cleared(send.key, send.serial)  # its clear-to-send was on the way
    assert not outbound.is_active


def test_a_message_that_is_done_cannot_be_withdrawn() -> None:
    outbound = Outbound()
    send = message(b"x")
    outbound.post(send)
    written(outbound)
    outbound.withdraw(send)
    assert not outbound.is_active


@settings(max_examples=200)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("post"), st.integers(0, 2), st.sampled_from(small.SIZES)),
            st.tuples(st.just("write"), st.integers(1, 200)),
            st.tuples(st.just("withdraw"), st.integers(0, 20)),
            st.tuples(st.just("grant"), st.integers(0, 20)),
        ),
        max_size=40,
    )
)
def test_the_stream_is_always_whole_frames_and_every_message_begins_once(script: list[tuple[int | str, ...]]) -> None:
    with small.small_limits():
        outbound = Outbound()
        sends: list[Send] = []
        out = b""
        for action in script:
            match action:
                case ("post", int(tag), int(size)):
                    sends.append(message(pattern(len(sends), size), tag=tag, is_rendezvous=size > small.WINDOW))
                    outbound.post(sends[-1])
                case ("write", int(count)):
                    out += written(outbound, count)
                case ("withdraw", int(index)) if sends:
                    outbound.withdraw(sends[index % len(sends)])
                case ("grant", int(index)) if sends:
                    send = sends[index % len(sends)]
                    outbound.cleared(send.key, send.serial)
                case _:
                    pass
        for send in sends:
            outbound.withdraw(send)
        found = frames(out + written(outbound))
    assert outbound.is_idle
    assert not outbound.is_active
    begun = {header.operation for header, _ in found if header.kind == DATA}
    assert len(begun) == outbound.messages
    cancelled = sum(header.kind == CANCEL for header, _ in found)
    whole = sum(
        sum(len(body) for header, body in found if header.kind == DATA and header.operation == serial)
        == next(header.total for header, _ in found if header.operation == serial)
        for serial in begun
    )
    assert whole + cancelled == len(begun)
