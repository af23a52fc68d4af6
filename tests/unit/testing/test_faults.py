"""Faults by timetable: who fails how and when, and nothing else changes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from ringfort import DistributedConfig, DistributedContext, SimulatedBackend, SubBackend, TcpBackend
from ringfort.errors import AbortedError, ChannelClosedError, InvalidArgumentError, OperationTimeoutError, PeerLostError
from ringfort.testing import (
    Fault,
    FaultKind,
    FaultTimetable,
    FaultyBackend,
    RankKilled,
    VirtualClock,
    results,
    run_ranks,
)
from tests.helpers.background import Background


def faulty_group(
    world_size: int, timetable: FaultTimetable, clock: VirtualClock | None = None, timeout: float = 20
) -> list[FaultyBackend]:
    group = SimulatedBackend.create_group(world_size, config=DistributedConfig(timeout=timeout), clock=clock)
    return [FaultyBackend(backend, timetable) for backend in group]


def close(group: list[FaultyBackend]) -> None:
    results(run_ranks(group, lambda backend: backend.close()))


def ring_steps(backend: FaultyBackend) -> int:
    """Exchanges round the ring for ever; only a fault ends it."""
    n = backend.world_size
    while True:
        backend.exchange(b"x", (backend.rank + 1) % n, bytearray(1), (backend.rank - 1) % n)


# --- the table --------------------------------------------------------------------------------------------------------


def test_a_timetable_reads_as_it_was_written() -> None:
    table = FaultTimetable().kill(rank=2, at=5).freeze(rank=1, at=9).cut(rank=0, at=1, peer=2).abort(rank=1, at=3)
    text = "FaultTimetable().kill(rank=2, at=5).freeze(rank=1, at=9).cut(rank=0, at=1, peer=2).abort(rank=1, at=3)"
    assert repr(table) == text
    assert eval(text) == table  # noqa: S307


def test_a_timetable_gives_each_rank_its_faults_soonest_first() -> None:
    table = FaultTimetable().kill(rank=1, at=9).abort(rank=1, at=3).kill(rank=0, at=1)
    assert table.of(1) == [Fault(1, 3, FaultKind.ABORT), Fault(1, 9, FaultKind.KILL)]
    assert table.of(2) == []
    assert table.killed == {0, 1}
    assert table
    assert not FaultTimetable()


def test_adding_to_a_timetable_leaves_it_as_it_was() -> None:
    table = FaultTimetable().kill(rank=1, at=1)
    table.kill(rank=2, at=1)
    assert table.killed == {1}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("rank", (-1, 1, FaultKind.KILL)),
        ("rank", ("0", 1, FaultKind.KILL)),
        ("at", (0, 0, FaultKind.KILL)),
        ("at", (0, True, FaultKind.KILL)),
        ("peer", (0, 1, FaultKind.CUT)),
        ("peer", (0, 1, FaultKind.KILL, 1)),
    ],
)
def test_a_fault_that_cannot_be_is_refused(name: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name}="):
        Fault(*arguments)


def test_a_fault_that_the_backend_cannot_have_is_refused_at_once() -> None:
    with TcpBackend(0, 1) as backend:
        with pytest.raises(InvalidArgumentError, match=r"cut\(rank=0, .*TcpBackend has no method cut"):
            FaultyBackend(backend, FaultTimetable().cut(rank=0, at=1, peer=1), is_process=True)
        FaultyBackend(backend, FaultTimetable().kill(rank=0, at=1), is_process=True)
        FaultyBackend(backend, FaultTimetable().kill(rank=1, at=1))  # another rank's fault


# --- the faults -------------------------------------------------------------------------------------------------------


def test_a_kill_ends_the_rank_just_before_its_step() -> None:
    group = faulty_group(3, FaultTimetable().kill(rank=1, at=4))
    outcomes = run_ranks(group, ring_steps)
    assert isinstance(outcomes[1], RankKilled)
    assert (outcomes[0].peer, outcomes[2].peer) == (1, 1)  # type: ignore[union-attr]
    assert isinstance(outcomes[0], PeerLostError)
    assert isinstance(outcomes[2], PeerLostError)
    assert group[1].step == 4
    close(group)


def test_nothing_that_a_rank_does_survives_its_kill() -> None:
    group = faulty_group(2, FaultTimetable().kill(rank=0, at=1))

    def stubborn(backend: FaultyBackend) -> None:
        try:
            backend.send(b"x", 1)
        except Exception:
            pytest.fail("caught its own death")

    with pytest.raises(RankKilled):
        stubborn(group[0])
    close(group)


def test_a_frozen_rank_stays_until_it_is_thawed() -> None:
    clock = VirtualClock()
    group = faulty_group(2, FaultTimetable().freeze(rank=0, at=2), clock)
    group[0].send(b"1", 1)
    frozen = Background(group[0].send, b"2", 1)
    group[1].recv(bytearray(1), 0)
    waiting = Background(group[1].recv, bytearray(1), 0)
    clock.wait_for_sleepers(1)
    clock.advance(19)
    clock.wait_for_sleepers(1)
    assert not frozen.is_over
    group[0].thaw()
    frozen.result()
    waiting.result()
    run_ranks(group, lambda backend: backend.backend.kill())  # type: ignore[attr-defined]


def test_a_frozen_rank_is_a_timeout_to_the_others_and_finds_its_backend_closed() -> None:
    group = faulty_group(2, FaultTimetable().freeze(rank=0, at=1))
    frozen = Background(group[0].barrier)
    with pytest.raises(OperationTimeoutError):
        group[1].recv(bytearray(1), 0, timeout=0.05)
    close(group)
    with pytest.raises(ChannelClosedError):
        frozen.result()


def test_a_cut_cable_is_silent() -> None:
    group = faulty_group(3, FaultTimetable().cut(rank=0, at=2, peer=1))
    group[0].send(b"1", 1)
    group[0].send(b"2", 2)
    group[2].recv(bytearray(1), 0)
    with pytest.raises(OperationTimeoutError):
        group[1].recv(bytearray(1), 0, timeout=0.05)
    close(group)


def test_an_abort_says_that_it_was_planned() -> None:
    group = faulty_group(2, FaultTimetable().abort(rank=0, at=1))
    with pytest.raises(AbortedError, match=r"by timetable: abort\(rank=0, at=1\)"):
        group[0].send(b"x", 1)
    with pytest.raises(AbortedError) as caught:
        group[1].recv(bytearray(1), 0)
    assert caught.value.peer == 0
    close(group)


PROCESS = """
from ringfort.testing import FaultTimetable, FaultyBackend
from ringfort import TcpBackend
backend = FaultyBackend(TcpBackend(0, 1), FaultTimetable().{fault}(rank=0, at=2), is_process=True)
backend.barrier()
print("one", flush=True)
backend.barrier()
print("two", flush=True)
"""


def test_a_process_is_killed_by_the_kernel() -> None:
    code = PROCESS.format(fault="kill")
    run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert run.returncode == -signal.SIGKILL
    assert run.stdout == "one\n"


def test_a_process_is_frozen_by_the_kernel_and_goes_on_when_it_is_told_to() -> None:
    code = PROCESS.format(fault="freeze")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "one\n"
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == "two\n"
        assert process.wait(60) == 0


# --- the wrapper ------------------------------------------------------------------------------------------------------


def test_a_wrapper_without_faults_changes_nothing() -> None:
    group = faulty_group(3, FaultTimetable())

    def work(backend: FaultyBackend) -> float:
        context = DistributedContext(backend)
        sub = context.sub_group([0, 2])
        if sub is not None:
            assert sub.all_reduce(np.ones(1))[0] == 2
        return float(context.all_reduce(np.array([backend.rank + 1.0]))[0])

    assert run_ranks(group, work) == [6.0, 6.0, 6.0]
    for backend in group:
        assert backend.traffic() == backend.backend.traffic()
        assert (backend.group.comm_id, backend.group.members) == (0, (0, 1, 2))
        assert backend.native() is None
    close(group)


def test_steps_of_sub_groups_over_a_wrapper_count_too() -> None:
    group = faulty_group(3, FaultTimetable().kill(rank=2, at=3))

    def work(backend: FaultyBackend) -> None:
        sub = SubBackend(backend, range(3))
        while True:
            sub.exchange(b"x", (sub.rank + 1) % 3, bytearray(1), (sub.rank - 1) % 3)

    outcomes = run_ranks(group, work)
    assert isinstance(outcomes[2], RankKilled)
    assert all(isinstance(outcome, PeerLostError) and outcome.peer == 2 for outcome in outcomes[:2])
    close(group)


def test_a_wrapper_says_where_it_stands() -> None:
    group = faulty_group(2, FaultTimetable().kill(rank=0, at=3))
    group[0].send(b"x", 1)
    assert repr(group[0]) == "<FaultyBackend of <SimulatedBackend rank 0 of 2> after 1 steps; kill(rank=0, at=3)>"
    assert repr(group[1]).endswith("after 0 steps; no more faults>")
    close(group)
