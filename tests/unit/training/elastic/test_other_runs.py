"""Programs that use one name for different runs are told what differs; of two runs, one gives way."""

from __future__ import annotations

import numpy as np
import pytest

from ringfort.cluster.core.events import Noted, PeerJoined, PeerLost
from ringfort.cluster.core.gossip import MAX_NOTE_BYTES
from ringfort.config import MAX_ELASTIC_NAME, AutoDiscoveryConfig
from ringfort.training.elastic.dealing import Data
from ringfort.training.elastic.other_runs import OtherRuns, Place
from ringfort.training.elastic.protocol import Mark
from ringfort.training.elastic.run_note import TOPIC, at, differences, note_of, read
from ringfort.training.elastic.state_tree import StateTree

DATA = Data(100, 10, 5, 1)
STATE = {"w": np.zeros(3)}


def note(data: Data = DATA, state: dict[str, object] | None = None, name: str = "run", **rules: str):
    return note_of(name, data, rules, StateTree(STATE if state is None else state).manifest(), "attic")


class Program:
    def __init__(self, mine=None, mark: Mark | None = None) -> None:
        self.mark = mark or Mark()
        self.ended: tuple[str, ...] = ()
        self.sent: list[tuple[bytes, str | None]] = []
        self.others = OtherRuns(
            mine or note(), lambda: Place(self.mark, ended=self.ended), lambda *told: self.sent.append(told), 0.0
        )

    def hear(self, body: bytes, peer: str = "b") -> None:
        self.others.on_event(Noted(peer, TOPIC, body))


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (note(Data(100, 20, 5, 1)), "batch is 10 here and 20 there"),
        (note(Data(90, 10, 5, 2)), "samples is 100 here and 90 there; seed is 1 here and 2 there"),
        (note(Data(100, 10, 5, 2**70)), f"seed is 1 here and {2**70} there"),
        (
            note(Data(100, 10, 5, 1, is_per_member=True)),
            "batch is 10 here and missing there; batch_per_member is missing here and 10 there",
        ),
        (note(nonfinite="skip"), "nonfinite is error here and skip there"),
        (note(clip_norm="0.5"), "clip_norm is None here and 0.5 there"),
        (note(scheduler_per="pass"), "scheduler_per is step here and pass there"),
        (note(state={"w": np.zeros(4)}), "state['w'] is float64(3,) here and float64(4,) there"),
        (
            note(state={"w": np.zeros(3), "m": 1.0}),
            "the state has 1 arrays and values here and 2 there; state['m'] is missing here and a plain value there",
        ),
        (note(state={0: np.zeros(3)}), "state['w'] is float64(3,) here and missing there"),
        (note(), ""),
    ],
)
def test_differences_are_said_in_words(theirs, words: str) -> None:
    assert differences(note(), theirs) == words


def test_the_name_of_a_run_in_the_cluster_and_in_its_checkpoints_stays_as_it_was() -> None:
    """Otherwise machines with another version and checkpoints from before would be of another run."""
    assert note().run == "run/1c09d670"
    assert str(DATA) == "Data(samples=100, batch=10, microbatch=5, seed=1)"
    assert (
        str(Data(100, 10, 5, 1, is_per_member=True)) == "Data(samples=100, batch_per_member=10, microbatch=5, seed=1)"
    )


def test_a_list_and_a_dict_with_numbers_as_keys_are_different_states() -> None:
    assert note(state={"m": [1]}).run != note(state={"m": {0: 1}}).run


def test_the_longest_name_has_room_for_every_rule() -> None:
    name, rules = "n" * MAX_ELASTIC_NAME, {"nonfinite": "skip", "clip_norm": "0.1", "scheduler_per": "pass"}
    told = note_of(name, DATA, rules, StateTree(STATE).manifest(), "attic")
    assert AutoDiscoveryConfig(run=told.run).run == told.run
    other = note_of(name, DATA, {**rules, "clip_norm": "0.2"}, StateTree(STATE).manifest(), "attic")
    assert differences(told, other) == "clip_norm is 0.1 here and 0.2 there"


def test_the_note_of_a_large_state_fits() -> None:
    large = note(state={f"layer{number:05}": np.zeros(number + 1) for number in range(3000)})
    assert len(at(large, Mark(), is_answer=False)) <= MAX_NOTE_BYTES
    other = note(state={f"layer{number:05}": np.zeros(number + (number == 2999) + 1) for number in range(3000)})
    assert other.run != large.run
    assert differences(large, other) == "the state has other shapes"


def test_a_malformed_note_is_ignored() -> None:
    assert read(b"\xc1") is None
    program = Program()
    program.hear(b"\x81")
    assert program.others.different() == ""
    assert not program.sent


def test_a_newcomer_is_told_and_gives_up_but_the_run_does_not() -> None:
    program = Program()
    program.hear(at(note(Data(100, 20, 5, 1)), Mark("l@1", 50), is_answer=False))
    assert [read(body).is_answer for body, peer in program.sent] == [True]
    assert program.others.different() == "attic has a run of this name that differs: batch is 10 here and 20 there"
    running = Program(mark=Mark("m@1", 51))
    running.hear(at(note(Data(100, 20, 5, 1)), Mark("l@1", 50), is_answer=True))
    assert running.others.different() == ""
    assert not running.sent
    program.others.on_event(PeerLost("b", "", died=True))
    assert program.others.different() == ""


def test_runs_of_other_names_are_no_concern() -> None:
    program = Program()
    program.hear(at(note(Data(100, 20, 5, 1), name="another"), Mark("l@1", 50), is_answer=False))
    assert program.others.different() == ""


def test_of_two_runs_that_meet_exactly_one_gives_way() -> None:
    for mine, theirs in [(3, 4), (4, 3), (4, 4)]:
        a, b = Program(mark=Mark("a@1", mine)), Program(mark=Mark("b@1", theirs))
        a.hear(at(note(), b.mark, is_answer=True))
        b.hear(at(note(), a.mark, is_answer=True), "a")
        assert bool(a.others.better()) != bool(b.others.better())
    a = Program(mark=Mark("a@1", 3))
    a.hear(at(note(), Mark("a@1", 9), is_answer=True))
    assert a.others.better() == ()  # the same branch: it only is ahead


def test_peers_are_told_when_they_come_and_again_now_and_then() -> None:
    program = Program()
    program.others.on_event(PeerJoined("b"))
    assert [peer for _, peer in program.sent] == ["b"]
    for now in (0.0, 0.5, 1.0, 1.5, 70.0, 80.0, 85.0):
        program.others.announce(now)
    assert [peer for _, peer in program.sent] == ["b", None, None, None, None]


def test_a_copy_of_a_run_makes_no_other_run_give_way() -> None:
    """Its members may have died: then there is nobody to copy the state from, and the others would wait for ever."""
    program = Program(mark=Mark("l@1", 5))
    program.hear(at(note(), Mark("m@1", 50), is_answer=True, is_copy=True))
    assert program.others.better() == ()
    program.hear(at(note(), Mark("m@1", 50), is_answer=True))
    assert program.others.better() == ("b",)


def test_a_run_that_has_ended_makes_no_other_run_give_way() -> None:
    """Its last members have died; the program that it went on without must copy the state of this one."""
    program = Program(mark=Mark("l@1", 5))
    program.hear(at(note(), Mark("m#3@1", 50), is_answer=True))
    assert program.others.better() == ("b",)
    program.ended = ("m#3",)
    assert program.others.better() == ()
