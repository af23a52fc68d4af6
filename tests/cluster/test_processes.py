"""Groups of real processes: one that is killed, and how much memory and time they take."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import pytest

from ringfort.config import MIB
from ringfort.launch.local_ranks import LocalRanks, RankFailedError

ROOT = str(Path(__file__).parents[2])


def test_survivors_of_a_killed_rank_name_it_and_leave_nothing_behind() -> None:
    kill_one(0, 16 * MIB, shared_memory="on")
    kill_one(3, 4, shared_memory="on")
    kill_one(3, 16 * MIB, shared_memory="off")
    kill_one(1, 16 * MIB, shared_memory="off", connections=3)
    kill_one(2, 16 * MIB, shared_memory="off", connections="auto")


needs_pidfd = pytest.mark.skipif(
    not hasattr(os, "pidfd_open"), reason="needs Linux, where a process can wait for another's end"
)
unclosed = pytest.mark.parametrize(("shared_memory", "connections"), [("on", "1"), ("off", "1"), ("off", "2")])


@needs_pidfd
@unclosed
def test_who_has_done_its_part_may_end_without_closing(shared_memory: str, connections: str) -> None:
    """Those who go on with the same collective do not take it for a crash."""
    arguments = ["forget_to_close", shared_memory, connections, "ends"]
    with LocalRanks("tests.workers.ranks", 3, arguments, variables={"PYTHONPATH": ROOT}) as ranks:
        assert dict(ranks.messages()) == {rank: {"total": 0.0} for rank in range(3)}


@needs_pidfd
@unclosed
def test_who_ended_without_closing_is_lost_to_those_who_need_it(shared_memory: str, connections: str) -> None:
    arguments = ["forget_to_close", shared_memory, connections, "is missed"]
    with LocalRanks("tests.workers.ranks", 3, arguments, variables={"PYTHONPATH": ROOT}) as ranks:
        heard = dict(ranks.messages())  # the last word of each
    assert heard[1] == heard[2] == {"error": "PeerLostError", "peer": 0}


@needs_pidfd
@unclosed
def test_who_failed_is_lost_to_those_who_need_it(shared_memory: str, connections: str) -> None:
    heard: dict[int, dict[str, object]] = {}
    arguments = ["forget_to_close", shared_memory, connections, "fails"]
    with (
        LocalRanks("tests.workers.ranks", 3, arguments, variables={"PYTHONPATH": ROOT}) as ranks,
        pytest.raises(RankFailedError, match="a mistake in the program") as caught,
    ):
        heard.update(ranks.messages(patience=60))
    assert caught.value.rank == 0
    assert heard[1] == heard[2] == {"error": "PeerLostError", "peer": 0}


def test_a_forked_child_says_no_goodbye_for_its_parent() -> None:
    with LocalRanks("tests.workers.ranks", 2, ["fork"], variables={"PYTHONPATH": ROOT}) as ranks:
        assert dict(ranks.messages()) == {0: {"total": 2.0}, 1: {"total": 2.0}}


def test_a_program_ends_though_its_simulated_group_is_open_and_time_stands_still() -> None:
    program = (
        "from ringfort.backends.simulated import SimulatedBackend; from ringfort.testing import VirtualClock; "
        "group = SimulatedBackend.create_group(2, clock=VirtualClock())"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_an_all_reduce_takes_little_memory_beside_the_array() -> None:
    assert memory_of(2, 128 * MIB) < 16 * MIB
    assert memory_of(2, 128 * MIB, shared_memory="off", connections="auto") < 16 * MIB


def test_eight_ranks_connect_in_a_moment() -> None:
    # The requirement is one second; a loaded machine that only just has the processes running gets more here.
    assert connect_time(8) < 10


def kill_one(victim: int, nbytes: int, *, shared_memory: str = "on", connections: int | Literal["auto"] = 1) -> float:
    """Kills `victim` of four inside an all-reduce; returns how many seconds later the last survivor knew."""
    errors: dict[int, dict[str, object]] = {}
    rest: dict[int, dict[str, object]] = {}
    pids: dict[int, int] = {}
    killed_at = 0.0
    steps = 0
    variables = {"PYTHONPATH": ROOT, "RINGFORT_SHM": shared_memory}
    arguments = ["reduce_until_killed", str(nbytes), str(connections)]
    with LocalRanks("tests.workers.ranks", 4, arguments, variables=variables) as ranks:
        reports = ranks.messages(patience=60)
        while True:
            rank, message = next(reports)
            if "pid" in message:
                pids[rank] = message["pid"]
            elif "step" in message:
                steps += rank != victim
                if steps >= 4 and victim in pids and not killed_at:  # messages of different ranks keep no order
                    os.kill(pids[victim], signal.SIGKILL)
                    killed_at = time.monotonic()
            elif "error" in message:
                errors[rank] = message
            else:
                rest[rank] = message
                if len(rest) == 3:
                    break
    assert set(errors) == {0, 1, 2, 3} - {victim}
    for rank, message in errors.items():
        assert message["peer"] == victim, (rank, message)
        assert message["error"] == "PeerLostError", (rank, message)
    for rank, message in rest.items():
        assert message == {"threads": 1, "sockets": 0, "segments": 0}, (rank, message)
    return max(float(str(message["at"])) for message in errors.values()) - killed_at


def memory_of(
    world_size: int, nbytes: int, *, shared_memory: str = "on", connections: int | Literal["auto"] = 1
) -> int:
    """Bytes by which an all-reduce of `nbytes` raised the peak memory of the worst rank."""
    variables = {"PYTHONPATH": ROOT, "RINGFORT_SHM": shared_memory}
    with LocalRanks(
        "tests.workers.ranks", world_size, ["memory", str(nbytes), str(connections)], variables=variables
    ) as ranks:
        return max(message["grown_kib"] * 1024 for _, message in ranks.messages())


def connect_time(world_size: int) -> float:
    """Seconds from when the last rank began to connect until all were connected."""
    with LocalRanks("tests.workers.ranks", world_size, ["connect"], variables={"PYTHONPATH": ROOT}) as ranks:
        times = [message for _, message in ranks.messages()]
    return max(message["end"] for message in times) - max(message["start"] for message in times)
