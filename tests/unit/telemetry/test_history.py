"""Histories of made-up runs in virtual time: where time goes, who is to blame, and that memory stays bounded."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ringfort.dashboard.states import notices
from ringfort.telemetry.curves import MAX_POINTS, Points
from ringfort.telemetry.event_log import MAX_EVENTS
from ringfort.telemetry.history import MAX_RANKS, MAX_RUNS
from ringfort.telemetry.records import Event, Step, Values
from ringfort.telemetry.view import LinkView, ShownEvent
from tests.helpers.telemetry import Rank, SimulatedRun, size_of

WIFI = [LinkView("study", "laptop", measured=10.5e6, kind="Wi-Fi"), LinkView("laptop", "study", measured=10.5e6)]


def test_the_rank_that_came_last_waits_for_nobody() -> None:
    run = SimulatedRun([Rank("study", compute=0.1), Rank("laptop", compute=0.3)], wire=0.05)
    view = run.advance(30)
    study, laptop = view.ranks
    assert laptop.split.waiting == pytest.approx(0, abs=1e-9)
    assert laptop.split.wire == pytest.approx(0.05)
    assert study.split.waiting == pytest.approx(0.2)
    assert study.split.wire == pytest.approx(0.05)
    assert study.split.compute == pytest.approx(0.1)
    assert view.verdict.steps_per_second == pytest.approx(1 / 0.35, rel=0.02)
    assert view.verdict.samples_per_second == pytest.approx(64 / 0.35, rel=0.02)
    # study alone: 320 samples/s.
    assert view.verdict.speed_up == pytest.approx(64 / 0.35 / 320, rel=0.02)


def test_a_slow_machine_is_named_and_the_saving_is_that_of_fair_shares() -> None:
    view = SimulatedRun([Rank("study", compute=0.1), Rank("laptop", compute=0.3)], wire=0.01).advance(30)
    verdict = view.verdict
    assert (verdict.cause, verdict.culprit) == ("slow_machine", "laptop")
    assert "study waits 65% of each step for laptop" in verdict.sentence
    # Shares of 3 to 1: both compute for 0.15 s.
    assert verdict.saving == pytest.approx(0.15)
    assert "150 ms" in verdict.sentence


def test_a_slow_link_is_named_with_what_compression_would_save() -> None:
    run = SimulatedRun(
        [Rank("study"), Rank("laptop")], wire=0.3, links=WIFI, codec_seconds={"int8": 0.02, "int4": 0.03}
    )
    verdict = run.advance(30).verdict
    assert (verdict.cause, verdict.saving) == ("slow_link", pytest.approx(0.3 * (1 - 516 / 2048) - 0.02))
    assert "75% of each step is spent on the link between" in verdict.sentence
    assert "Wi-Fi, 84 Mbit/s" in verdict.sentence
    assert "compression int8 would save about 204 ms" in verdict.sentence
    assert "The fastest alone would be faster" in verdict.sentence


def test_of_three_machines_the_one_on_the_slow_link_is_named() -> None:
    speeds = {("study", "laptop"): 10e6, ("attic", "laptop"): 10e6, ("study", "attic"): 120e6}
    links = [LinkView(a, b, measured=speed) for pair, speed in speeds.items() for a, b in (pair, pair[::-1])]
    verdict = SimulatedRun([Rank("study"), Rank("laptop"), Rank("attic")], wire=0.3, links=links).advance(30).verdict
    assert (verdict.cause, verdict.culprit) == ("slow_link", "laptop")


def test_a_link_is_at_least_as_fast_as_what_it_carries() -> None:
    busy = [LinkView("study", "laptop", measured=0.4e6), LinkView("laptop", "study", measured=3e6)]
    view = SimulatedRun([Rank("study"), Rank("laptop")], wire=0.3, links=busy).advance(30)
    assert {(link.source, link.used, link.measured) for link in view.links} == {
        ("study", 1e6, 1e6), ("laptop", 1e6, 3e6)
    }  # fmt: skip
    assert "the link between laptop and study (8 Mbit/s)" in view.verdict.sentence


def test_a_link_that_is_compressed_already_gets_other_advice() -> None:
    run = SimulatedRun([Rank("study", codec=0.01), Rank("laptop", codec=0.01)], wire=0.3, compression="int8")
    verdict = run.advance(30).verdict
    assert verdict.saving == 0
    assert "compressed already (int8, which saves about 881 ms)" in verdict.sentence


@pytest.mark.parametrize("other", [0.0, 0.2])
def test_a_data_loader_is_named(other: float) -> None:
    run = SimulatedRun([Rank("study", data=other), Rank("laptop", data=0.2)], wire=0.01)
    verdict = run.advance(30).verdict
    assert (verdict.cause, verdict.saving) == ("data", pytest.approx(0.2))
    if other:
        assert "All ranks wait 65% of each step for their data loaders" in verdict.sentence
    else:
        assert "study waits 65% of each step for laptop and its data loader; more loader" in verdict.sentence
    assert verdict.culprit == ("" if other else "laptop")


def test_a_step_that_others_have_not_reported_yet_is_not_taken_for_wire() -> None:
    ranks = [Rank("study", compute=0.1), Rank("laptop", compute=0.3)]
    run = SimulatedRun(ranks, wire=0.05)
    run.advance(30)
    run.history.take(run.report(ranks[0], [Step(10**6, run.now, 0.35, exchange=0.25, samples=32)]))
    timeline = run.view().timeline
    assert timeline[0][-1].number == timeline[1][-1].number < 10**6  # nor is it shown
    newest = timeline[0][-1]
    assert (newest.split.waiting, newest.split.wire) == (pytest.approx(0.2), pytest.approx(0.05))


def test_the_timelines_of_all_ranks_have_the_same_steps() -> None:
    ranks = [Rank("study"), Rank("laptop")]
    run = SimulatedRun(ranks)
    run.advance(5)
    for number in range(1000, 1400):  # one of them reports every second step only
        for rank, every in zip(ranks, (1, 2), strict=True):
            steps = [Step(number, run.now, 0.02, exchange=0.01)] if number % every == 0 else []
            run.history.take(run.report(rank, steps))
        run.now += 0.02
    timeline = run.view().timeline
    numbers = [[step.number for step in timeline[rank]] for rank in range(2)]
    assert numbers[0] == numbers[1] == list(range(1272, 1400, 2))
    late = Rank("attic")  # who comes later makes the others no shorter
    run.ranks.append(late)
    run.history.take(run.report(late, []))
    assert [len(steps) for steps in run.view().timeline.values()] == [len(numbers[0]), len(numbers[0]), 0]
    run.history.take(run.report(late, [Step(1398, run.now, 0.02, exchange=0.01)]))
    timeline = run.view().timeline
    assert [step.number for step in timeline[2]] == [1398]
    assert len(timeline[0]) == len(numbers[0])


def test_what_a_rank_sends_is_a_mean_of_the_window() -> None:
    ranks = [Rank("study"), Rank("laptop")]
    run = SimulatedRun(ranks)
    run.advance(60)
    for second in range(10):
        run.now += 1
        for rank in ranks:
            sent = {1: 4e6 if second % 2 else 0.0}
            run.history.take(msgspec.structs.replace(run.report(rank, []), sent=sent, received=sum(sent.values())))
    run.now += 0.1
    run.history.take(run.report(ranks[0], [Step(10**6, run.now, 0.1, exchange=0.05)]))
    study = run.view().ranks[0]
    assert study.received == pytest.approx(2e6, rel=0.15)
    assert study.sent == pytest.approx(2e6, rel=0.15)
    assert next(link.used for link in run.view().links if link.source == "study") == pytest.approx(2e6, rel=0.15)


def test_what_has_changed_is_seen_after_a_window() -> None:
    ranks = [Rank("study", compute=0.6), Rank("laptop", compute=1.8)]
    run = SimulatedRun(ranks, wire=0.01)
    assert run.advance(120).verdict.cause == "slow_machine"
    ranks[1].compute, run.wire = 0.6, 0.6
    view = run.advance(15)
    assert (view.ranks[0].split.waiting, view.ranks[0].split.wire) == (pytest.approx(0), pytest.approx(0.6))
    assert (view.verdict.cause, view.verdict.saving) == ("slow_link", pytest.approx(0.6 * (1 - 516 / 2048)))


def test_ranks_that_number_their_steps_differently_are_still_compared() -> None:
    run = SimulatedRun([Rank("study"), Rank("laptop", compute=0.3, numbers_from=1_000_000)], wire=0.05)
    study, laptop = run.advance(30).ranks
    assert study.split.waiting == pytest.approx(0.2)
    assert (laptop.split.waiting, laptop.split.wire) == (pytest.approx(0), pytest.approx(0.05))
    assert run.view().verdict.culprit == "laptop"


@pytest.mark.parametrize("is_known", [False, True], ids=["never-seen", "silent-now"])
def test_nobody_is_named_and_nothing_advised_while_a_rank_is_not_seen(is_known: bool) -> None:
    slow = Rank("laptop", compute=0.3, is_seen=is_known)
    run = SimulatedRun([Rank("study"), Rank("attic"), slow], wire=0.01, links=WIFI)
    before = run.advance(30)
    slow.is_seen = False
    view = run.advance(30)
    assert (view.seen, view.world_size) == (2, 3)
    assert view.verdict.sentence == (
        "2 of 3 ranks are seen; up to 68% of each step is spent in collectives, and who waits for whom cannot be told."
    )
    assert (view.verdict.cause, view.verdict.culprit, view.verdict.saving) == ("unknown", "", 0)
    assert view.verdict.speed_up is None
    slow.is_seen = True
    view = run.advance(2)
    assert (view.verdict.cause, view.verdict.culprit) == ("slow_machine", "laptop")
    assert view.verdict.speed_up is not None
    assert before.is_whole == is_known


def test_a_rank_that_has_ended_is_missed_only_once_it_had_no_part_in_what_is_shown() -> None:
    ranks = [Rank("study"), Rank("laptop")]
    run = SimulatedRun(ranks)
    run.advance(10)
    ranks[1].is_alive = False
    assert run.advance(5).is_whole
    view = run.advance(10)  # the rest says that it still has two ranks
    assert not view.is_whole
    assert view.verdict.sentence.startswith("1 of 2 ranks is seen; ")


@pytest.mark.parametrize("becomes", ["learner", "silent"])
def test_a_member_of_an_earlier_group_is_not_missed(becomes: str) -> None:
    class Regrouped(SimulatedRun):
        is_regrouped = False

        def report(self, rank: Rank, *arguments: Any, **keywords: Any) -> Any:
            found = super().report(rank, *arguments, **keywords)
            changes: dict[str, Any] = {}
            if self.is_regrouped:
                is_out = rank is self.ranks[2]
                changes = {"rank": -1, "role": "learner"} if is_out else {"epoch": 2, "world_size": 2}
            return msgspec.structs.replace(found, header=msgspec.structs.replace(found.header, **changes))

    run = Regrouped([Rank("study"), Rank("attic", compute=0.3), Rank("laptop")], wire=0.01)
    assert run.advance(30).is_whole
    run.is_regrouped, run.ranks[2].is_seen = True, becomes == "learner"
    view = run.advance(30)
    assert (view.world_size, view.is_whole) == (2, True)
    assert view.verdict.culprit == "attic"


def test_a_learner_is_not_judged() -> None:
    run = SimulatedRun([Rank("study"), Rank("laptop"), Rank("attic", compute=0.0, role="learner")], wire=0.1)
    verdict = run.advance(30).verdict
    assert "while attic copies the state of the run" in verdict.sentence


def test_all_well() -> None:
    view = SimulatedRun([Rank("study"), Rank("laptop")], wire=0.004, total_steps=1000).advance(30)
    assert view.verdict.cause == "well"
    assert view.verdict.speed_up == pytest.approx(2 / 1.04, rel=0.02)
    assert view.verdict.eta == pytest.approx((1000 - view.verdict.step) * 0.104, rel=0.02)
    assert view.verdict.loss == pytest.approx(10 / view.verdict.step)


def test_a_rank_that_dies_is_lost_and_its_successor_takes_its_place() -> None:
    ranks = [Rank("study"), Rank("laptop")]
    run = SimulatedRun(ranks)
    run.advance(10)
    ranks[1].is_alive = False
    view = run.advance(2)
    assert [rank.state for rank in view.ranks] == ["training", "lost"]
    assert [(event.kind, event.name) for event in view.events][-1] == ("lost", "laptop")
    assert view.verdict.cause == "well"
    run.ranks[1] = Rank("laptop", pid=500)
    view = run.advance(2)
    assert [(event.kind, event.name) for event in view.events][-1] == ("joined", "laptop")
    assert sorted(rank.state for rank in view.ranks) == ["lost", "training", "training"]
    assert len(run.advance(30).ranks) == 2


def test_a_rank_that_has_finished_is_not_lost() -> None:
    ranks = [Rank("study"), Rank("laptop")]
    run = SimulatedRun(ranks)
    run.advance(10)
    ranks[1].is_alive, ranks[1].is_finished = False, True
    view = run.advance(2)
    assert [rank.state for rank in view.ranks] == ["training", "ended"]
    assert [(event.kind, event.text) for event in view.events][-1] == ("ended", "rank 1 on laptop has ended")
    assert notices(view) == []
    ranks[0].is_alive, ranks[0].is_finished = False, True
    view = run.advance(2)
    assert view.verdict.sentence == "All ranks have ended."
    assert not any(event.kind == "lost" for event in view.events)


def test_the_last_steps_of_a_run_that_has_ended_stay_in_the_picture() -> None:
    ranks = [Rank("study", compute=0.1), Rank("laptop", compute=0.3)]
    run = SimulatedRun(ranks, wire=0.1, total_steps=500)
    run.advance(20)
    lost, ranks[1].is_alive = ranks[1], False
    run.advance(2)
    run.ranks[1] = Rank("laptop", compute=0.3, pid=500)
    before = run.advance(60)
    for rank in run.ranks:
        rank.is_alive, rank.is_finished = False, True
    view = run.advance(120)
    assert view.verdict.sentence == "All ranks have ended."
    assert [rank.state for rank in view.ranks] == ["ended", "ended"]
    assert lost.pid + 1 not in [rank.pid for rank in view.ranks], "it was replaced long ago"
    for rank, earlier in zip(view.ranks, before.ranks, strict=True):
        assert msgspec.structs.astuple(rank.split) == pytest.approx(msgspec.structs.astuple(earlier.split))
    assert view.ranks[0].split.wire == pytest.approx(0.1)
    assert view.timeline == before.timeline
    assert view.verdict.total_steps == 500
    assert [rank.samples_per_second for rank in view.ranks] == [0.0, 0.0]


def test_a_machine_that_invents_runs_pushes_out_its_own() -> None:
    run = SimulatedRun([Rank("study"), Rank("laptop")], run="real")
    run.advance(10)
    alone = SimulatedRun([Rank("attic")], run="alone")
    run.history.take(alone.report(alone.ranks[0], []), run.now)
    for number in range(10 * MAX_RUNS):
        run.now += 0.05
        liar = SimulatedRun([Rank("liar")], run=f"run {number}")
        run.history.take(liar.report(liar.ranks[0], []), run.now)
    names = run.view().runs
    assert len(names) == MAX_RUNS
    assert {"real", "alone", f"run {number}"} <= set(names)
    assert len(run.history.view("real").curves[0].at) > 5


def test_a_machine_that_invents_processes_pushes_out_its_own() -> None:
    run = SimulatedRun([Rank("study"), Rank("laptop")])
    run.advance(10)
    liar = Rank("liar")
    run.ranks.append(liar)
    for pid in range(1000, 1000 + 3 * MAX_RANKS):
        run.now += 0.001
        liar.pid = pid
        run.history.take(run.report(liar, []))
    view = run.view()
    assert [(rank.name, rank.state) for rank in view.ranks[:2]] == [("study", "training"), ("laptop", "training")]
    assert len(view.ranks) == MAX_RANKS
    assert {event.name for event in view.events} > {"liar"}  # nor does it push out the events of others


@pytest.mark.parametrize("flooding", ["laptop", "study"])
def test_a_flood_of_events_of_one_rank_does_not_hide_the_loss_of_another(flooding: str) -> None:
    run = SimulatedRun([Rank("study"), Rank(flooding, host=flooding)])
    run.advance(2)
    run.history.take(run.report(run.ranks[0], [], [Event(run.now, "lost", "attic is gone")]))
    for number in range(5000):
        run.now += 0.01
        run.history.take(run.report(run.ranks[1], [], [Event(run.now, "flood", str(number))]))
    events = run.view().events
    assert len(events) == MAX_EVENTS
    assert ("lost", "attic is gone") in [(event.kind, event.text) for event in events]
    assert events[-1].text == "4999"


def test_a_silent_machine_and_one_without_steps_are_told_apart() -> None:
    run = SimulatedRun([Rank("study"), Rank("laptop")])
    run.advance(10)
    run.now += 6
    assert [rank.state for rank in run.view().ranks] == ["silent", "silent"]
    assert run.view().verdict.sentence == "Nothing has been heard of this run for a while."
    for _ in range(8):
        run.now += 1
        for rank in run.ranks:
            run.history.take(run.report(rank, []))
    assert [rank.state for rank in run.view().ranks] == ["paused", "paused"]
    assert run.view().verdict.sentence.startswith("Paused")


def test_clocks_that_differ_and_jump_do_not_move_the_timeline() -> None:
    ranks = [Rank("study"), Rank("laptop", clock=-3600.0)]
    run = SimulatedRun(ranks)
    view = run.advance(10)
    assert view.timeline[1][-1].start == pytest.approx(view.timeline[0][-1].start, abs=0.01)
    ranks[1].clock = 7200.0
    view = run.advance(3)
    assert view.timeline[1][-1].start == pytest.approx(view.timeline[0][-1].start, abs=0.01)


def test_a_report_that_was_under_way_for_long_does_not_move_the_timeline() -> None:
    run = SimulatedRun([Rank("study"), Rank("laptop")])
    run.advance(5)
    late = run.report(run.ranks[1], [])
    run.history.take(late, run.now + 3)
    run.now += 3
    view = run.advance(3)
    assert view.timeline[1][-1].start == pytest.approx(view.timeline[0][-1].start, abs=0.01)


def test_events_told_by_several_ranks_are_shown_once_and_never_grow() -> None:
    run = SimulatedRun([Rank("study"), Rank("laptop")])
    run.advance(2)
    for rank in run.ranks:
        run.history.take(run.report(rank, [], [Event(run.now, "lost", "attic is gone")]))
    assert [event.text for event in run.view().events].count("attic is gone") == 1
    for number in range(10_000):
        run.history.add_event(ShownEvent(run.now, "flood", str(number)))
    assert len(run.view().events) == MAX_EVENTS


def test_a_peer_that_sends_nonsense_is_shown_as_such() -> None:
    run = SimulatedRun([Rank("study"), Rank("laptop")])
    run.advance(3)
    run.history.nonsense("laptop", "laptop")
    view = run.view()
    assert [rank.state for rank in view.ranks] == ["training", "nonsense"]
    assert "laptop sends reports that cannot be read" in view.notice


def test_the_lowest_rank_tells_a_curve_and_another_one_when_that_is_gone() -> None:
    run = SimulatedRun([Rank("study"), Rank("laptop")])
    run.advance(5)

    def tell(number: int, loss: float) -> float | None:
        report = run.report(run.ranks[number], [])
        values = (Values(1000, run.now, {"loss": loss}),)
        run.history.take(msgspec.structs.replace(report, values=values))
        return run.view().verdict.loss

    assert tell(0, 1.0) == 1.0
    assert tell(1, 2.0) == 1.0
    run.now += 11
    assert tell(1, 3.0) == 3.0  # the first has not been heard of for a while
    assert tell(0, 4.0) == 4.0


def test_several_runs_are_told_apart() -> None:
    run = SimulatedRun([Rank("study")], run="mine")
    other = SimulatedRun([Rank("attic")], run="theirs")
    run.advance(5)
    for rank in other.ranks:
        run.history.take(other.report(rank, []), run.now)
    view = run.history.view("theirs")
    assert (view.run, [rank.name for rank in view.ranks]) == ("theirs", ["attic"])
    assert run.history.view().run == "mine"
    assert set(view.runs) == {"mine", "theirs"}
    assert run.history.view("nobody's").ranks == ()


def test_curves_keep_their_shape_and_their_newest_point() -> None:
    points = Points()
    for number in range(100_000):
        points.add(float(number), number, float(number))
    curve = points.curve("loss")
    assert MAX_POINTS // 2 <= len(curve.at) <= MAX_POINTS + 1
    assert curve.values[-1] == 99_999
    assert curve.at == sorted(curve.at)
    gaps = {b - a for a, b in zip(curve.at[:-1], curve.at[1:-1], strict=False)}
    assert len(gaps) == 1
    points.add(1e6, 100_000, float("nan"))
    assert points.curve("loss").values[-1] is None


def test_the_times_of_a_curve_never_go_back() -> None:
    ranks = [Rank("study")]
    run = SimulatedRun(ranks)
    run.advance(5)
    for clock in (-3600.0, 1e9):  # this machine's was set back; a peer says what it likes
        run.now += clock if clock < 0 else 1.0
        loss = Values(10_000, run.now + max(clock, 0.0), {"loss": 1.0})
        run.history.take(msgspec.structs.replace(run.report(ranks[0], []), values=(loss,)))
    run.now += 1.0
    curve = next(curve for curve in run.advance(5).curves if curve.name == "loss")
    assert curve.at == sorted(curve.at)
    assert curve.at[-1] < run.now + 3700


def test_memory_stays_bounded() -> None:
    ranks = [Rank(f"machine{n}", compute=0.3 + n / 1000, vitals={"cpu": 0.5, "memory": 1e9}) for n in range(8)]
    run = SimulatedRun(ranks, wire=0.05)
    run.advance(200)
    before = size_of(run.history)
    run.advance(200)
    assert size_of(run.history) < 1.2 * before


def test_memory_stays_bounded_if_a_peer_says_that_its_steps_take_years() -> None:
    run = SimulatedRun([Rank("study")])
    sizes: list[int] = []
    for _ in range(3):
        for _ in range(200):
            run.now += 0.05
            report = run.report(run.ranks[0], [Step(1, run.now, 1e9)])
            run.history.take(msgspec.structs.replace(report, sent=dict.fromkeys(range(200), 5.0)))
        sizes.append(size_of(run.history))
    assert sizes[2] < 1.2 * sizes[0]  # its curve grows to 600 points
