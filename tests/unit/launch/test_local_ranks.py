"""Local ranks: what they are told, what they report, and that they never outlive their parent."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from ringfort.errors import InvalidArgumentError, InvalidWorldSizeError
from ringfort.launch.local_ranks import LocalRanks, RankFailedError

WORKER = "tests.workers.local_ranks"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    process = psutil.Process()

    def state() -> tuple[int, list[threading.Thread], list[psutil.Process]]:
        return process.num_fds(), threading.enumerate(), process.children(recursive=True)

    before = state()
    yield
    assert state() == before


def collect(name: str, ranks: int, **keywords: Any) -> list[tuple[int, dict[str, Any]]]:
    with LocalRanks(WORKER, ranks, [name], **keywords) as group:
        return list(group.messages())


def test_every_rank_is_told_its_place_and_only_rank_0_gets_the_socket() -> None:
    messages = dict(collect("tell", 3))
    assert sorted(messages) == [0, 1, 2]
    assert [messages[rank]["rank"] for rank in range(3)] == [0, 1, 2]
    assert {message["world_size"] for message in messages.values()} == {3}
    assert len({message["master"] for message in messages.values()}) == 1
    assert messages[0]["master"].startswith("127.0.0.1:")
    assert [messages[rank]["listens"] for rank in range(3)] == [True, False, False]


def test_ranks_have_one_thread_each_and_a_session_of_their_own() -> None:
    [(_, message)] = collect("tell", 1)
    assert message["threads"] == "1"
    assert message["session"]


def test_variables_are_added_and_may_override() -> None:
    [(_, message)] = collect("tell", 1, variables={"EXTRA": "a b=c", "OMP_NUM_THREADS": "2"})
    assert message["extra"] == "a b=c"
    assert message["threads"] == "2"


def test_the_socket_handed_to_rank_0_is_the_one_the_others_reach() -> None:
    assert collect("connect", 2) == [(0, {"heard": "hello"})]


def test_other_output_is_no_message_and_long_or_unended_lines_are_whole() -> None:
    messages = [message for _, message in collect("chatter", 1)]
    assert messages == [{"text": "line\nbreak", "long": "x" * 300_000}, {"unended": True}]


def test_a_failing_rank_stops_the_others_and_is_named_with_its_last_words() -> None:
    with LocalRanks(WORKER, 3, ["fail_one"]) as group, pytest.raises(RankFailedError) as caught:
        list(group.messages())
    assert (caught.value.rank, caught.value.exit_code) == (1, 3)
    assert caught.value.stderr[-2:] == ("first line", "last line")
    assert "rank 1 ended with exit code 3" in str(caught.value)
    assert "last line" in str(caught.value)


def test_the_rank_that_caused_the_failure_is_named_and_not_its_first_victim() -> None:
    with (
        LocalRanks(WORKER, 2, ["victim_first"]) as group,
        pytest.raises(RankFailedError, match="the real cause") as caught,
    ):
        list(group.messages())
    assert caught.value.rank == 1


def test_a_killed_rank_is_named_with_its_signal() -> None:
    with (
        LocalRanks(WORKER, 2, ["kill_one"]) as group,
        pytest.raises(RankFailedError, match="killed by SIGKILL") as caught,
    ):
        list(group.messages())
    assert caught.value.rank == 1


def test_leaving_early_ends_every_rank() -> None:
    with LocalRanks(WORKER, 2, ["wait"]) as group:
        next(group.messages())
        pids = group.pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_rank_that_ignores_sigterm_is_killed() -> None:
    with LocalRanks(WORKER, 1, ["stubborn"]) as group:
        next(group.messages())
        group.stop()
        assert not psutil.pid_exists(group.pids[0])
        group.stop()


def test_ctrl_c_in_the_parent_ends_every_rank() -> None:
    with LocalRanks(WORKER, 2, ["wait"]) as group:
        messages = group.messages()
        next(messages)
        with pytest.raises(KeyboardInterrupt):
            messages.throw(KeyboardInterrupt)
    assert not any(psutil.pid_exists(pid) for pid in group.pids)


def test_ranks_end_when_their_parent_is_killed() -> None:
    with LocalRanks(WORKER, 1, ["nest"]) as parent:
        _, message = next(parent.messages())
        orphans = [psutil.Process(pid) for pid in message["pids"]]
        os.kill(parent.pids[0], signal.SIGKILL)
        gone, alive = psutil.wait_procs(orphans, timeout=10)
    assert len(gone) == 2, alive


@pytest.mark.parametrize("world_size", [0, -1, True])
def test_a_group_has_at_least_one_rank(world_size: int) -> None:
    with pytest.raises(InvalidWorldSizeError):
        LocalRanks(WORKER, world_size)


def test_a_module_must_be_named() -> None:
    with pytest.raises(InvalidArgumentError, match="module"):
        LocalRanks("", 1)


def test_a_module_that_does_not_exist_is_said() -> None:
    with LocalRanks("ringfort.no_such_module", 1) as group, pytest.raises(RankFailedError, match="no_such_module"):
        list(group.messages())
