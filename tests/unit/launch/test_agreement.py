"""Launchers agree: given these events, these instructions; and several of them together, in any order of messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ringfort.cluster.core.peer_messages import Epoch, Member
from ringfort.errors import ProtocolError
from ringfort.launch.agreement import (
    COMPARE_SECONDS,
    EXPLAIN_SECONDS,
    SETTLE_SECONDS,
    Agreement,
    Finish,
    Hold,
    Instruction,
    Start,
    Stop,
    Tell,
)
from ringfort.launch.agreement_messages import Done, Failed, Go, Offer, Place, Ready, Running, Ticket, decode, encode
from ringfort.launch.failure_report import Failure

PLACE = Place("10.0.0.1", 1234, 1235)
NAMES = ("a.1", "b.1", "c.1")


def epoch_of(*peers: str, number: int = 5) -> Epoch:
    return Epoch(number, peers[0], tuple(Member(peer, slots=index + 1) for index, peer in enumerate(peers)))


def ticket(me: str, script: str = "train.py", **changes: Any) -> Ticket:
    return Ticket(f"host-{me[0]}", script, **{"nodes": "3", "max_restarts": 2, **changes})


def launcher(
    me: str, nodes: tuple[int, int] = (3, 3), script: str = "train.py", met: Iterable[str] = NAMES
) -> Agreement:
    """One that has heard what those it has `met` are to run."""
    text = f"{nodes[0]}:{nodes[1]}"
    tickets = {peer: ticket(peer, nodes=text) for peer in met if peer != me}
    own = ticket(me, script, nodes=text)
    return Agreement(me, own, nodes, lambda _: PLACE, "train.py", lambda: 0.0, tickets=tickets)


def kinds(instructions: Iterable[Instruction]) -> list[type]:
    return [type(instruction) for instruction in instructions]


class Run:
    """Several launchers, and what they have told each other and not yet heard: ordered between any two of them."""

    def __init__(self, nodes: int = 3, scripts: dict[str, str] | None = None) -> None:
        names = NAMES[:nodes]
        self.launchers = {
            name: launcher(name, (nodes, nodes), (scripts or {}).get(name, "train.py"), met=()) for name in names
        }
        self.links = {(a, b): deque[bytes]() for a in names for b in names if a != b}
        self.done: dict[str, list[Instruction]] = {name: [] for name in names}

    def do(self, me: str, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            self.done[me].append(instruction)
            if isinstance(instruction, Tell):
                for other in self.launchers:
                    if other != me and instruction.peer in (None, other):
                        self.links[me, other].append(encode(instruction.message))

    def start(self, epoch: Epoch) -> None:
        """All have met, and agreed on an epoch; nobody has heard yet what the others are to run."""
        for name, agreement in self.launchers.items():
            for other in self.launchers:
                if other != name:
                    self.do(name, agreement.joined(0.0, other))
        for name, agreement in self.launchers.items():
            self.do(name, agreement.epoch_started(0.0, epoch))

    def stop_ranks(self, *names: str) -> None:
        """The ranks of these machines have ended after a failure."""
        for name in names or self.launchers:
            assert self.launchers[name].may_start_again
            self.do(name, self.launchers[name].again(10.0))

    def deliver(self, choose: Iterable[int], lost: Iterable[bool] = ()) -> None:
        """Until nothing is on its way, each time on the link that `choose` says. `lost` says which never arrive."""
        turns, losses = iter(choose), iter(lost)
        while busy := [link for link, queue in self.links.items() if queue]:
            link = busy[next(turns, 0) % len(busy)]
            message = decode(self.links[link].popleft())
            if not next(losses, False):
                self.do(link[1], self.launchers[link[1]].received(1.0, link[0], message))

    def assignments(self) -> dict[str, Start]:
        return {name: item for name, items in self.done.items() for item in items if isinstance(item, Start)}


def test_a_machine_alone_starts_at_once() -> None:
    alone = launcher("a.1", (1, 1), met=())
    *_, start = alone.epoch_started(0.0, epoch_of("a.1"))
    assert isinstance(start, Start)
    assert (start.assignment.first_rank, start.assignment.world_size) == (0, 1)
    assert kinds(alone.done()) == [Tell, Finish]


@given(st.lists(st.integers(0, 10), max_size=60))
def test_all_start_with_their_ranks_and_finish_whatever_the_order_of_messages(choose: list[int]) -> None:
    run = Run()
    run.start(epoch_of(*NAMES))
    run.deliver(choose)
    found = {name: start.assignment for name, start in run.assignments().items()}
    assert {name: (one.first_rank, one.local_world_size, one.group_rank) for name, one in found.items()} == {
        "a.1": (0, 1, 0),
        "b.1": (1, 2, 1),
        "c.1": (3, 3, 2),
    }
    assert {(one.world_size, one.group_world_size, one.place) for one in found.values()} == {(6, 3, PLACE)}
    for name, agreement in run.launchers.items():
        run.do(name, agreement.done())
    run.deliver(choose)
    assert all(Finish() in items for items in run.done.values())


def test_one_that_is_done_before_another_has_heard_go_is_not_waited_for() -> None:
    slow = launcher("b.1")
    epoch = epoch_of(*NAMES)
    slow.epoch_started(0.0, epoch)
    slow.received(1.0, "a.1", Offer(epoch.key, 0, PLACE))
    slow.received(1.0, "c.1", Done(epoch.key, 0))
    assert kinds(slow.received(1.0, "a.1", Go(epoch.key, 0))) == [Start]
    slow.received(1.0, "a.1", Done(epoch.key, 0))
    assert kinds(slow.done()) == [Tell, Finish]


def test_too_few_machines_are_waited_for() -> None:
    run = launcher("a.1", (3, 3))
    assert run.epoch_started(0.0, epoch_of("a.1", "b.1")) == ()
    assert run.tick(1e6) == ()


def test_between_min_and_max_the_first_waits_a_little_for_more() -> None:
    run = launcher("a.1", (2, 3))
    assert run.epoch_started(10.0, epoch_of("a.1", "b.1")) == ()
    assert run.tick(10.0 + SETTLE_SECONDS - 0.1) == ()
    assert kinds(run.tick(10.0 + SETTLE_SECONDS)) == [Hold, Tell]
    assert run.tick(1e6) == ()


def test_with_max_machines_nobody_waits() -> None:
    assert kinds(launcher("a.1", (2, 3)).epoch_started(10.0, epoch_of(*NAMES))) == [Hold, Tell]


def test_an_epoch_that_ends_before_the_start_begins_again() -> None:
    first = launcher("a.1")
    old, new = epoch_of(*NAMES), epoch_of(*NAMES, number=6)
    first.epoch_started(0.0, old)
    assert first.received(1.0, "b.1", Ready(old.key, 0)) == ()
    assert first.epoch_ended(0.5, "contact lost") == (Hold(False),)
    assert first.received(1.0, "c.1", Ready(old.key, 0)) == ()
    assert kinds(first.epoch_started(1.0, new)) == [Hold, Tell]
    assert first.received(1.0, "c.1", Ready(old.key, 0)) == ()
    first.received(1.0, "b.1", Ready(new.key, 0))
    assert kinds(first.received(1.0, "c.1", Ready(new.key, 0))) == [Tell, Start]


def test_only_the_first_may_offer_and_say_go() -> None:
    second = launcher("b.1")
    epoch = epoch_of(*NAMES)
    second.epoch_started(0.0, epoch)
    assert second.received(1.0, "c.1", Offer(epoch.key, 0, PLACE)) == ()
    assert second.received(1.0, "a.1", Go(epoch.key, 0)) == ()
    assert second.received(1.0, "stranger.1", Offer(epoch.key, 0, PLACE)) == ()
    second.received(1.0, "a.1", Offer(epoch.key, 0, PLACE))
    assert second.received(1.0, "c.1", Go(epoch.key, 0)) == ()
    assert kinds(second.received(1.0, "a.1", Go(epoch.key, 0))) == [Start]
    assert second.received(1.0, "a.1", Go(epoch.key, 0)) == ()


@given(st.lists(st.integers(0, 10), max_size=60))
def test_machines_that_run_different_programs_all_say_who_differs(choose: list[int]) -> None:
    run = Run(scripts={"c.1": "other.py"})
    run.start(epoch_of(*NAMES))
    run.deliver(choose)
    for agreement in run.launchers.values():
        why = "host-c differs from host-a and host-b in the script: other.py, not train.py. Type the same"
        assert agreement.failures[0].why.startswith(why)
        assert not agreement.may_start_again
        assert not agreement.has_started


def test_machines_that_differ_wait_a_little_for_a_third_which_shows_who_is_wrong() -> None:
    one = launcher("a.1", met=())
    assert one.received(5.0, "b.1", ticket("b.1", "other.py", nodes="3:3")) == ()
    assert one.tick(5.0 + COMPARE_SECONDS - 0.1) == ()
    assert kinds(one.tick(5.0 + COMPARE_SECONDS)) == [Tell, Stop]
    assert "other.py on host-b" in one.failures[0].why


def test_who_has_not_said_what_it_is_to_run_is_waited_for() -> None:
    first = launcher("a.1", met=["b.1"])
    assert first.epoch_started(0.0, epoch_of(*NAMES)) == ()
    assert first.silent == {"c.1"}
    assert kinds(first.received(1.0, "c.1", ticket("c.1", nodes="3:3"))) == [Hold, Tell]


@given(st.lists(st.booleans(), max_size=40), st.lists(st.integers(0, 10), max_size=60))
def test_notes_that_are_lost_are_made_good_by_reminders(losses: list[bool], choose: list[int]) -> None:
    run = Run()
    run.start(epoch_of(*NAMES))
    lost = iter(losses)
    for second in range(0, 400, 2):
        run.deliver(choose, lost)
        for name, agreement in run.launchers.items():
            run.do(name, agreement.remind(float(second)))
    assert len(run.assignments()) == len(NAMES)
    assert sum(isinstance(item, Start) for items in run.done.values() for item in items) == len(NAMES)


def test_other_copies_of_the_script_are_a_warning_for_all() -> None:
    first = launcher("a.1", met=())
    for peer, digest in (("b.1", "x"), ("c.1", "y")):
        first.received(0.0, peer, ticket(peer, nodes="3:3", script_digest=digest))
    first.ticket = ticket("a.1", nodes="3:3", script_digest="x")
    _, tell = first.epoch_started(0.0, epoch_of(*NAMES))
    assert isinstance(tell, Tell)
    assert isinstance(tell.message, Offer)
    assert "host-c differs from host-a and host-b in the content of train.py" in tell.message.warnings[0]


@given(st.lists(st.integers(0, 10), max_size=60))
def test_a_failure_on_one_machine_stops_all_and_is_known_to_all(choose: list[int]) -> None:
    run = Run()
    run.start(epoch_of(*NAMES))
    run.deliver(choose)
    failure = Failure("b", 3, rank=1, tail=("last",))
    run.do("b.1", run.launchers["b.1"].failed(failure))
    run.deliver(choose)
    for name, agreement in run.launchers.items():
        assert agreement.failures == [failure]
        assert run.done[name].count(Stop(failure)) == 1


def started(me: str) -> Agreement:
    run = Run()
    run.start(epoch_of(*NAMES))
    run.deliver([])
    return run.launchers[me]


def test_a_machine_that_is_lost_stops_the_run_unless_it_was_done() -> None:
    one = started("b.1")
    one.received(1.0, "c.1", Done(epoch_of(*NAMES).key, 0))
    assert one.lost("c.1", "c", "it left") == ()
    assert one.epoch_ended(1.0, "c left") == ()
    assert one.tick(1e6) == ()
    assert one.lost("x.1", "x", "a stranger to this run") == ()
    tell, stop = one.lost("a.1", "host-a", "silent for 1.2 s")
    assert isinstance(stop, Stop)
    assert tell == Tell(Failed(stop.failure, 0))
    assert "host-a is gone: silent" in stop.failure.why
    assert one.received(1.0, "a.1", Failed(Failure("a", 1))) == ()


def test_an_epoch_that_ends_after_the_start_ends_the_run_when_nobody_says_why() -> None:
    one = started("b.1")
    assert one.epoch_ended(5.0, "epoch 6 of 2 is to follow") == ()
    assert one.tick(5.0 + EXPLAIN_SECONDS - 0.1) == ()
    assert kinds(one.tick(5.0 + EXPLAIN_SECONDS)) == [Tell, Stop]
    assert "epoch 6 of 2" in one.failures[0].why
    assert one.tick(1e6) == ()


def test_who_was_lost_is_a_better_reason_than_that_an_epoch_ended() -> None:
    one = started("b.1")
    one.epoch_ended(5.0, "epoch 6 of 2 is to follow")
    assert kinds(one.received(1.0, "a.1", Failed(Failure("c", 1, why="c is gone: silent")))) == [Stop]
    assert one.tick(1e6) == ()
    assert one.failures[0].why == "c is gone: silent"


def test_newcomers_and_new_epochs_change_nothing_after_the_start() -> None:
    one = started("a.1")
    for names in (NAMES, ("a.1",)):
        assert one.epoch_started(9.0, epoch_of(*names, number=9)) == ()
        assert one.epoch == epoch_of(*NAMES)
        assert one.tick(1e6) == ()


def test_after_a_failure_nothing_starts_or_finishes_and_who_goes_is_not_blamed() -> None:
    one = started("b.1")
    one.received(1.0, "a.1", Failed(Failure("a", 1)))
    assert one.lost("a.1", "host-a", "it left") == ()
    for peer in ("a.1", "c.1"):
        assert one.received(1.0, peer, Done(epoch_of(*NAMES).key, 0)) == ()
    assert kinds(one.done()) == [Tell]
    assert one.failures == [Failure("a", 1)]
    first = launcher("a.1")
    first.epoch_started(0.0, epoch_of(*NAMES))
    first.received(1.0, "b.1", Failed(Failure("b", 1)))
    assert first.epoch_started(1.0, epoch_of(*NAMES, number=6)) == ()
    assert not first.has_started


def test_what_a_stranger_to_the_epoch_says_is_ignored() -> None:
    one = started("b.1")
    assert one.received(1.0, "stranger.1", Failed(Failure("x", 1))) == ()
    assert one.failures == []


# --- late -------------------------------------------------------------------------------------------------------------


def test_one_that_comes_too_late_is_told_what_goes_on_before_anything_else() -> None:
    tells = started("b.1").joined(61.0, "d.1")
    assert [type(item.message) for item in tells if isinstance(item, Tell)] == [Running, Ticket]
    late = launcher("d.1", met=())
    said = tells[0]
    assert isinstance(said, Tell)
    assert kinds(late.received(1.0, "b.1", said.message)) == [Stop]
    words = late.failures[0].why
    assert "the run 'train.py' started at" in words
    assert "(60 s ago) on host-a, host-b and host-c; host-d is too late" in words
    assert "--name" in words
    assert not late.may_start_again


def test_one_that_came_while_all_got_ready_is_told_at_the_start() -> None:
    first = launcher("a.1", (2, 2), met=["b.1", "d.1"])
    epoch = epoch_of("a.1", "b.1")
    first.epoch_started(0.0, epoch)
    found = first.received(1.0, "b.1", Ready(epoch.key, 0))
    assert [item.peer for item in found if isinstance(item, Tell) and isinstance(item.message, Running)] == ["d.1"]


def test_a_run_that_goes_on_is_not_ended_by_one_that_is_not_of_it() -> None:
    one = started("b.1")
    assert one.received(1.0, "d.1", Running(1.0, ("host-d",))) == ()
    assert kinds(one.received(1.0, "d.1", ticket("d.1", "other.py"))) == [Tell]
    assert one.received(1.0, "d.1", Failed(Failure("d", 2, is_final=True), 0)) == ()
    assert one.tick(1e6) == ()
    assert one.failures == []


# --- again ------------------------------------------------------------------------------------------------------------

CRASH = Failure("b", 3, rank=1)


@given(st.permutations(NAMES), st.lists(st.integers(0, 10), max_size=60))
def test_after_a_crash_all_start_again_in_whatever_order_they_have_stopped(order: list[str], choose: list[int]) -> None:
    run = Run()
    run.start(epoch_of(*NAMES))
    run.deliver([])
    for attempt in (1, 2):
        run.done = {name: [] for name in NAMES}
        run.do("b.1", run.launchers["b.1"].failed(CRASH))
        run.deliver(choose)
        for name in order:
            run.stop_ranks(name)
            run.deliver(choose)
        assert {start.assignment.restarts for start in run.assignments().values()} == {attempt}
        assert len(run.assignments()) == len(NAMES)
    run.do("b.1", run.launchers["b.1"].failed(CRASH))
    run.deliver(choose)
    assert not any(agreement.may_start_again for agreement in run.launchers.values())


def test_a_machine_that_replaces_a_lost_one_takes_over_the_count() -> None:
    first = started("a.1")
    first.lost("c.1", "host-c", "silent for 10.1 s")
    first.epoch_ended(2.0, "contact with c.1 is lost")
    assert kinds(first.again(3.0)) == [Hold, Tell]
    first.received(4.0, "b.1", ticket("b.1", nodes="3:3", restarts=1))
    first.received(5.0, "c.2", ticket("c.2", nodes="3:3"))
    epoch = epoch_of("a.1", "b.1", "c.2", number=7)
    _, tell = first.epoch_started(6.0, epoch)
    assert tell == Tell(Offer(epoch.key, 1, PLACE))
    new = launcher("c.2", met=())
    new.epoch_started(6.0, epoch)
    assert new.received(6.0, "a.1", Offer(epoch.key, 1, PLACE)) == (Hold(True), Tell(Ready(epoch.key, 1), "a.1"))
    (start,) = new.received(7.0, "a.1", Go(epoch.key, 1))
    assert isinstance(start, Start)
    assert (start.assignment.restarts, new.attempt) == (1, 1)


def test_what_a_person_ended_and_what_was_mistyped_does_not_start_again() -> None:
    for failure in (Failure("b", -2, why="SIGINT on b", is_final=True), Failure("b", 2, is_final=True)):
        one = started("a.1")
        one.received(1.0, "b.1", Failed(CRASH, 0))
        assert one.may_start_again
        one.received(1.0, "b.1", Failed(failure, 0))
        assert not one.may_start_again


def test_what_victims_say_of_an_attempt_that_is_over_does_not_end_the_next() -> None:
    one = started("a.1")
    one.received(1.0, "b.1", Failed(CRASH, 0))
    one.again(2.0)
    assert one.received(2.0, "c.1", Failed(Failure("c", 1, rank=3, is_victim=True), 0)) == ()
    assert one.failures == []


def test_a_crash_that_is_heard_of_before_go_ends_that_attempt_here_too() -> None:
    slow = launcher("b.1")
    epoch = epoch_of(*NAMES)
    slow.epoch_started(0.0, epoch)
    slow.received(1.0, "a.1", Offer(epoch.key, 0, PLACE))
    assert kinds(slow.received(1.0, "c.1", Failed(CRASH, 0))) == [Stop]
    assert slow.received(1.0, "a.1", Go(epoch.key, 0)) == ()
    slow.again(2.0)
    assert slow.attempt == 1


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x81\xa4type\xa2no", encode(Go((1, "a"), 0)) + b"\0"])
def test_what_is_no_message_is_an_error_in_words(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="another launcher"):
        decode(data)


@given(st.binary(max_size=64))
def test_any_bytes_are_a_message_or_an_error_in_words(data: bytes) -> None:
    with suppress(ProtocolError):
        decode(data)
