"""The step protocol of elastic runs: given these events, expect these instructions; and short random histories."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from ringfort.training.elastic.dealing import Data
from ringfort.training.elastic.protocol import (
    Adopt,
    Apply,
    Compute,
    Continue,
    Differs,
    Fenced,
    Found,
    Gather,
    Mark,
    Pause,
    Reduce,
    Replica,
    Report,
    Result,
    Share,
    Standstill,
    StepError,
    Token,
    branch_name,
    lineage_of,
    minority,
    settle,
)
from tests.helpers.elastic_rules import Kind, violation_of

DATA = Data(samples=20, batch=8, microbatch=2, seed=1)
LINEAGE = "a.1#1"
HERE = Mark(branch_name(LINEAGE, 1), 4, b"chain", 8)
NONE = frozenset[int]()


def found(branch: str) -> Result:
    return Result(branch, 0, 0, "the first state", is_state=True)


def digest(result: Result, me: int, size: int) -> int:
    return len(str(result.payload)) if me == 0 else 0


def whole(result: Result) -> int:
    return zlib.crc32(str(result.payload).encode())


def replica(mark: Mark | None = HERE) -> Replica:
    return Replica(DATA, found, digest, whole, mark=mark)


def compute(step: int, part: int, *, is_last: bool = False) -> Compute:
    """Of a step whose predecessors were all whole."""
    return Compute(step, part, DATA.span(8 * (step - 4)), is_last)


def parts(*which: int) -> frozenset[int]:
    return frozenset(which)


def covering(*which: int, opened: tuple[int, int] = (0, 8)) -> Report:
    """The report of a member with a local sum."""
    return Report(HERE, covered=parts(*which), opened=opened)


# --- what the reports mean --------------------------------------------------------------------------------------------


def test_members_at_one_mark_that_hold_nothing_continue_with_what_each_has_computed() -> None:
    reports = [covering(0, 1), Report(HERE), covering(3)]
    assert settle(reports, 8) == Continue((parts(0, 1), NONE, parts(3)), 8)


def test_of_two_sums_that_overlap_the_later_is_dropped_whole() -> None:
    reports = [covering(0, 1), covering(1, 2), covering(3)]
    assert settle(reports, 8) == Continue((parts(0, 1), NONE, parts(3)), 8)


def test_a_step_keeps_the_samples_with_which_the_highest_epoch_opened_it() -> None:
    """And sums of micro-batches that were cut from another number of samples are dropped."""
    reports = [covering(0, opened=(2, 12)), covering(1, opened=(5, 8)), covering(2, opened=(5, 8)), Report(HERE)]
    assert settle(reports, 16) == Continue((NONE, parts(1), parts(2), NONE), 8)


def test_a_step_that_no_epoch_has_opened_is_opened_with_the_usual_samples() -> None:
    """Those of a learner that has practised do not count for that."""
    assert settle([covering(0, opened=(0, 4)), Report(HERE)], 8) == Continue((NONE, NONE), 8)
    assert settle([covering(0, opened=(0, 8)), Report(HERE)], 8) == Continue((parts(0), NONE), 8)


def test_a_held_result_comes_before_anything_is_computed() -> None:
    reports = [Report(HERE, covered=parts(0)), Report(HERE, held=3, held_step=5)]
    assert settle(reports, 8) == Adopt(1, is_sealed=False)


def test_of_several_held_results_that_of_the_highest_epoch_counts() -> None:
    reports = [Report(HERE, held=3, held_step=5), Report(HERE, held=7, held_step=5), Report(HERE, held=7, held_step=5)]
    assert settle(reports, 8) == Adopt(1, is_sealed=False)


def test_what_somebody_has_sealed_counts_more_than_what_others_hold() -> None:
    sealed = replace(HERE, step=5, chain=b"next")
    reports = [Report(HERE, held=9, held_step=5), Report(sealed), Report(HERE)]
    assert settle(reports, 8) == Adopt(1, is_sealed=True)


def test_members_without_a_state_begin_with_the_newest_checkpoint() -> None:
    assert settle([Report(Mark()), Report(Mark(), saved=30), Report(Mark(), saved=30)], 8) == Found(1)
    assert settle([Report(Mark()), Report(Mark())], 8) == Found(0)


def test_a_founding_that_was_shared_is_sealed_and_not_repeated() -> None:
    assert settle([Report(Mark()), Report(Mark(), held=2, held_step=0)], 8) == Adopt(1, is_sealed=False)


def test_two_branches_never_meet() -> None:
    with pytest.raises(StepError, match="two branches"):
        settle([Report(HERE), Report(replace(HERE, branch="b.2#1@4"))], 8)


# --- one member, alone and with others --------------------------------------------------------------------------------


class Members:
    """Members of one epoch, whose instructions are carried out together."""

    def __init__(self, replicas: Sequence[Replica], number: int = 2, fewest: int = 1) -> None:
        self.replicas = replicas
        size = len(replicas)
        self.scripts = [r.epoch(number, me, size, LINEAGE, fewest) for me, r in enumerate(replicas)]
        self.doing = [next(script) for script in self.scripts]

    def send(self, values: Sequence[Any]) -> list[Any]:
        """Resume all members with one value each. Return their next instructions."""
        self.doing = [script.send(value) for script, value in zip(self.scripts, values, strict=True)]
        return self.doing

    def exchange(self) -> list[Any]:
        """Carry out a `Gather` or a `Share`."""
        first = self.doing[0]
        if isinstance(first, Share):
            return self.send([self.doing[first.root].result] * len(self.doing))
        return self.send([[one.value for one in self.doing]] * len(self.doing))

    def adopt(self) -> list[Any]:
        """Carry out a `Share`, and compare and seal what it brought."""
        self.exchange()
        self.exchange()
        return self.exchange()

    def compute(self) -> list[Any]:
        """Have each member compute what it was dealt."""
        for me, script in enumerate(self.scripts):
            while isinstance(self.doing[me], Compute):
                self.replicas[me].add(self.doing[me].part)
                self.doing[me] = script.send(None)
        return self.doing

    def step(self, payload: str = "sum") -> list[Any]:
        """Carry out a step from the deal to the seal."""
        self.compute()
        assert all(isinstance(one, Reduce) for one in self.doing)
        self.send([payload] * len(self.doing))
        return self.exchange()


def test_one_step_in_order() -> None:
    one = replica()
    script = one.epoch(2, 0, 1, LINEAGE)
    report = next(script)
    assert report == Gather(Report(HERE, opened=(0, 8)))
    doing = script.send([report.value])
    for part in range(4):
        assert doing == compute(5, part, is_last=part == 3)
        one.add(part)
        doing = script.send(None)
    assert doing == Reduce()
    doing = script.send("sum")
    about = (HERE.branch, 2, 5, 16, HERE.chain)
    assert doing == Gather(Token(about, 3, parts(0, 1, 2, 3), copy=whole(Result("", 0, 0, "sum"))))
    assert one.held is not None
    assert one.mark == HERE
    tokens = (doing.value,)
    doing = script.send(tokens)
    assert doing == Apply(Result(HERE.branch, 5, 16), tokens, HERE, one.mark, place=1)
    assert one.mark == HERE.after(doing.result, 3)
    assert one.held is None
    assert one.mark == HERE.after(doing.result, 3)
    assert script.send(None) == compute(6, 0)  # of the last two of the pass


def test_a_reduction_does_not_begin_early_if_a_new_member_may_be_seated_before_it() -> None:
    group = Members([replica(), replica()])
    group.replicas[1].wants_pause = True
    group.exchange()
    group.step()
    assert group.send([None, None]) == [compute(6, 0), compute(6, 1)]


def test_a_step_that_grows_with_the_members_keeps_its_samples_until_it_is_sealed() -> None:
    growing = Data(samples=20, batch=4, microbatch=2, is_per_member=True)
    here = [Replica(growing, found, digest, whole, mark=HERE) for _ in range(3)]

    def sizes(members: Members) -> set[int]:
        return {one.span.samples for one in members.doing if isinstance(one, Compute)}

    pair = Members(here[:2], 2)
    pair.exchange()
    assert sizes(pair) == {8}
    here[0].add(pair.doing[0].part)
    trio = Members(here, 3)  # the third has joined while the two computed
    trio.exchange()
    assert sizes(trio) == {8}
    trio.compute()
    alone = Members(here[:1], 4)  # and the others are lost
    alone.exchange()
    assert sizes(alone) == {8}
    alone.step()
    assert here[0].mark.cursor == 16
    for other in here[1:]:
        other.learn(here[0].mark, here[0].history)
    trio = Members(here, 5)
    trio.exchange()
    assert sizes(trio) == {4}  # the end of the pass
    trio.step()
    trio.send([None] * 3)
    assert here[0].mark.cursor == 20
    assert sizes(trio) == {12}


def test_a_founding_seals_the_state_itself() -> None:
    group = Members([replica(None), replica(None)])
    branch = branch_name(LINEAGE, 2)
    assert group.exchange() == [Share(0, found(branch)), Share(0, None)]
    doing = group.adopt()
    assert [one.result.payload for one in doing] == ["the first state"] * 2
    assert {one.mark.branch for one in group.replicas} == {branch}
    assert lineage_of(branch) == LINEAGE
    group.send([None, None])
    assert isinstance(group.exchange()[0], Compute)


def test_the_micro_batches_of_a_lost_member_alone_are_dealt_again() -> None:
    here = [replica(), replica()]
    here[0].covered, here[1].covered = parts(0, 2), parts(3)
    group = Members(here)
    group.exchange()
    assert group.doing == [compute(5, 1, is_last=True), Reduce()]
    assert all(isinstance(one, Apply) for one in group.step())


def test_a_member_whose_sum_was_dropped_begins_it_anew() -> None:
    here = [replica(), replica()]
    here[0].covered, here[1].covered = parts(0, 1), parts(1)
    group = Members(here)
    group.exchange()
    assert here[1].covered == NONE
    assert group.doing == [compute(5, 2, is_last=True), compute(5, 3, is_last=True)]


def test_a_step_that_does_not_cover_each_micro_batch_once_is_not_sealed() -> None:
    group = Members([replica(), replica()])
    group.exchange()
    group.compute()
    group.replicas[0].add(3)
    group.send(["sum", "sum"])
    with pytest.raises(StepError, match="exactly once"):
        group.exchange()
    assert group.replicas[0].mark == HERE


def test_members_that_hold_different_results_seal_nothing() -> None:
    group = Members([replica(), replica()])
    group.exchange()
    group.compute()
    tokens = [one.value for one in group.send(["sum", "sum"])]
    tokens[1] = replace(tokens[1], about=(*tokens[1].about[:-1], b"another chain"))
    with pytest.raises(StepError, match="different results"):
        group.scripts[0].send(tokens)
    assert group.replicas[0].mark == HERE


def test_a_result_that_is_held_is_sealed_by_the_next_epoch_and_not_computed_again() -> None:
    here = [replica(), replica(), replica()]
    group = Members(here)
    group.exchange()
    group.compute()
    group.doing[1] = group.scripts[1].send("sum")  # the others are cut off before they have it
    rest = Members(here[1:], 3)
    rest.exchange()
    assert [one.root for one in rest.doing] == [0, 0]
    doing = rest.adopt()
    assert [one.result.payload for one in doing] == ["sum", "sum"]
    assert here[1].mark == here[2].mark
    assert here[1].mark.step == 5


def test_a_result_that_one_member_has_sealed_is_sealed_by_the_others_too() -> None:
    here = [replica(), replica()]
    group = Members(here)
    group.exchange()
    group.compute()
    group.send(["sum", "sum"])
    group.scripts[0].send([one.value for one in group.doing])
    assert [one.mark.step for one in here] == [5, 4]
    rest = Members(here, 3)
    rest.exchange()
    assert [type(one) for one in rest.adopt()[1:]] == [Apply]
    assert isinstance(rest.doing[0], Gather)  # it has applied it
    assert here[0].mark == here[1].mark


def test_the_steps_of_an_epoch_have_the_same_places_at_members_that_applied_unequally_many() -> None:
    here = [replica(), replica()]
    group = Members(here)
    group.exchange()
    group.compute()
    group.send(["sum", "sum"])
    group.scripts[0].send([one.value for one in group.doing])  # rank 1 never hears of the seal
    rest = Members(here, 3)
    rest.exchange()
    assert rest.adopt()[1].place == 0  # rank 0 does not apply it again
    rest.doing[1] = rest.scripts[1].send(None)
    rest.exchange()
    for place in range(1, 4):
        assert [one.place for one in rest.step()] == [place, place]
        rest.send([None, None])


def test_a_member_that_sealed_something_else_is_found_out() -> None:
    here = [replica(), replica()]
    group = Members(here)
    group.exchange()
    group.compute()
    group.send(["sum", "sum"])
    group.scripts[0].send([one.value for one in group.doing])
    here[0].history[-1] = (HERE, replace(here[0].history[-1][1], payload="something else"))
    rest = Members(here, 3)
    rest.exchange()
    with pytest.raises(StepError, match="two results"):
        rest.adopt()


def test_below_the_minimum_what_is_pending_is_settled_and_no_step_begins() -> None:
    one = replica()
    alone = Members([one])
    alone.exchange()
    alone.compute()
    alone.send(["sum"])
    below = Members([one], 3, fewest=2)
    below.exchange()
    below.adopt()
    assert one.mark.step == 5
    below.send([None])
    assert below.exchange() == [Pause()]
    assert below.send([None]) == [Pause()]


def test_all_members_pause_if_one_has_a_new_member_to_seat() -> None:
    group = Members([replica(), replica()])
    group.replicas[1].wants_pause = True
    group.exchange()
    group.step()
    group.send([None, None])
    assert group.compute() == [Pause(), Pause()]  # they have computed meanwhile, and reduce after it
    group.replicas[1].wants_pause = False
    assert group.send([None, None]) == [Reduce(), Reduce()]
    group.step()
    group.send([None, None])
    assert group.compute() == [Reduce(), Reduce()]


def test_deals_follow_the_speeds_in_the_tokens_of_all_and_are_known_in_advance() -> None:
    data = Data(samples=64, batch=32, microbatch=1)  # 16 micro-batches per member: one step is dealt in advance
    group = Members([Replica(data, found, digest, whole, mark=replace(HERE, cursor=0)) for _ in range(2)])

    def dealt() -> list[tuple[int, int]]:
        """The micro-batches of both members in this step and in the next one."""
        deals = [one.deals for one in group.replicas]
        step = group.doing[0].step
        assert [(one.mark.step + 1, one.mark.cursor) for one in deals[0]] == [
            (step, 32 * (step - 5)), (step + 1, 32 * (step - 4)),
        ]  # fmt: skip
        return [(len(first.parts), len(second.parts)) for first, second in zip(*deals, strict=True)]

    group.exchange()
    assert dealt() == [(16, 16), (16, 16)]  # nobody has measured anything
    group.replicas[0].speed, group.replicas[1].speed = 30, 10
    group.step()
    group.send([None, None])
    assert dealt() == [(16, 16), (24, 8)]
    group.replicas[0].speed = 10  # what it measures now is for a later deal
    group.step()
    group.send([None, None])
    assert dealt() == [(24, 8), (16, 16)]
    mine = group.replicas[0].deals[0].parts
    group.compute()
    assert group.replicas[0].covered == set(mine)


# --- copies that differ -----------------------------------------------------------------------------------------------


def differ(group: Members, *copies: str) -> list[Differs]:
    """Have members receive these copies of a reduction. Return what each finds."""
    group.compute()
    tokens = [one.value for one in group.send(copies)]
    found = list[Differs]()
    for script in group.scripts:
        with pytest.raises(Differs) as caught:
            script.send(tokens)
        found.append(caught.value)
    return found


def test_copies_that_differ_are_applied_by_nobody_and_reduced_again_in_the_next_epoch() -> None:
    here = [replica(), replica(), replica()]
    group = Members(here)
    group.exchange()
    found = differ(group, "sum", "damaged", "sum")
    assert [(one.step, one.ranks, one.times, one.has_majority) for one in found] == [(5, (1,), 1, True)] * 3
    assert [one.report() for one in here] == [
        Report(HERE, covered=covered, void=2, differed=1, opened=(2, 8))
        for covered in (parts(0, 1), parts(2), parts(3))
    ]
    again = Members(here, 3)
    assert again.exchange() == [Reduce()] * 3  # nothing is computed again
    assert [one.result.payload for one in again.step()] == ["sum"] * 3
    assert [one.report().differed for one in here] == [0, 0, 0]


def test_a_copy_that_is_void_does_not_come_back_from_a_member_that_has_not_seen_the_tokens() -> None:
    here = [replica(), replica()]
    group = Members(here)
    group.exchange()
    group.compute()
    tokens = [one.value for one in group.send(["sum", "damaged"])]
    with pytest.raises(Differs):
        group.scripts[0].send(tokens)
    assert here[1].fence(3).is_pending
    again = Members(here, 3)
    assert again.exchange() == [Reduce()] * 2
    assert not here[1].fence(3).is_pending
    assert here[1].report().void == 2
    assert [one.result.payload for one in again.step("sum")] == ["sum", "sum"]


def test_a_result_of_a_later_epoch_than_the_void_one_counts() -> None:
    reports = [Report(HERE, void=2), Report(HERE, held=2, held_step=5), Report(HERE, held=3, held_step=5)]
    assert settle(reports, 8) == Adopt(2, is_sealed=False)
    assert isinstance(settle(reports[:2], 8), Continue)


def test_the_second_time_in_a_row_is_counted_across_epochs_and_by_members_that_did_not_see_the_first() -> None:
    here = [replica(), replica(), replica()]
    group = Members(here[:2])
    group.exchange()
    assert {(one.ranks, one.has_majority) for one in differ(group, "sum", "damaged")} == {((0, 1), False)}
    again = Members(here, 3)
    again.exchange()
    assert [(one.ranks, one.times) for one in differ(again, "sum", "damaged", "sum")] == [((1,), 2)] * 3


def test_a_result_that_is_sent_in_recovery_is_never_void_and_a_damaged_copy_is_not_held() -> None:
    here = [replica(), replica(), replica()]
    group = Members(here)
    group.exchange()
    group.compute()
    group.doing[1] = group.scripts[1].send("sum")  # it may be that somebody has sealed it
    rest = Members(here, 3)
    rest.exchange()
    result = rest.doing[1].result
    rest.send([result, result, replace(result, payload="damaged")])
    tokens = [one.value for one in rest.doing]
    for script in rest.scripts:
        with pytest.raises(Differs):
            script.send(tokens)
    assert [one.report().held for one in here] == [0, 2, 0]
    assert [one.report().void for one in here] == [0, 0, 0]
    again = Members(here, 4)
    again.exchange()
    assert [one.result.payload for one in again.adopt()] == ["sum"] * 3


def test_damage_while_a_sealed_result_is_sent_does_not_count_for_the_next_step() -> None:
    here = [replica(), replica()]
    group = Members(here)
    group.exchange()
    group.compute()
    group.send(["sum", "sum"])
    group.scripts[0].send([one.value for one in group.doing])
    rest = Members(here, 3)
    rest.exchange()
    result = rest.doing[0].result
    rest.send([result, replace(result, payload="damaged")])
    for script in rest.scripts:
        with pytest.raises(Differs):
            script.send([one.value for one in rest.doing])
    again = Members(here, 4)
    again.exchange()
    again.adopt()
    assert [one.report().differed for one in here] == [0, 0]


def test_members_compare_their_states_at_every_hundredth_step_that_all_apply_together() -> None:
    group = Members([replica(replace(HERE, step=98))])
    group.exchange()
    assert not group.step()[0].is_compared
    group.send([None])
    assert group.step()[0].is_compared


@pytest.mark.parametrize(
    ("copies", "odd"), [([1], ()), ([1, 2], None), ([1, 2, 1], (1,)), ([1, 2, 2, 1], None), ([3, 3, 1, 2, 3], (2, 3))]
)
def test_the_copy_of_more_than_half_counts(copies: list[int], odd: tuple[int, ...] | None) -> None:
    assert minority(copies) == odd


# --- the fence --------------------------------------------------------------------------------------------------------


def test_a_fenced_member_computes_and_reduces_but_holds_nothing_of_an_older_epoch() -> None:
    one = replica()
    group = Members([one])
    group.exchange()
    stands = one.fence(3)
    assert (stands.mark, stands.is_pending, stands.lineage) == (HERE, False, LINEAGE)
    group.compute()
    with pytest.raises(Fenced):
        group.send(["sum"])
    assert one.fence(3) == stands


def test_a_fenced_member_that_holds_a_result_seals_it_only_in_the_next_epoch() -> None:
    one = replica()
    group = Members([one])
    group.exchange()
    group.compute()
    group.send(["sum"])
    stands = one.fence(3)
    assert (stands.mark, stands.is_pending) == (HERE, True)
    with pytest.raises(Fenced):
        group.exchange()
    assert one.fence(3) == stands


def test_a_member_fenced_between_seal_and_application_says_that_it_has_sealed() -> None:
    group = Members([replica()])
    group.exchange()
    group.step()
    stands = group.replicas[0].fence(3)
    assert (stands.mark.step, stands.is_pending) == (5, False)


def test_a_fenced_member_takes_no_shared_result() -> None:
    group = Members([replica(None), replica(None)])
    group.exchange()
    group.exchange()
    group.replicas[1].fence(3)
    with pytest.raises(Fenced):
        group.scripts[1].send([one.value for one in group.doing])
    assert group.replicas[1].held is None


def test_a_fence_never_goes_back() -> None:
    one = replica()
    one.fence(9)
    one.fence(0)
    group = Members([one], 8)
    group.exchange()
    group.compute()
    with pytest.raises(Fenced):
        group.send(["sum"])


def test_a_founding_that_is_held_belongs_to_its_lineage() -> None:
    group = Members([replica(None)])
    group.exchange()
    group.exchange()
    group.exchange()
    stands = group.replicas[0].fence(3)
    assert (stands.mark, stands.is_pending, stands.lineage) == (Mark(), True, LINEAGE)


def test_a_learner_forgets_what_it_held_and_summed() -> None:
    one = replica()
    group = Members([one])
    group.exchange()
    group.compute()
    group.send(["sum"])
    there = replace(HERE, step=9)
    one.learn(there, ())
    assert one.report() == Report(there, opened=(0, 8))
    assert not one.fence(0).is_pending


# --- marks ------------------------------------------------------------------------------------------------------------


def test_marks_are_equal_only_after_equal_results() -> None:
    result = Result(HERE.branch, 5, 16)
    assert HERE.after(result, 1) == HERE.after(result, 1)
    assert HERE.after(result, 1) != HERE.after(result, 2)
    assert HERE.after(result, 1) != replace(HERE, chain=b"other").after(result, 1)
    assert Mark().lineage == ""
    assert HERE.lineage == LINEAGE


# --- random histories -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "seeds"),
    [
        ("model", range(40)),
        ("seating", range(40)),
        ("sending", range(20)),
        ("scaled", range(40)),
        ("network", range(4)),
        ("scaled network", range(4)),
        ("witnessed network", range(4)),
    ],
)
def test_no_random_history_breaks_a_promise(kind: Kind, seeds: range) -> None:
    assert [found for seed in seeds if (found := violation_of(kind, seed)) is not None] == []


def test_a_member_that_has_said_goodbye_comes_back_without_promises_and_sums_but_with_its_state() -> None:
    replica = Replica(
        DATA, lambda branch: Result(branch, 0, 0, is_state=True), lambda *_: 3, lambda _: 0, mark=Mark("l@1", 7)
    )
    replica.add(0)
    replica._hold(5, Result("l@1", 8, 32))
    replica.fence(9)
    assert replica.fence(0).is_pending
    replica.leave()
    assert replica.fence(0) == Standstill(Mark("l@1", 7), False, "l")
    assert replica.report() == Report(Mark("l@1", 7), opened=(0, 8))
    replica._hold(6, Result("l@1", 8, 32))  # the number may be lower than one that it has promised as another peer
