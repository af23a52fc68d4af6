"""When a peer that waits is told about machines of other clusters, and what it is told."""

from __future__ import annotations

from ringfort.cluster.core.events import OtherClusters
from ringfort.cluster.core.other_clusters import ALONE_SECONDS, MAX_TOLD, OtherClusterWatch, describe_other_clusters

ATTIC, STUDY = "10.0.0.2", "10.0.0.3"


def test_who_waits_is_told_within_three_seconds_and_once() -> None:
    watch = OtherClusterWatch()
    times = [tenth / 10 for tenth in range(100)]
    told = [now for now in times if watch.look(now, [ATTIC], is_waiting=True)]
    assert told == [ALONE_SECONDS]
    assert ALONE_SECONDS < 3.0


def test_one_that_comes_later_is_told_too() -> None:
    watch = OtherClusterWatch()
    assert not watch.look(0.0, [], is_waiting=True)
    assert not watch.look(3.0, [], is_waiting=True)
    assert watch.look(4.0, [ATTIC], is_waiting=True)
    assert watch.look(5.0, [ATTIC, STUDY], is_waiting=True)
    assert not watch.look(6.0, [STUDY], is_waiting=True)


def test_who_has_company_is_told_nothing_and_the_wait_begins_anew_after_it() -> None:
    watch = OtherClusterWatch()
    assert not watch.look(0.0, [ATTIC], is_waiting=True)
    assert not watch.look(3.0, [ATTIC], is_waiting=False)
    assert not watch.look(4.0, [ATTIC], is_waiting=True)
    assert watch.look(4.0 + ALONE_SECONDS, [ATTIC], is_waiting=True)


def test_somebody_who_floods_the_network_does_not_fill_the_log() -> None:
    watch = OtherClusterWatch()
    assert sum(watch.look(float(now), [f"10.0.0.{now}"], is_waiting=True) for now in range(100)) == MAX_TOLD


def test_it_says_how_many_machines_and_both_commands() -> None:
    one = str(OtherClusters((ATTIC,)))
    assert one.startswith("1 machine of another cluster announces itself here (10.0.0.2).\n")
    assert "`ringfort key show` on one machine" in one
    assert "`ringfort key join CODE` on the others" in one
    many = describe_other_clusters([f"10.0.0.{number}" for number in range(1, 7)])
    assert many.startswith("6 machines of other clusters announce themselves here (10.0.0.1, ")
    assert many.endswith("10.0.0.4 and 2 more)")
