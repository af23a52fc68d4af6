"""What each rank is told, which failure is reported, and how ranks are stopped."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from ringfort.config import Environment
from ringfort.launch import machine_ranks, processes
from ringfort.launch.agreement import Assignment
from ringfort.launch.agreement_messages import Place
from ringfort.launch.machine_ranks import STOP_SECONDS, MachineRanks, rank_variables
from ringfort.launch.processes import LOCAL_REPORT_SECONDS, REMOTE_REPORT_SECONDS, Child, Children
from ringfort.launch.run_options import RunOptions

OPTIONS = RunOptions(script=__file__, name="mine", patience=2.5, max_restarts=3)
WISHES = ("OMP_NUM_THREADS", "PYTHONUNBUFFERED", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WISHES:
        monkeypatch.delenv(name, raising=False)


def assignment(local: int = 2, host: str = "10.0.0.1") -> Assignment:
    return Assignment(3, local, 6, 1, 2, Place(host, 1234, 1235), 1)


def test_a_rank_is_told_its_place_by_torchruns_names() -> None:
    told = rank_variables(assignment(), 1, OPTIONS)
    assert {name: told[name] for name in told if not name.startswith(("TORCH", "ROLE"))} == {
        "RANK": "4",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
        "RINGFORT_MASTER": "10.0.0.1:1235",
        "RINGFORT_PATIENCE": "2.5",
        "RINGFORT_RESTART_COUNT": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
    counts = {"RESTART_COUNT": "1", "MAX_RESTARTS": "3", "RUN_ID": "mine"}
    assert {name: told[f"TORCHELASTIC_{name}"] for name in counts} == counts


def test_ringfort_meets_at_its_own_port_and_leaves_torchs_alone() -> None:
    found = Environment.from_mapping(rank_variables(assignment(host="fd00::1"), 0, OPTIONS))
    assert (found.rank, found.world_size, found.master) == (3, 6, "[fd00::1]:1235")
    assert (found.master_addr, found.master_port) == ("fd00::1", 1234)


def test_a_rank_alone_on_its_machine_may_use_all_cores() -> None:
    assert "OMP_NUM_THREADS" not in rank_variables(assignment(local=1), 0, OPTIONS)


def test_gloo_and_nccl_are_told_the_interface() -> None:
    told = rank_variables(assignment(), 0, OPTIONS, "eth1")
    assert told["GLOO_SOCKET_IFNAME"] == told["NCCL_SOCKET_IFNAME"] == "eth1"


def test_what_a_person_has_set_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WISHES:
        monkeypatch.setenv(name, "mine")
    assert not set(WISHES) & rank_variables(assignment(), 0, OPTIONS, "eth1").keys()


def test_one_rank_of_each_machine_looks_for_plaintext_groups_between_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = ["-X", "ringfort-local-ranks=0:3"]
    monkeypatch.delenv("RINGFORT_ENCRYPTION", raising=False)
    commands = Pretended(monkeypatch, machines=2).commands
    assert [command[1:-1] for command in commands] == [mark, [], []]
    assert [command[1:-1] for command in Pretended(monkeypatch, machines=1).commands] == [[], [], []]
    monkeypatch.setenv("RINGFORT_ENCRYPTION", "off")
    assert [command[1:-1] for command in Pretended(monkeypatch, machines=2).commands] == [[], [], []]


# --- their end --------------------------------------------------------------------------------------------------------


class Pretended(Children):
    """The processes of a machine, which end when the test says so; and the time, which passes when it says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, machines: int = 1) -> None:
        super().__init__()
        self.now = 100.0
        self.commands: list[list[str]] = []
        self.signals: list[int] = []
        for module in (machine_ranks, processes):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.ranks = MachineRanks("here", OPTIONS, children=self)
        place = Place("10.0.0.1", 1234, 1235)
        self.ranks.start(Assignment(0, 3, 3 * machines, 0, machines, place), OPTIONS)

    def start(self, number: int, command: Any, *_: object, **__: object) -> Child:
        process: Any = SimpleNamespace(returncode=None, stdout="", stderr="", pid=7)
        self.commands.append(command)
        self.children.append(Child(number, process, 20))
        return self.children[-1]

    def end(self, number: int, exit_code: int, *tail: str) -> None:
        child = self.children[number]
        child.process.returncode, child.is_over = exit_code, True
        child.tail.extend(tail)
        if exit_code:
            self.failed_at = self.failed_at or self.now
            self.failed.append(child)

    def signal(self, signum: int) -> None:
        self.signals.append(signum)

    def poll(self, timeout: float = 0) -> list[Any]:
        return []

    def reported(self) -> int | None:
        failure = self.ranks.failure()
        return None if failure is None else failure.rank


LOST_ANOTHER = "ringfort.errors.PeerLostError: rank 1 is lost"


def test_a_rank_that_fails_by_itself_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Pretended(monkeypatch)
    assert run.reported() is None
    run.end(1, 3, "ValueError: no")
    assert run.reported() == 1


@pytest.mark.parametrize(("machines", "patience"), [(1, LOCAL_REPORT_SECONDS), (2, REMOTE_REPORT_SECONDS)])
def test_the_one_that_a_victim_lost_is_waited_for(
    machines: int, patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Pretended(monkeypatch, machines)
    run.end(0, 1, LOST_ANOTHER)
    assert run.reported() is None
    run.now += patience - 0.1
    assert run.reported() is None
    run.end(1, -9)
    assert run.reported() == 1


def test_a_victim_is_reported_if_no_other_rank_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Pretended(monkeypatch)
    run.end(0, 1, LOST_ANOTHER)
    assert run.reported() is None
    run.now += LOCAL_REPORT_SECONDS
    assert run.reported() == 0


def test_when_all_of_the_only_machine_have_ended_nobody_else_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for machines, reported in ((1, 0), (2, None)):
        run = Pretended(monkeypatch, machines)
        for number in range(3):
            run.end(number, 1, LOST_ANOTHER)
        assert run.reported() == reported


def test_how_ranks_end_that_were_stopped_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Pretended(monkeypatch)
    run.ranks.stop(signal.SIGINT)
    run.end(0, 1, "KeyboardInterrupt")
    assert run.reported() is None
    assert run.signals == [signal.SIGINT]


def test_what_does_not_stop_is_killed_in_time_however_often_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Pretended(monkeypatch)
    run.ranks.stop()
    run.now += STOP_SECONDS - 0.1
    run.ranks.stop()
    run.ranks.poll()
    assert run.signals == [signal.SIGTERM] * 2
    run.now += 0.1
    run.ranks.poll()
    assert run.signals[2:] == [signal.SIGKILL]
