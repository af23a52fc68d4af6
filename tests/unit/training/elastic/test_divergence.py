"""What members do when their copies differ: real states and verdicts, over a group that is only played."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ringfort.cluster.core.peer_messages import Epoch, Member
from ringfort.errors import DivergedError
from ringfort.training.elastic.divergence import Divergence
from ringfort.training.elastic.protocol import Differs, Mark, Result
from ringfort.training.elastic.state_check import UNKNOWN, Word, leaves_of
from ringfort.training.elastic.state_tree import Image, StateTree


class Machine:
    """A member. What it does to its run is written down."""

    def __init__(self, rank: int, kind: str = "pc") -> None:
        self.rank, self.kind = rank, kind
        self.tree: dict[str, Any] = {"w": np.zeros(4), "steps": 0}
        self.state = StateTree(self.tree)
        self.said = list[str]()
        self.did = list[str]()
        run = SimpleNamespace(
            state=self.state,
            journal=SimpleNamespace(say=lambda text, level=0: self.said.append(text)),
            replica=SimpleNamespace(fence=lambda epoch: None),
            checkpoints=SimpleNamespace(save_apart=lambda mark, number, image: "its state is in a folder"),
            close=lambda why: self.did.append("closed"),
            members=SimpleNamespace(
                context=None,
                node=SimpleNamespace(peer_id=f"n{rank}.a"),
                give_up=lambda epoch, stands, why: self.did.append(f"gave up {epoch.number}"),
            ),
        )
        self.exchange = SimpleNamespace()
        self.divergence = Divergence(cast("Any", run), cast("Any", self.exchange), kind)
        self.divergence.origin = 0

    def word(self) -> Word:
        kind, digest = leaves_of(self.kind, self.state).word
        return Word(kind, self.divergence.origin, digest)


def machines(*kinds: str) -> list[Machine]:
    return [Machine(rank, kind) for rank, kind in enumerate(kinds)]


def epoch_of(group: Sequence[Machine]) -> Epoch:
    members = tuple(Member(f"n{one.rank}.a", name=f"machine{one.rank}") for one in group)
    return Epoch(3, "n0.a", members, (), ("n0.a#1",))


def compare(group: Sequence[Machine], step: int) -> list[int]:
    """Have all members compare their states. Return the ranks of those that leave."""
    words = [one.word() for one in group]
    leaves = [leaves_of(one.kind, one.state) for one in group]
    images = [one.state.image() for one in group]
    left = list[int]()
    for one in group:
        one.exchange.words = lambda context, mine: words
        one.exchange.leaves = lambda context, mine: leaves
        one.exchange.share = lambda context, root, mine, own: Result("b", step, 1, images[root], is_state=True)
        try:
            one.divergence.compare_states(Mark("b", step), epoch_of(group))
        except DivergedError:
            assert one.did == ["closed"]
            left.append(one.rank)
    return left


def test_a_damaged_state_is_replaced_and_everybody_says_whose_and_where() -> None:
    group = machines("pc", "pc", "pc")
    group[1].tree["w"][2] = 1
    assert compare(group, 100) == []
    assert group[1].tree["w"].tolist() == [0, 0, 0, 0]
    line = "The state of machine1 after step 100 differs from that of the others in state['w']; it takes theirs"
    assert [one.said for one in group] == [[line]] * 3
    assert compare(group, 200) == []
    assert [len(one.said) for one in group] == [1, 1, 1]


def test_a_machine_that_is_damaged_at_two_comparisons_in_a_row_leaves() -> None:
    group = machines("pc", "pc", "pc")
    for step, damaged, left in ((100, 1, []), (200, 2, []), (300, 1, []), (400, 1, [1])):
        group[damaged].tree["steps"] += 1
        assert compare(group, step) == left


def test_a_machine_that_cannot_keep_the_state_of_the_others_leaves_at_once() -> None:
    class Stubborn(StateTree):
        def load(self, image: Image) -> None:
            """Nothing changes."""

    group = machines("pc", "pc", "pc")
    group[2].tree["w"][0] = 1
    group[2].divergence._run.state = Stubborn(group[2].tree)
    assert compare(group, 100) == [2]


def test_without_a_majority_all_leave_with_both_names_and_keep_their_states() -> None:
    group = machines("pc", "pc", "mac")
    group[0].tree["w"][0] = 1
    assert compare(group, 100) == [0, 1, 2]
    with pytest.raises(DivergedError, match=r"machine0, machine1.*; its state is in a folder") as caught:
        group[2].divergence.compare_states(Mark("b", 100), epoch_of(group))
    assert (caught.value.step, caught.value.machines) == (100, ("machine0", "machine1"))


def test_another_class_takes_the_state_of_the_first_each_time_and_its_drift_is_told_once() -> None:
    group = machines("pc", "mac", "pc")
    for step in (100, 200, 300):
        group[1].tree["w"] += 1e-9
        assert compare(group, step) == []
        assert group[1].tree["w"].tolist() == [0, 0, 0, 0]
    for one in group:
        assert len(one.said) == 1
        assert one.said[0].startswith("The state of machine1 (mac) has drifted up to step 100 in state['w']")


def test_a_copy_of_another_class_s_state_is_no_damage_and_after_a_comparison_it_counts_like_others() -> None:
    group = machines("pc", "pc", "pc")
    group[0].tree["w"][:], group[0].divergence.origin = 1e-9, UNKNOWN
    assert compare(group, 100) == []
    assert "has drifted" in group[0].said[0]
    assert [one.divergence.origin for one in group] == [100] * 3
    group[0].tree["w"][0] = 1
    assert compare(group, 200) == []
    assert "The state of machine0 after step 200 differs" in group[1].said[-1]


def test_members_that_all_have_copies_with_the_same_bits_have_one_origin_from_then_on() -> None:
    group = machines("pc", "pc")
    for one in group:
        one.divergence.origin = UNKNOWN
    assert compare(group, 100) == []
    assert [one.divergence.origin for one in group] == [100, 100]


def test_a_result_that_differs_once_ends_the_epoch_and_twice_the_part_of_the_machine() -> None:
    group = machines("pc", "pc", "pc")
    for one in group:
        one.divergence.void(epoch_of(group), Differs(7, (1,), 1, has_majority=True))
    assert [one.did for one in group] == [["gave up 3"]] * 3
    assert [one.said for one in group] == [
        ["The copies of the result of step 7 differ (machine1); it is reduced again"]
    ] * 3
    for one in (group[0], group[2]):
        one.divergence.void(epoch_of(group), Differs(7, (1,), 2, has_majority=True))
        assert one.did == ["gave up 3", "gave up 3"]
        assert one.said[-1].startswith("The result of step 7 on machine1 differs from that of most members")
    with pytest.raises(DivergedError, match="machine1"):
        group[1].divergence.void(epoch_of(group), Differs(7, (1,), 2, has_majority=True))
    assert group[1].did == ["gave up 3", "closed"]


def test_two_machines_whose_results_differ_twice_both_leave() -> None:
    for one in (group := machines("pc", "pc")):
        with pytest.raises(DivergedError, match="between machine0, machine1, and none has a majority"):
            one.divergence.void(epoch_of(group), Differs(7, (0, 1), 2, has_majority=False))
        assert one.did == ["closed"]
