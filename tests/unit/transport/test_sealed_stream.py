"""Sealed streams: what goes in comes out, however the kernel and the caller cut it, in memory that does not grow."""

from __future__ import annotations

import os
import random
import select
import socket
import threading
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest
from hypothesis import example, given, settings, strategies as st

from ringfort.config import KIB, MIB
from ringfort.errors import TamperedError
from ringfort.transport.records import CIPHERS, MAX_PLAIN, Opener, Sealer, preferred
from ringfort.transport.socket_streams import SealedStream

THERE, BACK = bytes(32), bytes(range(32))
CIPHER = CIPHERS[preferred()[0]]


@contextmanager
def streams(send_buffer: int | None = None) -> Iterator[tuple[SealedStream, SealedStream]]:
    """Both ends of a link; the kernel takes about `send_buffer` bytes at once."""
    one, other = socket.socketpair()
    with one, other:
        for sock in (one, other):
            sock.setblocking(False)
            if send_buffer is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        here, there = (Sealer(THERE, CIPHER), Opener(BACK, CIPHER)), (Sealer(BACK, CIPHER), Opener(THERE, CIPHER))
        yield SealedStream(one, *here), SealedStream(other, *there)


@contextmanager
def raw_and_stream() -> Iterator[tuple[socket.socket, SealedStream]]:
    """A socket whose bytes the test chooses, and the stream that reads them."""
    one, other = socket.socketpair()
    with one, other:
        other.setblocking(False)
        yield one, SealedStream(other, Sealer(BACK, CIPHER), Opener(THERE, CIPHER))


def record_of(sealer: Sealer, data: bytes) -> bytes:
    out = bytearray(len(data) + sealer.overhead)
    sealer.seal(data, memoryview(out))
    return bytes(out)


class Writer:
    """Writes frames as a link does: the same pieces again until they have gone, or `by_parts` of their record."""

    def __init__(self, stream: SealedStream, frames: Sequence[tuple[bytes, bytes]], *, by_parts: bool = False) -> None:
        self._stream, self._by_parts = stream, by_parts
        self._frames = [list(map(memoryview, frame)) for frame in frames]

    @property
    def is_done(self) -> bool:
        return not self._frames

    def write(self) -> bool:
        """Whether something went out that the stream tells of."""
        if not self._frames:
            return False
        head, body = self._frames[0]
        try:
            if self._by_parts and self._stream.is_sending:
                count = self._stream.push()
                if not count:
                    return False
            else:
                count = self._stream.sendmsg((head, body)) if head and body else self._stream.send(head or body)
        except BlockingIOError:
            return False
        assert 0 < count <= len(head) + len(body)
        rest = max(0, count - len(head))
        self._frames[0] = [head[count:], body[rest:]]
        if not any(map(len, self._frames[0])):
            self._frames.pop(0)
        return True


def read(stream: SealedStream, size: int, *, by_parts: bool = False) -> bytes | None:
    """Up to `size` bytes, or None when there are none now; `by_parts` of a record, no place until it is whole."""
    into = bytearray(size)
    try:
        if by_parts and not stream.pull():
            return None
        count = stream.recv_into(memoryview(into))
    except BlockingIOError:
        return None
    assert count > 0, "the stream has ended"
    return bytes(into[:count])


def carry(writer: Writer, reader: SealedStream, sizes: Sequence[int], whole: int, *, by_parts: bool = False) -> bytes:
    """All that arrives while both take turns."""
    found, idle, turn = bytearray(), 0, 0
    while len(found) < whole:
        moved = writer.write()
        data = read(reader, sizes[turn % len(sizes)], by_parts=by_parts)
        turn += 1
        found += data or b""
        idle = 0 if moved or data else idle + 1
        assert idle < 10_000, f"nothing moves any more, at {len(found)} of {whole} bytes"
    return bytes(found)


sizes_of = st.one_of(st.integers(1, 300), st.sampled_from([63, 64, 4095, 4096, 4097, 9000, 70_000]))
frames = st.lists(st.tuples(st.integers(0, 64), sizes_of), min_size=1, max_size=10)


