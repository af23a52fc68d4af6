"""When a rank that has crashed is started again."""

from __future__ import annotations

from ringfort.launch.restarts import HEALTHY_SECONDS, Restarts, delay


def test_the_delay_doubles_from_half_a_second_to_half_a_minute() -> None:
    assert [delay(crashes) for crashes in range(1, 10)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_million_crashes_in_a_row_wait_no_longer() -> None:
    assert delay(1_000_000) == 30


def test_a_rank_that_lived_for_a_minute_begins_with_the_first_delay_again() -> None:
    restarts = Restarts(limit=10)
    assert [restarts.crashed(1.0) for _ in range(3)] == [0.5, 1, 2]
    assert restarts.crashed(HEALTHY_SECONDS) == 0.5
    assert restarts.crashed(HEALTHY_SECONDS - 0.1) == 1


def test_no_rank_is_started_again_more_often_than_allowed_however_long_it_lived() -> None:
    restarts = Restarts(limit=2)
    assert [restarts.crashed(HEALTHY_SECONDS) for _ in range(4)] == [0.5, 0.5, None, None]
    assert restarts.used == 2


def test_without_restarts_the_first_crash_is_the_last() -> None:
    assert Restarts(limit=0).crashed(0.0) is None
