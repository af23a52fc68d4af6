"""Who looks at a peer, and for how long."""

from __future__ import annotations

import pytest

from ringfort.cluster.net.control_link import GOSSIP_RATE
from ringfort.errors import ProtocolError
from ringfort.telemetry.watching import (
    LEASE,
    MAX_LOGS,
    MAX_PART,
    MAX_REPORTS,
    MAX_WATCHERS,
    RENEW_EVERY,
    LogPart,
    LogRequest,
    Watchers,
    decode_part,
    decode_request,
    encode,
)


def test_a_viewer_is_answered_until_its_lease_is_over() -> None:
    watchers = Watchers()
    assert watchers.current(0.0) == []
    for now in (0.0, RENEW_EVERY, 2 * RENEW_EVERY):
        assert watchers.renew("a", now)
    assert watchers.current(2 * RENEW_EVERY + LEASE - 0.01) == ["a"]
    assert watchers.current(2 * RENEW_EVERY + LEASE) == []


def test_viewers_beyond_the_limit_wait_until_another_has_gone() -> None:
    watchers = Watchers()
    for number in range(MAX_WATCHERS):
        assert watchers.renew(str(number), number * 0.1)
    assert not watchers.renew("late", 1.0)
    assert watchers.renew("0", 1.0)  # one of those that look may go on
    assert "late" not in watchers.current(1.0)
    assert watchers.renew("late", LEASE + 0.1)  # the second one has gone


def test_output_is_sent_once_a_second_and_to_viewers_only() -> None:
    watchers = Watchers()
    assert not watchers.may_log("a", 0, 0.0)
    watchers.renew("a", 0.0)
    assert watchers.may_log("a", 0, 0.0)
    assert watchers.may_log("a", 0, 0.0)  # nothing was sent
    watchers.logged("a", 0, 0.0)
    assert not watchers.may_log("a", 0, 0.5)
    assert watchers.may_log("a", 1, 0.5)  # another rank
    assert watchers.may_log("a", 0, 1.0)
    assert not watchers.may_log("a", 0, LEASE)


def test_a_viewer_that_asks_for_the_output_of_every_rank_gets_that_of_some() -> None:
    watchers = Watchers()
    watchers.renew("a", 0.0)
    watchers.renew("b", 0.0)
    for rank in range(1000):
        if watchers.may_log("a", rank, 0.5):
            watchers.logged("a", rank, 0.5)
    assert len(watchers._logged) == MAX_LOGS
    assert watchers.may_log("b", 0, 0.5)


def test_the_notes_of_a_peer_with_very_many_ranks_fit_on_a_control_link() -> None:
    measurements = 1
    assert MAX_REPORTS + MAX_LOGS + measurements < GOSSIP_RATE


def test_requests_and_parts_of_output_survive_the_journey() -> None:
    request, part = LogRequest(3, 77, 5, 900), LogPart(3, 77, 900, b"x" * MAX_PART)
    assert decode_request(encode(request)) == request
    assert decode_part(encode(part)) == part
    assert (part.end, len(encode(part)) <= 2000) == (900 + MAX_PART, True)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x93\xff\x00\x00", encode(LogRequest(0))[:-1], b"\x91" * 5000])
def test_malformed_requests_and_parts_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="Malformed request"):
        decode_request(body)
    with pytest.raises(ProtocolError, match="Malformed output"):
        decode_part(body)
