"""Ranks that call each other in every way while one of them is killed."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ringfort.launch.local_ranks import LocalRanks

ROOT = str(Path(__file__).parents[2])
RANKS = 4


def storm(calls: int, largest: int, seed: int, *, kill_after: float | None) -> int:
    """`calls` calls from each of four ranks, of which one is killed `kill_after` seconds after all have begun. Checks
    that every call ended once, as it should have, and that nothing is left. Returns how many ended."""
    chance = random.Random(seed)
    victim = chance.randrange(RANKS) if kill_after is not None else None
    pids: dict[int, int] = {}
    ends: dict[int, dict[str, Any]] = {}
    rest: dict[int, dict[str, Any]] = {}
    survivors = set(range(RANKS)) - {victim}
    with LocalRanks(
        "tests.workers.rpc", RANKS, [str(calls), str(largest), str(seed)], variables={"PYTHONPATH": ROOT}
    ) as ranks:
        for rank, message in ranks.messages(patience=3600):
            if "pid" in message:
                pids[rank] = message["pid"]
                if len(pids) == RANKS and victim is not None:
                    time.sleep(kill_after or 0.0)  # the moment is random, and the calls are under way
                    with suppress(ProcessLookupError):  # it was quicker
                        os.kill(pids[victim], signal.SIGKILL)
            elif "outcomes" in message:
                ends[rank] = message
            else:
                rest[rank] = message
            if survivors <= set(rest):
                break
    made = calls // 3 * 3
    for rank in survivors:
        message = ends[rank]
        assert message["ends"] == {"1": made}, (rank, message["ends"])
        strange = set(message["outcomes"]) - {"right", "lost", "lost there"}
        assert not strange, (rank, message["outcomes"])
        assert victim is not None or set(message["outcomes"]) == {"right"}, (rank, message["outcomes"])
        assert message["left"] == [0] * 6, (rank, message["left"])
        assert rest[rank]["threads"] == ["MainThread"], (rank, rest[rank])
        assert rest[rank]["sockets"] == 0, (rank, rest[rank])
    return made * len(survivors)
