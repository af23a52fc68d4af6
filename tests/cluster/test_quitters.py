"""Ranks that go without a word, and of which a part stays: a forked child, or the process itself."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ringfort.launch.local_ranks import LocalRanks

ROOT = str(Path(__file__).parents[2])
AT_ONCE = 5.0
"""Seconds. It takes milliseconds, and not to notice takes a minute; a busy machine may take its time."""


def quit_by(how: str, what: str, *, shared_memory: str = "on") -> tuple[dict[str, Any], dict[str, Any]]:
    """What rank 0 said as it went, and what rank 1 was told."""
    variables = {"PYTHONPATH": ROOT, "RINGFORT_SHM": shared_memory}
    said: dict[int, dict[str, Any]] = {}
    with LocalRanks("tests.workers.quitters", 2, [how, what], variables=variables) as ranks:
        for rank, message in ranks.messages(patience=60):
            said[rank] = message
            if len(said) == 2:
                break
        if "child" in said[0]:
            with suppress(ProcessLookupError):
                os.kill(said[0]["child"], signal.SIGKILL)
    return said[0], said[1]


@pytest.mark.parametrize(
    ("what", "shared_memory", "error"),
    [("numpy", "on", "PeerLostError"), ("numpy", "off", "PeerLostError"), ("rpc", "on", "RpcPeerLostError")],
)
def test_a_killed_rank_is_lost_at_once_though_its_forked_child_lives(what: str, shared_memory: str, error: str) -> None:
    left, heard = quit_by("fork", what, shared_memory=shared_memory)
    assert "forked" in left["words"]  # the child knows why it cannot use the group
    assert (heard["error"], heard["peer"]) == (error, 0)
    assert heard["at"] - left["at"] < AT_ONCE


@pytest.mark.parametrize("shared_memory", ["on", "off"])
def test_a_group_that_is_dropped_is_left_at_once(shared_memory: str) -> None:
    left, heard = quit_by("drop", "numpy", shared_memory=shared_memory)
    assert (heard["error"], heard["peer"]) == ("PeerLostError", 0)
    assert heard["at"] - left["at"] < AT_ONCE
