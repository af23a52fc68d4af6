"""What the demo tells of a run: in words, and as the record of a fault."""

from __future__ import annotations

from typing import Any

from ringfort.demo.story import Fault, Story


def progress(step: int, members: int, at: float) -> dict[str, Any]:
    return {
        "kind": "progress",
        "step": step,
        "loss": 3.0,
        "members": members,
        "at": at,
        "samples_per_second": 9,
        "pid": 7,
    }


def test_a_peer_that_is_killed_and_comes_back() -> None:
    story = Story(3)
    told = list[str]()
    for number, message in [
        *((number, {"kind": "started", "pid": 7}) for number in range(3)),
        *((number, progress(1, 3, 1.0)) for number in range(3)),
        (1, progress(40, 3, 5.0)),
        (1, {"kind": "killed", "at": 5.1}),
        (0, progress(41, 2, 5.6)),
        (2, progress(41, 2, 5.6)),
        (1, {"kind": "started", "pid": 8}),
        (1, progress(50, 0, 7.0)),
    ]:
        told += story.add(number, message)
    assert [peer.state for peer in story.peers.values()] == ["training", "copying", "training"]
    assert story.faults == [Fault(1, 40, 5.6 - 5.1)]
    told += story.add(1, progress(52, 3, 8.1))
    assert story.faults == [Fault(1, 40, 5.6 - 5.1, 52, 8.1 - 5.1)]
    assert told == [
        "step 1: 3 of 3 peers train",
        "peer 1 was killed (SIGKILL) after step 40",
        "step 41: the others continue, 0.5 s after the kill (slowed down)",
        "peer 1 has started again and looks for the others",
        "step 52: peer 1 is back with a copy of the state, after 3.0 s",
    ]


def test_the_run_takes_from_its_first_step_to_its_last() -> None:
    story = Story(1)
    assert not story.is_training
    for step in range(1, 4):
        assert story.add(0, progress(step, 1, 10.0 + step)) == []
    assert story.is_training
    story.add(0, {"kind": "result"})
    assert not story.is_training
    assert story.seconds == 2.0
    assert story.points == [(1, 3.0), (2, 3.0), (3, 3.0)]
