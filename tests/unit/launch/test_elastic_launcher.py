"""`ringfort run --elastic`: what each rank is told, and when it is started again. Time and processes are pretended."""

from __future__ import annotations

import io
import signal
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from ringfort.config import Environment
from ringfort.errors import DistributedError
from ringfort.launch import elastic_launcher, machine_ranks, run_watch
from ringfort.launch.elastic_launcher import FOLLOW_SECONDS, LEAVE_SECONDS, member_variables
from ringfort.launch.printer import Printer
from ringfort.launch.processes import Child, Children
from ringfort.launch.run_options import ElasticOptions
from ringfort.launch.run_watch import RunWatch
from ringfort.training.elastic.launched import MACHINE

FAILED = "ValueError: the shard is empty"


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "PYTHONUNBUFFERED", "RINGFORT_PATIENCE", "RINGFORT_MASTER"):
        monkeypatch.delenv(name, raising=False)


def options(**given: Any) -> ElasticOptions:
    return ElasticOptions(script=__file__, **given)


def test_a_rank_is_told_what_was_typed() -> None:
    typed = options(
        nodes="2:8", name="mine", patience=2.5, peers=["a", "b:1"], interfaces=["eth0"], restart_without=["shed"]
    )
    told = Environment.from_mapping(member_variables(typed, 0, 0, Path("/tmp/mark"), 4000))
    assert (told.elastic_nodes, told.elastic_name, told.patience) == ("2:8", "mine", 2.5)
    assert (told.peers, told.interfaces, told.restart_without) == (("a", "b:1"), ("eth0",), ("shed",))
    assert told.elastic_file == "/tmp/mark"
    assert (told.rank, told.world_size, told.master) == (0, 1, None)


def test_what_was_not_typed_stays_as_it_is() -> None:
    assert member_variables(options(local=2), 1, 3, None, 4000) == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4000",
        "RINGFORT_RESTART_COUNT": "3",
        "RINGFORT_ELASTIC_FILE": "",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }


def test_a_place_from_another_launcher_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("RINGFORT_MASTER", "10.0.0.1:1")
    told = member_variables(options(), 0, 0, None, 4000)
    assert (told["RANK"], told["RINGFORT_MASTER"]) == ("0", "")
    assert "GROUP_RANK" not in told


