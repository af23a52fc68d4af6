"""Headers: what is packed is parsed, and what no peer would send is refused."""

from __future__ import annotations

import pytest
from hypothesis import example, given, strategies as st

from ringfort.errors import ProtocolError
from ringfort.transport import frames
from ringfort.transport.frames import DATA, HEADER_BYTES, MAX_CONTROL, MAX_FRAGMENT, MAX_MESSAGE, Header, pack, parse

CONTROL = range(frames.CLEAR_TO_SEND, frames.WAKE_UP + 1)

u64 = st.integers(0, 2**64 - 1)


@st.composite
def headers(draw: st.DrawFn) -> Header:
    kind = draw(st.sampled_from([DATA, *CONTROL]))
    total = draw(st.integers(0, MAX_MESSAGE) if kind == DATA else u64)
    length = draw(st.integers(0, min(total, MAX_FRAGMENT) if kind == DATA else MAX_CONTROL))
    return Header(
        kind,
        flags=draw(st.integers(0, 255)),
        length=length,
        epoch=draw(st.integers(0, 2**32 - 1)),
        comm_id=draw(u64),
        tag=draw(u64),
        operation=draw(u64),
        total=total,
        call=draw(st.binary(min_size=16, max_size=16)),
    )


@given(headers(), st.binary(max_size=20))
def test_a_packed_header_is_parsed_to_the_same(header: Header, before: bytes) -> None:
    fields = header._asdict()
    packed = pack(fields.pop("kind"), **fields)
    assert len(packed) == HEADER_BYTES
    assert parse(before + packed + b"payload", len(before)) == header


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
@example(bytes(HEADER_BYTES))
@example(b"\xff" * HEADER_BYTES)
@example(b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: text/html\r\n\r\n".ljust(HEADER_BYTES))
def test_any_bytes_are_a_header_within_the_limits_or_a_protocol_error(data: bytes) -> None:
    try:
        header = parse(data)
    except ProtocolError:
        return
    if header.kind == DATA:
        assert header.length <= min(header.total, MAX_FRAGMENT)
        assert header.total <= MAX_MESSAGE
    else:
        assert header.kind in CONTROL
        assert header.length <= MAX_CONTROL


@pytest.mark.parametrize(
    ("kind", "length", "total"),
    [
        (DATA, MAX_FRAGMENT + 1, MAX_MESSAGE),
        (DATA, 2**32 - 1, 2**64 - 1),
        (DATA, 11, 10),
        (DATA, 0, MAX_MESSAGE + 1),
        *((kind, MAX_CONTROL + 1, 2**64 - 1) for kind in CONTROL),
        (0, 0, 0),
        (frames.WAKE_UP + 1, 0, 0),
        (255, 0, 0),
    ],
)
def test_a_claim_beyond_the_limits_is_refused_with_its_numbers(kind: int, length: int, total: int) -> None:
    with pytest.raises(ProtocolError, match=str(kind if kind not in (DATA, *CONTROL) else length or total)):
        parse(pack(kind, length=length, total=total))


@pytest.mark.parametrize(
    ("length", "total"), [(0, 0), (MAX_FRAGMENT, MAX_FRAGMENT), (0, MAX_MESSAGE), (1, MAX_MESSAGE)]
)
def test_a_claim_at_the_limits_is_taken(length: int, total: int) -> None:
    assert parse(pack(DATA, length=length, total=total))[2] == length


def test_the_wire_codes_never_change() -> None:
    assert (frames.DATA, frames.CLEAR_TO_SEND, frames.CANCEL, frames.ABORT, frames.GOODBYE) == (1, 2, 3, 4, 5)
    packed = pack(DATA, flags=1, length=2, epoch=3, comm_id=4, tag=5, operation=6, total=7, call=bytes(range(16)))
    assert packed.hex(" ", 8) == (
        "0101000002000000 0300000000000000 0400000000000000 0500000000000000 "
        "0600000000000000 0700000000000000 0001020304050607 08090a0b0c0d0e0f"
    )
