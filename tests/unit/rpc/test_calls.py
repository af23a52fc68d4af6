"""Every call ends once, whoever ends it."""

from __future__ import annotations

import time
from concurrent.futures import CancelledError

import pytest

from ringfort.errors import RpcOverloadedError, RpcPeerLostError, RpcTimeoutError
from ringfort.rpc.calls import Calls

NEVER = float("inf")


def table(most: int = 10) -> tuple[Calls, list[int]]:
    told: list[int] = []
    return Calls(most, lambda call: told.append(call.number)), told


def test_a_call_is_taken_once_and_only_by_its_peer() -> None:
    calls, _ = table()
    call = calls.open(1, "f on rank 1", 5)
    assert calls.get(call.number, peer=2) is None
    assert calls.get(call.number, peer=1) is call
    assert calls.take(call)
    assert not calls.take(call)
    assert calls.get(call.number, peer=1) is None
    assert len(calls) == 0


def test_deadlines_end_calls_and_tell_the_other_side() -> None:
    calls, told = table()
    now = time.monotonic()
    assert calls.expire(now) == NEVER
    late, early = calls.open(1, "late", 50), calls.open(1, "early", 5)
    assert calls.expire(now) == early.deadline
    assert calls.expire(now + 10) == late.deadline
    with pytest.raises(RpcTimeoutError, match="early"):
        early.result(0)
    assert not late.done()
    assert told == [early.number]
    assert calls.take(late)
    assert calls.expire(now + 20) == late.deadline  # looked at once more than needed, and no oftener
    assert calls.expire(now + 60) == NEVER
    assert told == [early.number]


def test_a_call_that_was_given_up_cannot_end_again() -> None:
    calls, told = table()
    call = calls.open(1, "f", 5)
    assert call.cancel()
    assert told == [call.number]
    assert not calls.take(call)
    calls.fail(1, "it died")
    assert calls.expire(time.monotonic() + 10) == NEVER
    with pytest.raises(CancelledError):
        call.result(0)
    assert call.cancel()  # as for any future: it is cancelled
    assert told == [call.number]


def test_a_lost_peer_ends_its_calls_and_no_others() -> None:
    calls, told = table()
    one, two = calls.open(1, "f", 5), calls.open(2, "g", 5)
    calls.fail(1, "it died")
    with pytest.raises(RpcPeerLostError, match=r"Lost rank 1: it died \(f had not ended\)"):
        one.result(0)
    assert not one.cancel()
    assert not two.done()
    calls.fail(None, "it died")
    assert two.done()
    assert told == []


def test_calls_to_one_peer_are_bounded() -> None:
    calls, _ = table(2)
    first, _ = calls.open(1, "f", 5), calls.open(1, "f", 5)
    with pytest.raises(RpcOverloadedError, match=r"calls to rank 1 in flight \(max_in_flight=2\)"):
        calls.open(1, "f", 5)
    calls.open(2, "f", 5)
    calls.take(first)
    calls.open(1, "f", 5)
