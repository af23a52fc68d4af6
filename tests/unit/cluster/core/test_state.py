"""Whom a person's `restart_without` stands for."""

from __future__ import annotations

import pytest

from ringfort.cluster.core.peer_messages import Epoch, Member, Votes
from ringfort.cluster.core.state import PeerState
from ringfort.config import AutoDiscoveryConfig

ME = Member("me.2", "mine", 1, ("mine:1",), name="study")
LAST = Epoch(
    1,
    "me.1",
    (
        Member("me.1", "mine", 1, ("mine:1",), name="study"),
        Member("one.1", "first", 1, ("first:1",), name="raspberrypi"),
        Member("two.1", "second", 1, ("second:1",), name="raspberrypi"),
        Member("two.2", "second", 1, ("second:1",), name="raspberrypi"),
        Member("three.1", "third", 1, ("third:1",), name="attic"),
    ),
    lineages=("me.1#1",),
)


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ([], ()),
        (["attic"], ("three.1",)),
        (["three"], ("three.1",)),
        (["raspberrypi"], ()),  # which of the two?
        (["two"], ("two.1", "two.2")),
        (["two.2", "attic"], ("three.1", "two.2")),
        (["garage"], ()),
    ],
)
def test_a_name_that_several_machines_have_stands_for_none_of_them(said: list[str], found: tuple[str, ...]) -> None:
    state = PeerState(ME, AutoDiscoveryConfig(restart_without=said), 0.0, lambda: 0)
    state.recall([Votes(1, LAST)])
    assert state.restart_without == found
