"""Abort reasons: what one rank tells the others when a group fails, and the error that it becomes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given, strategies as st

from ringfort.errors import (
    AbortedError,
    ChannelClosedError,
    CollectiveMismatchError,
    OperationTimeoutError,
    PeerLostError,
    ProtocolError,
)
from ringfort.transport.abort_reasons import (
    Aborted,
    AbortReason,
    Left,
    Lost,
    Mismatch,
    TimedOut,
    decode,
    encode,
    to_error,
)
from ringfort.transport.frames import MAX_CONTROL

ranks = st.integers(0, 1 << 31)
words = st.text(max_size=200)
abort_reasons = st.one_of(
    st.builds(Lost, ranks, words, st.one_of(st.none(), ranks)),
    st.builds(Left, ranks),
    st.builds(Mismatch, ranks, words, ranks, words, ranks),
    st.builds(Aborted, ranks, words),
    st.builds(TimedOut, ranks, words, st.floats(0, 1e9), st.one_of(st.none(), ranks)),
)


@given(abort_reasons)
def test_an_abort_reason_is_the_same_after_its_journey(abort_reason: AbortReason) -> None:
    assert decode(encode(abort_reason)) == abort_reason


@pytest.mark.parametrize("letter", ["a", "é", "\N{GRINNING FACE}", "\0"])
@pytest.mark.parametrize("length", [899, 900, 901, 5000])
def test_a_long_reason_is_cut_to_fit_a_control_frame(letter: str, length: int) -> None:
    for abort_reason in (Aborted(1, letter * length), Lost(1, letter * length), TimedOut(1, letter * length, 1.0, 2)):
        payload = encode(abort_reason)
        assert len(payload) <= MAX_CONTROL
        got = decode(payload)
        text = got.what if isinstance(got, TimedOut) else got.reason  # type: ignore[union-attr]
        assert text == (letter * length if length <= 900 else letter * 900 + "...")


@given(st.binary(max_size=200))
@example(b"")
@example(msgspec.msgpack.encode({"type": "aborted", "rank": "one", "reason": 5}))
@example(msgspec.msgpack.encode({"type": "unknown"}))
@example(msgspec.msgpack.encode(["aborted", 1, "reason"]))
@example(b"\x83\xa4type\xa7aborted\xa4rank\x01\xa6reason\xa2\xff\xff")
def test_what_is_no_abort_reason_is_a_protocol_error(payload: bytes) -> None:
    try:
        abort_reason = decode(payload)
    except ProtocolError:
        return
    assert decode(encode(abort_reason)) == abort_reason


def test_each_abort_reason_becomes_the_error_that_it_is_at_the_one_who_hears_it() -> None:
    lost = to_error(Lost(3, "cable pulled"), me=0)
    assert isinstance(lost, PeerLostError)
    assert (lost.peer, lost.reason) == (3, "cable pulled")

    told = to_error(Lost(3, "cable pulled", by=1), me=3)
    assert isinstance(told, PeerLostError)
    assert (told.peer, told.reason) == (1, "it reported that its connection to this rank failed: cable pulled")
    assert str(told) == "Rank 1 reported that its connection to this rank failed: cable pulled"
    assert to_error(Lost(3, "cable pulled", by=1), me=2).peer == 3

    left = to_error(Left(3), me=0)
    assert isinstance(left, ChannelClosedError)
    assert left.peer == 3

    mismatch = to_error(Mismatch(1, "barrier()", 2, "gather()", 7), me=0)
    assert isinstance(mismatch, CollectiveMismatchError)
    assert (mismatch.rank, mismatch.ours, mismatch.peer, mismatch.theirs) == (1, "barrier()", 2, "gather()")
    assert mismatch.operation == 7

    about_us = to_error(Mismatch(1, "barrier()", 2, "gather()", 7), me=2)
    assert isinstance(about_us, CollectiveMismatchError)
    assert (about_us.rank, about_us.ours, about_us.peer, about_us.theirs) == (2, "gather()", 1, "barrier()")

    aborted = to_error(Aborted(2, "enough"), me=0)
    assert isinstance(aborted, AbortedError)
    assert (aborted.peer, aborted.reason) == (2, "enough")


def test_a_rank_that_hears_its_own_abort_reason_blames_nobody() -> None:
    aborted = to_error(Aborted(2, "enough"), me=2)
    assert isinstance(aborted, AbortedError)
    assert aborted.peer is None

    timed_out = TimedOut(2, "barrier(), waiting for rank 1", 1.5, 1)
    own = to_error(timed_out, me=2)
    assert isinstance(own, OperationTimeoutError)
    assert (own.timeout, own.peer) == (1.5, 1)
    others = to_error(timed_out, me=0)
    assert isinstance(others, AbortedError)
    assert others.peer == 2
    assert "barrier(), waiting for rank 1" in str(others)


def test_an_error_is_made_anew_each_time() -> None:
    abort_reason = Aborted(2, "enough")
    assert to_error(abort_reason, 0) is not to_error(abort_reason, 0)