class Pretended(Children):
    """A machine whose processes and whose clock do what the test's timetable says.

    `lives` are the processes of each rank in turn: for how many seconds each lives and its exit code; those without an
    exit code end by a signal alone.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *lives: list[tuple[float, int | None]],
        signals: Mapping[float, signal.Signals] | None = None,
        mark: Path | None = None,
        **given: Any,
    ) -> None:
        super().__init__()
        self.now = 100.0
        self.starts: list[tuple[int, float]] = []
        self.sent: list[int] = []
        self.cannot_start = 0
        self._lives = [iter(life) for life in lives]
        self._ends: dict[Child, tuple[float, int | None]] = {}
        self._signals = dict(signals or {})
        clock = SimpleNamespace(monotonic=lambda: self.now, strftime=lambda _: "12:00:00")
        for module in (elastic_launcher, machine_ranks):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(
            elastic_launcher, "MachineRanks", lambda *args: machine_ranks.MachineRanks(*args, children=self)
        )
        self.inbox: SimpleQueue[signal.Signals] = SimpleQueue()
        self.err = io.TextIOWrapper(io.BytesIO(), write_through=True)
        printer = Printer(io.TextIOWrapper(io.BytesIO()), self.err, lambda: self.now)
        typed = options(local=len(lives), **given)
        watch = RunWatch(typed, printer)
        self.launcher = elastic_launcher._ElasticLauncher(typed, printer, self.inbox, mark, watch)
        watch.close()

    def run(self) -> tuple[int, list[str]]:
        """The exit code, and what the launcher says after its first line."""
        code = self.launcher.run()
        self.launcher.watch.logs.close()
        self.err.seek(0)
        return code, [line.removeprefix("ringfort run: 12:00:00 ") for line in self.err.read().splitlines()[1:]]

    def start(self, number: int, *_: object, **__: object) -> Child:
        if self.starts and self.cannot_start:
            self.cannot_start -= 1
            raise DistributedError("cannot start python: out of memory")
        process: Any = SimpleNamespace(returncode=None, stdout="", stderr="", pid=7)
        child = Child(number, process, 20)
        lived, code = next(self._lives[number])
        self._ends[child] = (self.now + lived, code)
        self.children.append(child)
        self.starts.append((number, self.now - 100.0))
        return child

    def poll(self, timeout: float = 0) -> list[Any]:
        self.now += 0.25
        for at in [at for at in self._signals if self.now >= 100.0 + at]:
            self.inbox.put(self._signals.pop(at))
        for child, (at, code) in list(self._ends.items()):
            if code is not None and self.now >= at:
                self._end(child, code)
        return []

    def _end(self, child: Child, code: int) -> None:
        child.process.returncode, child.is_over = code, True
        if code > 0:
            child.tail.append(FAILED if code != 2 else "usage: train.py [-h]")
        del self._ends[child]

    def forget(self, child: Child) -> None:
        self.children.remove(child)

    def signal(self, signum: int) -> None:
        self.sent.append(signum)
        for child, (_, code) in list(self._ends.items()):
            if signum == signal.SIGKILL:
                self._end(child, -signum)
            elif code is not None:
                self._end(child, code)

    def close(self) -> None:
        self._selector.close()


def test_a_rank_that_crashes_is_started_again_later_each_time_and_the_others_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Pretended(monkeypatch, [(50, 0)], [(1, -9), (1, 3), (1, 0)])
    code, said = machine.run()
    assert code == 0
    assert machine.starts == [(0, 0), (1, 0), (1, 1.5), (1, 3.5)]
    assert said == [
        "rank 1 was killed by SIGKILL after 1.0 s; starting it again in 0.5 s, restart 1 of 3",
        "started rank 1 again (pid 7), restart 1 of 3",
        f"rank 1 ended with exit code 3 after 1.0 s ({FAILED}); starting it again in 1 s, restart 2 of 3",
        "started rank 1 again (pid 7), restart 2 of 3",
    ]


def test_each_start_of_a_rank_has_a_log_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run_watch, "platform", SimpleNamespace(node=lambda: "study"))
    Pretended(monkeypatch, [(9, 0)], [(1, -9), (1, 3), (1, 0)], log_dir=str(tmp_path)).run()
    names = ("rank-0.study", "rank-1.study", "rank-1.study.restart-1", "rank-1.study.restart-2")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{name}.log" for name in names)


def test_after_the_last_restart_the_others_continue_and_the_exit_code_is_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Pretended(monkeypatch, [(50, 0)], [(1, 3), (1, 3)], max_restarts=1)
    code, said = machine.run()
    assert code == 3
    assert said[2:] == [
        "rank 1 ended with exit code 3 after 1.0 s; 1 of 1 restarts are used; 1 other here continues",
        "its last lines:",
        f"    {FAILED}",
        "failed: rank 1; 1 ended well",
    ]
    assert machine.now >= 150


@pytest.fixture
def one_member(tmp_path: Path) -> Path:
    """The mark of a program whose ranks are one member."""
    path = tmp_path / "mark"
    path.write_bytes(MACHINE)
    return path


def test_ranks_that_are_one_member_are_started_again_together(
    monkeypatch: pytest.MonkeyPatch, one_member: Path
) -> None:
    machine = Pretended(monkeypatch, [(3, 1), (9, 0)], [(1, -9), (9, 0)], mark=one_member)
    code, said = machine.run()
    assert code == 0
    crash = "rank 1 was killed by SIGKILL after 1.0 s; starting all 2 ranks, which are one member, again in 0.5 s, "
    assert said == [
        f"{crash}restart 1 of 3",
        "started rank 0 again (pid 7), restart 1 of 3",
        "started rank 1 again (pid 7), restart 1 of 3",
    ]
    assert machine.starts == [(0, 0), (1, 0), (0, 3.25), (1, 3.25)]  # not before both have ended
    assert machine.sent == []


def test_a_rank_that_does_not_follow_its_member_is_killed(monkeypatch: pytest.MonkeyPatch, one_member: Path) -> None:
    machine = Pretended(monkeypatch, [(90, 1)], [(1, 3)], mark=one_member, max_restarts=0)
    code, said = machine.run()
    assert (code, machine.sent, machine.now) == (3, [signal.SIGKILL], 101.0 + FOLLOW_SECONDS)
    crash = "rank 1 ended with exit code 3 after 1.0 s; 0 of 0 restarts are used; the others here are one member"
    assert said == [
        f"{crash} with it, and end",
        "its last lines:",
        f"    {FAILED}",
    ]


def test_a_usage_error_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = Pretended(monkeypatch, [(1, 2)]).run()
    assert code == 2
    assert said[0] == "rank 0 ended with exit code 2 after 1.0 s; a restart would not help"


def test_a_restart_that_the_system_refuses_counts_as_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Pretended(monkeypatch, [(1, -9), (1, 0)])
    machine.cannot_start = 1
    code, said = machine.run()
    assert code == 0
    assert "(cannot start python: out of memory); starting it again in 1 s, restart 2 of 3" in said[1]


@pytest.mark.parametrize("code", [143, -signal.SIGTERM, 130, -signal.SIGINT])
def test_a_rank_that_was_asked_to_end_is_not_started_again_and_the_others_decide_the_exit_code(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Pretended(monkeypatch, [(50, 0)], [(5, code)])
    name = "SIGTERM" if code in (143, -signal.SIGTERM) else "SIGINT"
    assert machine.run() == (0, [f"rank 1 was ended by {name} after 5.0 s; 1 other here continues"])
    assert len(machine.starts) == 2


def test_a_machine_whose_ranks_were_all_asked_to_end_did_not_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = Pretended(monkeypatch, [(20, 143)], [(5, 143)]).run()
    assert code == 128 + signal.SIGTERM
    assert said == [
        "rank 1 was ended by SIGTERM after 5.0 s; 1 other here continues",
        "rank 0 was ended by SIGTERM after 20 s",
    ]


def test_a_crash_beside_a_rank_that_was_asked_to_end_is_what_the_exit_code_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, said = Pretended(monkeypatch, [(20, 3)], [(5, 143)], [(30, 0)], max_restarts=0).run()
    assert code == 3
    assert said[-1] == "failed: rank 0; 2 ended well"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP], ids=lambda signum: signum.name)
def test_ranks_that_leave_well_after_sigterm_are_a_good_end(
    signum: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Pretended(monkeypatch, [(50, 0)], [(50, 0)], signals={5: signum})
    assert machine.run() == (0, [])
    assert machine.sent == [signal.SIGTERM]


def test_ranks_that_do_not_are_reported_with_the_signal_and_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Pretended(monkeypatch, [(50, 0)], [(50, 1)], signals={5: signal.SIGTERM})
    code, said = machine.run()
    assert code == 128 + signal.SIGTERM
    assert said[-1].startswith("SIGTERM on ")
    assert len(machine.starts) == 2


def test_a_rank_that_waits_for_its_restart_does_not_start_after_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Pretended(monkeypatch, [(1, -9)], signals={1.25: signal.SIGINT})
    assert machine.run()[0] == 128 + signal.SIGINT
    assert len(machine.starts) == 1


def test_a_second_ctrl_c_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Pretended(monkeypatch, [(0, None)], signals={5: signal.SIGINT, 6: signal.SIGINT})
    code, said = machine.run()
    assert code == 128 + signal.SIGINT
    assert "press Ctrl-C again" in said[0]
    assert (machine.sent, machine.now) == ([signal.SIGINT, signal.SIGKILL], 106)


def test_a_rank_that_does_not_leave_is_killed_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Pretended(monkeypatch, [(0, None)], signals={5: signal.SIGTERM})
    assert machine.run()[0] == 128 + signal.SIGTERM
    assert machine.sent == [signal.SIGTERM, signal.SIGKILL]
    assert machine.now == 105 + LEAVE_SECONDS