@settings(max_examples=40)
@given(
    frames,
    st.lists(sizes_of, min_size=1, max_size=8),
    st.sampled_from([None, 2048, 20_000]),
    st.integers(),
    st.booleans(),
    st.booleans(),
)
@example([(64, MAX_PLAIN), (64, 1), (0, MAX_PLAIN)], [1_000_000, 7], 2048, 1, False, False)
@example([(64, MAX_PLAIN), (64, 1), (0, MAX_PLAIN)], [1_000_000, 7], 2048, 1, True, True)
@example([(64, 3 * MAX_PLAIN)], [MAX_PLAIN], None, 1, False, False)
@example([(64, 3 * MAX_PLAIN)], [MAX_PLAIN], None, 1, True, True)
def test_what_is_written_is_read_however_it_is_cut(
    shape: list[tuple[int, int]], sizes: list[int], send_buffer: int | None, seed: int, pushes: bool, pulls: bool
) -> None:
    rng = random.Random(seed)
    written = [(rng.randbytes(head), rng.randbytes(body)) for head, body in shape]
    whole = b"".join(head + body for head, body in written)
    sizes = [max(size, len(whole) // 200) for size in sizes]  # else it takes a million reads
    with streams(send_buffer) as (one, other):
        writer = Writer(one, written, by_parts=pushes)
        assert carry(writer, other, sizes, len(whole), by_parts=pulls) == whole
        assert writer.is_done
        assert read(other, 1) is None
        assert not other.has_pending


def test_both_directions_are_independent() -> None:
    with streams() as (one, other):
        assert one.send(memoryview(b"there")) == 5
        assert other.send(memoryview(b"and back")) == 8
        assert read(other, 100) == b"there"
        assert read(one, 100) == b"and back"


def test_nothing_counts_as_sent_until_all_of_its_record_is_with_the_kernel() -> None:
    data = memoryview(os.urandom(MIB))
    with streams(2048) as (one, other):
        tries = 0
        found = bytearray()
        while True:
            try:
                assert one.send(data) == MIB
                break
            except BlockingIOError:
                tries += 1
                assert tries < 10_000
                found += read(other, MIB) or b""
        while len(found) < MIB:
            found += read(other, MIB) or b""
    assert tries > 1
    assert found == data


def test_a_record_larger_than_the_buffer_comes_in_several_reads_and_is_pending_meanwhile() -> None:
    data = os.urandom(1000)
    with streams() as (one, other):
        one.send(memoryview(data))
        found = b""
        for _ in range(9):
            found += read(other, 100) or b""
            assert other.has_pending, "the poller knows nothing of what has been opened"
        found += read(other, 100) or b""
        assert not other.has_pending
        assert found == data
        assert read(other, 100) is None


def test_records_that_were_read_together_are_pending_until_the_last_is_opened() -> None:
    with streams() as (one, other):
        for number in range(5):
            one.send(memoryview(bytes([number]) * 10))
        for number in range(5):
            assert read(other, 4096) == bytes([number]) * 10
            assert other.has_pending is (number < 4)


def test_a_record_that_begins_late_in_the_buffer_is_read_to_its_end() -> None:
    plain = [b"h" * 64, os.urandom(MAX_PLAIN)] * 4
    sealer = Sealer(THERE, CIPHER)
    wire = b"".join(record_of(sealer, data) for data in plain)
    into = memoryview(bytearray(MAX_PLAIN))
    with raw_and_stream() as (raw, stream):
        writer = threading.Thread(target=raw.sendall, args=(wire,))
        writer.start()  # always ahead, so that every read takes something of the next record too
        found: list[bytes] = []
        while len(found) < len(plain):
            try:
                count = stream.recv_into(into)
            except BlockingIOError:
                assert select.select([stream._sock], [], [], 20)[0], "nothing comes"
                continue
            if not count:
                break
            found.append(bytes(into[:count]))
        stream.shut_down()
        stream.close()  # so that the writer ends in any case
        with suppress(OSError):
            raw.shutdown(socket.SHUT_RDWR)
        writer.join(20)
    assert list(map(len, found)) == list(map(len, plain))
    assert found == plain


def test_half_a_record_is_not_pending() -> None:
    with raw_and_stream() as (raw, stream):
        record = record_of(Sealer(THERE, CIPHER), b"a whole record")
        for place in range(len(record)):
            assert read(stream, 100) is None
            assert not stream.has_pending
            raw.sendall(record[place : place + 1])
        assert read(stream, 100) == b"a whole record"


def test_a_header_and_a_large_payload_get_a_record_each_so_that_the_payload_opens_in_place() -> None:
    with streams() as (one, other):
        assert one.sendmsg((memoryview(b"h" * 64), memoryview(b"p" * 5000))) == 5064
        assert read(other, 10_000) == b"h" * 64
        assert read(other, 5000) == b"p" * 5000


def test_a_header_and_a_small_payload_share_a_record() -> None:
    with streams() as (one, other):
        assert one.sendmsg((memoryview(b"h" * 64), memoryview(b"p" * 500))) == 564
        assert read(other, 10_000) == b"h" * 64 + b"p" * 500


# --- ends and strangers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 10, 30])
def test_an_end_is_an_end_also_inside_a_record_after_all_before_it_was_read(cut: int) -> None:
    sealer = Sealer(THERE, CIPHER)
    with raw_and_stream() as (raw, stream):
        raw.sendall(record_of(sealer, b"whole") + record_of(sealer, b"not so whole")[:cut])
        raw.close()
        assert read(stream, 100) == b"whole"
        assert stream.pull(), "there is an end to be told of"
        assert stream.recv_into(memoryview(bytearray(100))) == 0


def test_a_part_of_a_record_is_taken_and_is_nothing_to_receive() -> None:
    record = record_of(Sealer(THERE, CIPHER), b"whole")
    with raw_and_stream() as (raw, stream):
        for byte in record[:-1]:
            raw.sendall(bytes([byte]))
            assert not stream.pull()
            assert not stream.has_pending
        raw.sendall(record[-1:])
        assert stream.pull()
        assert stream.has_pending
        assert read(stream, 100) == b"whole"


def test_shutting_down_ends_one_direction_only() -> None:
    with streams() as (one, other):
        one.shut_down()
        assert other.recv_into(memoryview(bytearray(10))) == 0
        other.send(memoryview(b"still"))
        assert read(one, 10) == b"still"


def tampered_streams() -> dict[str, bytes]:
    sealer, theirs = Sealer(THERE, CIPHER), Sealer(BACK, CIPHER)
    first, second, third = (record_of(sealer, word) for word in (b"first", b"second", b"third"))
    return {
        "flipped": first + second[:-1] + bytes([second[-1] ^ 1]) + third,
        "dropped": first + third,
        "repeated": first + first + second,
        "reordered": first + third + second,
        "reflected": first + record_of(theirs, b"first") + second,
        "too long": first + b"\xff\xff\xff\xff",
        "too short": first + b"\x0f\0\0\0" + bytes(15),
        "empty": first + record_of(_at(1), b""),
    }


def _at(count: int) -> Sealer:
    sealer = Sealer(THERE, CIPHER)
    for _ in range(count):
        record_of(sealer, b"")
    return sealer


@pytest.mark.parametrize("kind", tampered_streams())
@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_tampering_is_noticed_after_what_came_before_it(kind: str, cut: int) -> None:
    data = tampered_streams()[kind]
    found = b""
    with raw_and_stream() as (raw, stream):

        def read_all() -> None:
            nonlocal found
            for start in range(0, len(data), cut):
                raw.sendall(data[start : start + cut])
                while (piece := read(stream, 100)) is not None:
                    found += piece

        with pytest.raises(TamperedError):
            read_all()
    # A length that cannot be is seen, and the link is over, as soon as it is there.
    assert found == b"first" or (found == b"" and kind in ("too long", "too short"))


# --- memory -----------------------------------------------------------------------------------------------------------


def test_large_messages_take_no_memory_beside_the_buffers_of_the_stream() -> None:
    head, body = memoryview(bytes(64)), memoryview(bytearray(os.urandom(MIB)))
    into = memoryview(bytearray(MIB))
    with streams() as (one, other):

        def pass_one() -> None:
            sent = received = 0
            while received < 64 + MIB:
                if not sent:
                    with suppress(BlockingIOError):
                        sent = one.sendmsg((head, body))
                with suppress(BlockingIOError):
                    received += other.recv_into(into[: min(MIB, 64 + MIB - received) if received else 64])

        pass_one()
        tracemalloc.start()
        try:
            for _ in range(30):
                pass_one()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert into == body
    assert peak < 64 * KIB


def test_a_record_that_does_not_fit_takes_no_more_than_itself() -> None:
    with streams() as (one, other):
        data = memoryview(bytes(100 * KIB))
        tracemalloc.start()
        try:
            for _ in range(20):
                one.send(data)
                left = len(data)
                while left:
                    left -= len(read(other, 1000) or b"")
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 150 * KIB
