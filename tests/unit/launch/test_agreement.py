"""Launchers agree: given these events, these instructions; and several of them together, in any order of messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ringfort.cluster.messages import Epoch, Member
from ringfort.errors import ProtocolError
from ringfort.launch.agreement import (
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
from ringfort.launch.blame import Failure
from ringfort.launch.messages import Done, Failed, Go, Offer, Place, Ready, decode, encode

PLACE = Place("10.0.0.1", 1234, 1235)
NAMES = ("a.1", "b.1", "c.1")


def epoch_of(*peers: str, number: int = 5) -> Epoch:
    return Epoch(number, peers[0], tuple(Member(peer, slots=index + 1) for index, peer in enumerate(peers)))


def launcher(me: str, nodes: tuple[int, int] = (3, 3), title: str = "train.py") -> Agreement:
    return Agreement(me, title, nodes, lambda _: PLACE)


def kinds(instructions: Iterable[Instruction]) -> list[type]:
    return [type(instruction) for instruction in instructions]


class Run:
    """Several launchers, and what they have told each other and not yet heard: ordered between any two of them."""

    def __init__(self, nodes: int = 3, titles: dict[str, str] | None = None) -> None:
        names = NAMES[:nodes]
        self.launchers = {name: launcher(name, (nodes, nodes), (titles or {}).get(name, "train.py")) for name in names}
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
        for name, agreement in self.launchers.items():
            self.do(name, agreement.epoch_started(0.0, epoch))

    def deliver(self, choose: Iterable[int]) -> None:
        """Until nothing is on its way, each time on the link that `choose` says."""
        turns = iter(choose)
        while busy := [link for link, queue in self.links.items() if queue]:
            link = busy[next(turns, 0) % len(busy)]
            self.do(link[1], self.launchers[link[1]].received(link[0], decode(self.links[link].popleft())))

    def assignments(self) -> dict[str, Start]:
        return {name: item for name, items in self.done.items() for item in items if isinstance(item, Start)}


def test_a_machine_alone_starts_at_once() -> None:
    alone = launcher("a.1", (1, 1))
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
    slow.received("a.1", Offer(epoch.key, "train.py", PLACE))
    slow.received("c.1", Done(epoch.key))
    assert kinds(slow.received("a.1", Go(epoch.key))) == [Start]
    slow.received("a.1", Done(epoch.key))
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
    assert first.received("b.1", Ready(old.key, "train.py")) == ()
    assert first.epoch_ended(0.5, "contact lost") == (Hold(False),)
    assert first.received("c.1", Ready(old.key, "train.py")) == ()
    assert kinds(first.epoch_started(1.0, new)) == [Hold, Tell]
    assert first.received("c.1", Ready(old.key, "train.py")) == ()
    first.received("b.1", Ready(new.key, "train.py"))
    assert kinds(first.received("c.1", Ready(new.key, "train.py"))) == [Tell, Start]


def test_only_the_first_may_offer_and_say_go() -> None:
    second = launcher("b.1")
    epoch = epoch_of(*NAMES)
    second.epoch_started(0.0, epoch)
    assert second.received("c.1", Offer(epoch.key, "train.py", PLACE)) == ()
    assert second.received("a.1", Go(epoch.key)) == ()
    assert second.received("stranger.1", Offer(epoch.key, "train.py", PLACE)) == ()
    second.received("a.1", Offer(epoch.key, "train.py", PLACE))
    assert second.received("c.1", Go(epoch.key)) == ()
    assert kinds(second.received("a.1", Go(epoch.key))) == [Start]
    assert second.received("a.1", Go(epoch.key)) == ()


def test_one_that_would_start_another_program_is_not_ready() -> None:
    first = launcher("a.1")
    epoch = epoch_of(*NAMES)
    first.epoch_started(0.0, epoch)
    assert first.received("b.1", Ready(epoch.key, "other.py")) == ()
    assert first.received("c.1", Ready(epoch.key, "train.py")) == ()
    assert first.silent == {"b.1"}
    assert kinds(first.received("b.1", Ready(epoch.key, "train.py"))) == [Tell, Start]


def test_machines_that_run_different_programs_all_say_so() -> None:
    run = Run(titles={"c.1": "other.py"})
    run.start(epoch_of(*NAMES))
    run.deliver([])
    for agreement in run.launchers.values():
        assert "other.py" in agreement.failures[0].why
        assert not agreement.has_started


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
    one.received("c.1", Done(epoch_of(*NAMES).key))
    assert one.lost("c.1", "c", "it left") == ()
    assert one.epoch_ended(1.0, "c left") == ()
    assert one.tick(1e6) == ()
    assert one.lost("x.1", "x", "a stranger to this run") == ()
    tell, stop = one.lost("a.1", "host-a", "silent for 1.2 s")
    assert isinstance(stop, Stop)
    assert tell == Tell(Failed(stop.failure))
    assert "host-a is gone: silent" in stop.failure.why
    assert one.received("a.1", Failed(Failure("a", 1))) == ()


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
    assert kinds(one.received("a.1", Failed(Failure("c", 1, why="c is gone: silent")))) == [Stop]
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
    one.received("a.1", Failed(Failure("a", 1)))
    assert one.lost("a.1", "host-a", "it left") == ()
    for peer in ("a.1", "c.1"):
        assert one.received(peer, Done(epoch_of(*NAMES).key)) == ()
    assert kinds(one.done()) == [Tell]
    assert one.failures == [Failure("a", 1)]
    first = launcher("a.1")
    first.epoch_started(0.0, epoch_of(*NAMES))
    first.received("b.1", Failed(Failure("b", 1)))
    assert first.epoch_started(1.0, epoch_of(*NAMES, number=6)) == ()
    assert not first.has_started


def test_what_a_stranger_to_the_epoch_says_is_ignored() -> None:
    one = started("b.1")
    assert one.received("stranger.1", Failed(Failure("x", 1))) == ()
    assert one.failures == []


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x81\xa4type\xa2no", encode(Go((1, "a"))) + b"\0"])
def test_what_is_no_message_is_an_error_in_words(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="another launcher"):
        decode(data)


@given(st.binary(max_size=64))
def test_any_bytes_are_a_message_or_an_error_in_words(data: bytes) -> None:
    with suppress(ProtocolError):
        decode(data)
