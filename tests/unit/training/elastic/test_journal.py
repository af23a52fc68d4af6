"""What is said about who came and who went, and what of the possible work was sealed."""

from __future__ import annotations

import logging

import pytest

from ringfort.cluster.core.peer_messages import Epoch, Member
from ringfort.cluster.shown_events import names_of
from ringfort.training.elastic.journal import Journal


def journal() -> tuple[Journal, list[tuple[int, str]]]:
    said = list[tuple[int, str]]()
    return Journal(lambda level, text: said.append((level, text))), said


def test_a_change_is_one_line_with_its_cost() -> None:
    found, said = journal()
    found.began({"a": "attic", "b": "barn"})
    found.sealed(1, 64, (100, 100), 10.0)
    found.sealed(2, 64, (100, 100), 10.5)
    found.lost("b", "no answer for 2 s")
    found.began({"a": "attic", "c": "cellar"})
    found.sealed(3, 64, (100, 0), 13.0)
    found.sealed(4, 64, (100, 100), 13.5)
    assert [text for _, text in said] == [
        "Step 1 is sealed by 2 members: attic, barn",
        "cellar joined, barn (no answer for 2 s) left: 2 members from step 3; 2.5 s without a sealed step",
    ]
    assert list(found.events) == [text for _, text in said]


def test_a_reason_that_comes_before_the_last_common_step_is_sealed_here_is_told() -> None:
    found, said = journal()
    found.began({"a": "attic", "b": "barn"})
    found.sealed(1, 64, (100, 100), 10.0)
    found.lost("b", "it leaves")
    found.sealed(2, 64, (100, 100), 10.5)
    found.began({"a": "attic"})
    found.sealed(3, 64, (100,), 11.0)
    found.began({"a": "attic", "b": "barn"})  # as a network that was cut brings it back
    found.sealed(4, 64, (100, 100), 11.5)
    found.began({"a": "attic"})
    found.sealed(5, 64, (100,), 12.0)
    assert [text.partition(":")[0] for _, text in said[1:]] == ["barn (it leaves) left", "barn joined", "barn left"]


def test_too_few_members_are_one_warning_that_says_who_is_missing() -> None:
    found, said = journal()
    found.began({"a": "attic", "b": "barn"})
    found.sealed(1, 64, (100, 100), 10.0)
    found.lost("b", "it has ended")
    found.began({"a": "attic"})
    for _ in range(3):
        found.waits(2)
    assert said[1:] == [
        (
            logging.WARNING,
            "Waiting with the state in memory: 1 of at least 2 members are here (attic); missing: barn (it has ended)",
        )
    ]


def test_goodput_is_what_was_sealed_of_what_was_possible() -> None:
    found, _ = journal()
    assert found.goodput == 0
    found.began({"a": "attic", "b": "barn"})
    found.sealed(1, 60, (40, 60), 1.0)  # the time before it is unknown
    found.sealed(2, 60, (40, 60), 2.0)
    assert found.goodput == pytest.approx(0.6)
    found.aside(1.0)
    found.sealed(3, 60, (40, 60), 4.0)
    assert found.goodput == pytest.approx(0.6)
    found.sealed(4, 60, (40, 0), 6.0)  # an unknown speed counts as the mean of the others
    assert found.goodput == pytest.approx(180 / 360)


def test_processes_of_one_machine_have_different_names() -> None:
    members = tuple(Member(peer, name=name) for peer, name in (("n.aaaaaa", "vm"), ("n.bbbbbb", "vm"), ("m.c", "pi")))
    assert list(names_of(Epoch(1, "m.c", members)).values()) == ["vm/aaaaaa", "vm/bbbbbb", "pi"]
