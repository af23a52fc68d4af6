"""Calls between real processes, of which one is killed."""

from __future__ import annotations

from ringfort.config import MIB
from tests.storms import storm


def test_every_call_ends_once_and_nothing_is_left_behind() -> None:
    assert storm(300, MIB, 1, kill_after=None) == 1200


def test_every_call_ends_once_when_a_rank_is_killed() -> None:
    assert storm(600, MIB, 2, kill_after=0.2) == 1800
