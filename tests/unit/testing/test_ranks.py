"""Running ranks in threads: what each made of it, and where those stand that hang."""

from __future__ import annotations

import threading

import pytest

from ringfort import SimulatedBackend
from ringfort.errors import AbortedError, InvalidArgumentError, PeerLostError
from ringfort.testing import HangError, at_once, results, run_ranks


def test_each_rank_runs_in_a_thread_of_its_own_and_all_at_once() -> None:
    meeting = threading.Barrier(4)

    def meet(rank: int) -> tuple[int, str]:
        meeting.wait(20)
        return rank * rank, threading.current_thread().name

    assert run_ranks(range(4), meet) == [(rank * rank, f"rank-{rank}") for rank in range(4)]


def test_what_a_rank_raises_is_its_outcome_whatever_it_is() -> None:
    def work(rank: int) -> int:
        if rank == 1:
            raise SystemExit(3)
        return rank

    outcomes = run_ranks(range(3), work)
    assert outcomes[::2] == [0, 2]
    assert isinstance(outcomes[1], SystemExit)


def test_no_ranks_have_no_outcomes() -> None:
    assert run_ranks([], len) == []


def test_ranks_that_hang_are_shown_where_they_stand_and_ended() -> None:
    group = SimulatedBackend.create_group(2)

    def wait_for_godot(backend: SimulatedBackend) -> None:
        if backend.rank == 1:
            backend.recv(bytearray(1), 0)

    with pytest.raises(HangError, match=r"1 ranks have not ended after 0\.1 s") as caught:
        run_ranks(group, wait_for_godot, timeout=0.1)
    assert list(caught.value.stacks) == [1]
    assert "in wait_for_godot" in caught.value.stacks[1]
    assert "rank 1 is at" in str(caught.value)
    run_ranks(group, lambda backend: backend.close())


def test_results_are_what_all_returned() -> None:
    assert results([1, 2]) == [1, 2]


def test_results_raise_the_cause_and_not_its_consequences() -> None:
    cause = ValueError("the cause")
    with pytest.raises(ValueError, match="the cause"):
        results([1, PeerLostError(2, "gone"), AbortedError("enough", peer=2), cause])
    with pytest.raises(PeerLostError):
        results([1, PeerLostError(2, "gone")])


def test_actions_run_at_once() -> None:
    meeting = threading.Barrier(2)
    assert sorted(at_once(lambda: meeting.wait(20), lambda: meeting.wait(20))) == [0, 1]
    with pytest.raises(ZeroDivisionError):
        at_once(lambda: 1, lambda: 1 // 0)
    with pytest.raises(InvalidArgumentError, match="actions"):
        at_once()
