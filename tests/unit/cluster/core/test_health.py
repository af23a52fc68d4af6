"""Health: silence is judged by what is usual on a link."""

from __future__ import annotations

import pytest

from ringfort.cluster.core.health import HealthMonitor, HealthStatus
from ringfort.config import HealthConfig


def steady(monitor: HealthMonitor, peer: str, start: float, beats: int, pauses: tuple[float, ...] = (0.2,)) -> float:
    """Lets `peer` beat; returns the time of the last one."""
    now = start
    for beat in range(beats):
        now += pauses[beat % len(pauses)]
        monitor.heard(peer, now)
        monitor.check(now)
    return now


@pytest.fixture
def monitor() -> HealthMonitor:
    monitor = HealthMonitor(HealthConfig.lan())
    monitor.watch("a", 0.0)
    return monitor


def test_a_peer_is_unknown_until_it_is_heard(monitor: HealthMonitor) -> None:
    assert monitor.check(0.1) == []
    assert monitor.status("a") is HealthStatus.UNKNOWN
    assert monitor.status("stranger") is HealthStatus.UNKNOWN


def test_a_peer_that_beats_is_healthy_and_that_is_told_once(monitor: HealthMonitor) -> None:
    monitor.heard("a", 0.2)
    assert [event.status for event in monitor.check(0.2)] == [HealthStatus.HEALTHY]
    monitor.heard("a", 0.4)
    assert monitor.check(0.4) == []


def test_silence_degrades_and_then_loses_a_peer(monitor: HealthMonitor) -> None:
    last = steady(monitor, "a", 0.0, 20)
    assert monitor.check(last + 0.45) == []
    assert [e.status for e in monitor.check(last + 0.6)] == [HealthStatus.DEGRADED]
    (lost,) = monitor.check(last + 1.05)
    assert (lost.status, lost.was) == (HealthStatus.UNHEALTHY, HealthStatus.DEGRADED)
    assert lost.silence == pytest.approx(1.05)


def test_a_busy_peer_is_degraded_for_as_long_as_it_says_so_and_never_lost(monitor: HealthMonitor) -> None:
    now = steady(monitor, "a", 0.0, 20)
    told: list[str] = []
    for busy in (*[True] * 50, False):
        now += 0.2
        monitor.heard("a", now, busy=busy)
        told += [str(event) for event in monitor.check(now)]
        assert monitor.is_busy("a") is busy
    assert told == [
        "a is degraded (was healthy): its program is busy and does not respond",
        "a is healthy (was degraded): silent for 0.0 s",
    ]


def test_a_peer_that_never_says_a_word_is_lost_too(monitor: HealthMonitor) -> None:
    assert [e.status for e in monitor.check(1.0)] == [HealthStatus.UNHEALTHY]


def test_a_link_that_stutters_is_given_longer_but_not_for_ever(monitor: HealthMonitor) -> None:
    monitor.watch("b", 0.0)
    steady(monitor, "a", 0.0, 40)
    steady(monitor, "b", 0.0, 40, (0.05, 0.6))
    assert monitor.limit("a") == pytest.approx(1.0)
    assert 1.5 < monitor.limit("b") <= 2.0
    steady(monitor, "b", 20.0, 40, (0.05, 1.9))
    assert monitor.limit("b") == 2.0


def test_a_lost_peer_that_is_heard_again_is_healthy_and_its_absence_counts(monitor: HealthMonitor) -> None:
    monitor.heard("a", 0.2)
    monitor.check(0.2)
    monitor.check(5.0)
    monitor.heard("a", 10.0)
    assert [e.status for e in monitor.check(10.0)] == [HealthStatus.HEALTHY]
    assert monitor.summary(10.0).uptime == pytest.approx(0.5)


def test_a_slow_answer_degrades(monitor: HealthMonitor) -> None:
    monitor.heard("a", 0.2)
    monitor.answered("a", 0.4)
    assert [e.status for e in monitor.check(0.2)] == [HealthStatus.DEGRADED]


def test_the_round_trip_is_smoothed_and_its_jitter_measured(monitor: HealthMonitor) -> None:
    for seconds in (0.010, 0.010, 0.020):
        monitor.answered("a", seconds)
    assert monitor.round_trip("a") == pytest.approx(0.012)
    assert monitor.jitter("a") == pytest.approx(0.002)


def test_the_summary_counts_all_and_forgets_the_forgotten(monitor: HealthMonitor) -> None:
    monitor.watch("b", 0.0)
    monitor.watch("c", 0.0)
    monitor.heard("a", 1.2)
    monitor.answered("a", 0.001)
    monitor.check(1.2)
    monitor.forget("c")
    summary = monitor.summary(1.2)
    assert (summary.total, summary.healthy, summary.unhealthy, summary.round_trip) == (2, 1, 1, 0.001)
    assert not summary.is_sound


def test_bad_wifi_is_forgiven_what_a_cable_is_not() -> None:
    monitor = HealthMonitor(HealthConfig.wifi())
    monitor.watch("a", 0.0)
    monitor.heard("a", 0.5)
    monitor.check(0.5)
    assert HealthStatus.UNHEALTHY not in [e.status for e in monitor.check(3.0)]
