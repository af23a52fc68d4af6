"""`ringfort run` with real processes: on this machine, between launchers of one machine, and across hosts."""

from __future__ import annotations

import codecs
import json
import os
import platform
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest

from ringfort.identity.namespace import NetworkNamespace
from tests.helpers.namespaces import Host, Lan, lan, needs_namespaces
from tests.helpers.terminal import Screen

ROOT = Path(__file__).parents[2]
WORKER = str(ROOT / "tests" / "workers" / "run.py")
TORCH_WORKER = str(ROOT / "tests" / "workers" / "torch_program.py")
EMPTY: Mapping[str, str] = MappingProxyType({})
PATIENCE = 60.0
"""Seconds for a launcher to do what takes one or two; the machines that run this are shared."""


class Launcher:
    """A `ringfort run` with pipes for all it says."""

    def __init__(
        self, *arguments: str, host: Host | None = None, stdin: str | None = None, variables: Mapping[str, str] = EMPTY
    ) -> None:
        command = [sys.executable, "-m", "ringfort.cli", "run", *arguments]
        self.process = subprocess.Popen(
            command if host is None else host.command(*command),
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
                "RINGFORT_INTERFACES": "127.0.0.1" if host is None else "eth0",
                **variables,
            },
        )
        self._stdin = stdin

    def line(self) -> str:
        """The next line of standard output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def pids(self, ranks: int) -> list[int]:
        """The processes that `ranks` ranks say they are, each with those it started."""
        return [int(pid) for _ in range(ranks) for pid in self.line().split("pids")[1].split()]

    def end(self) -> tuple[int, str, str]:
        """Waits for its end: exit code, standard output, standard error."""
        out, err = self.process.communicate(self._stdin, timeout=PATIENCE)
        return self.process.returncode, out, err


@contextmanager
def launched(*launchers: Launcher) -> Iterator[None]:
    """Nobody is left afterwards, whatever a test does."""
    try:
        yield
    finally:
        for launcher in launchers:
            launcher.process.kill()
            launcher.process.communicate()


def run(*arguments: str, stdin: str | None = None) -> tuple[int, str, str]:
    launcher = Launcher(*arguments, stdin=stdin)
    with launched(launcher):
        return launcher.end()


def pair(arguments: Sequence[str], *others: str, nodes: str = "2") -> tuple[Launcher, Launcher]:
    """Two launchers on this machine, as if on two: the second runs `others` if given."""
    options = ("--nodes", nodes, "--timeout", "30")
    return Launcher(*options, *arguments), Launcher(*options, *(others or arguments))


def ends(*launchers: Launcher) -> list[tuple[int, str, str]]:
    """The ends of all. Read at once: one that nobody listens to would wait, and with it the rest."""
    with ThreadPoolExecutor(len(launchers)) as readers:
        return list(readers.map(Launcher.end, launchers))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def are_gone(pids: Sequence[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


# --- one machine ------------------------------------------------------------------------------------------------------


def test_three_ranks_of_one_machine_meet_twice_and_each_line_names_its_rank() -> None:
    code, out, err = run("-n", "3", WORKER, "tell", "-n", "--x")
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[{rank}] told {rank} 3 0 1 sum 6 arguments -n --x" for rank in range(3)]


def test_a_module_can_be_run_too() -> None:
    code, out, _ = run("-n", "2", "-m", "tests.workers.run", "tell")
    assert code == 0
    assert len(out.splitlines()) == 2


def test_a_program_that_wants_more_peers_than_there_are_is_told_so() -> None:
    code, _, err = run("-n", "1", WORKER, "join")
    assert code == 1
    assert "min_peers=1: `ringfort run` has started only 1 rank;" in err


def test_when_one_rank_fails_all_are_stopped_and_it_is_named_with_its_last_words() -> None:
    code, _, err = run("-n", "3", WORKER, "fail")
    assert code == 3
    summary = err[err.index("ringfort run:") :]
    assert summary.startswith("ringfort run: rank 1 failed first: it ended with exit code 3")
    assert summary.rstrip().endswith("the real cause")


def test_a_rank_that_is_killed_is_named_with_its_signal() -> None:
    code, _, err = run("-n", "2", WORKER, "kill")
    assert code == 128 + signal.SIGKILL
    assert "rank 1 failed first: it was killed by SIGKILL; stopped 1 other here" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_is_passed_on_and_ends_all(number: signal.Signals) -> None:
    launcher = Launcher("-n", "2", WORKER, "wait")
    with launched(launcher):
        pids = launcher.pids(2)
        launcher.process.send_signal(number)
        code, _, err = launcher.end()
        assert code == 128 + number
        assert f"{number.name} on" in err
        assert ("KeyboardInterrupt" in err) is (number == signal.SIGINT)
        wait_until(lambda: are_gone(pids))


def test_ranks_may_have_a_last_word() -> None:
    launcher = Launcher("-n", "1", WORKER, "careful")
    with launched(launcher):
        launcher.pids(1)
        launcher.process.terminate()
        code, out, _ = launcher.end()
    assert (code, out) == (128 + signal.SIGTERM, "[0] saved\n")


def test_a_second_ctrl_c_kills() -> None:
    launcher = Launcher("-n", "2", WORKER, "stubborn")
    with launched(launcher):
        pids = launcher.pids(2)
        before = time.monotonic()
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.process.stderr is not None
        assert "Ctrl-C again" in launcher.process.stderr.readline()
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.end()[0] == 128 + signal.SIGINT
        assert time.monotonic() - before < 8, "they were not killed before their grace was over"
        wait_until(lambda: are_gone(pids))


def test_a_launcher_that_is_killed_leaves_nobody_behind() -> None:
    launcher = Launcher("-n", "2", WORKER, "wait")
    with launched(launcher):
        pids = launcher.pids(2)
        assert len(pids) == 4
        launcher.process.kill()
        wait_until(lambda: are_gone(pids))


def test_what_is_piped_in_goes_to_the_first_rank() -> None:
    code, out, _ = run("-n", "2", WORKER, "listen", stdin="a word\n")
    assert code == 0
    assert sorted(out.splitlines()) == ["[0] heard 'a word\\n'", "[1] heard ''"]


def test_in_a_terminal_progress_bars_show_live_one_for_each_rank(tmp_path: Path) -> None:
    pytest.importorskip("tqdm")
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    ours, theirs = pty.openpty()
    screen, text = Screen(), codecs.getincrementaldecoder("utf-8")()
    launcher = subprocess.Popen(
        [sys.executable, "-m", "ringfort.cli", "run", "-n", "2", WORKER, "bars", str(fifo)],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "TERM": "xterm", "NO_COLOR": "1"},
    )
    os.close(theirs)

    def shows(rows: Sequence[str]) -> bool:
        """Reads on, until all of `rows` stand on the screen or nothing more comes."""
        while not all(any(row.startswith(wanted) for row in screen.rows) for wanted in rows):
            try:
                screen.feed(text.decode(os.read(ours, 65536)))
            except OSError:  # Linux says so when the other side has closed
                return False
        return True

    try:
        with launcher:
            assert shows(["[0] half way", "[0] train:  50%", "[1] train:  50%"]), screen.rows
            fifo.write_text("go")
            assert shows(["[0] train: 100%", "[1] train: 100%"]), screen.rows
            assert not shows(["more"])
            assert launcher.wait(PATIENCE) == 0
    finally:
        launcher.kill()
        os.close(ours)
    assert [row[:15] for row in screen.rows[:1]] == ["[0] half way"]
    assert sorted(row[:15] for row in screen.rows[1:]) == ["", "[0] train: 100%", "[1] train: 100%"]


def test_in_a_pipe_a_progress_bar_is_its_last_state(tmp_path: Path) -> None:
    pytest.importorskip("tqdm")
    (tmp_path / "go").touch()
    code, out, err = run("-n", "2", WORKER, "bars", str(tmp_path / "go"))
    assert (code, out) == (0, "[0] half way\n"), err
    lines = err.splitlines()
    assert sorted(line[:15] for line in lines if "100%" in line) == ["[0] train: 100%", "[1] train: 100%"]
    assert all("100%" in line or " 50%" in line for line in lines)


def test_when_nobody_reads_any_more_the_ranks_are_stopped() -> None:
    launcher = Launcher(WORKER, "talk")
    with launched(launcher):
        assert launcher.process.stdout is not None
        launcher.line()
        launcher.process.stdout.close()
        assert launcher.process.wait(PATIENCE) == 128 + signal.SIGPIPE


def test_torch_and_ringfort_meet_in_one_program_and_do_not_fight_for_a_port(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "both.py"
    script.write_text(
        "import numpy, torch, torch.distributed as dist, ringfort\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1)\n"
        "dist.all_reduce(x)\n"
        "with ringfort.init() as ctx:\n"
        "    print(int(x), *ctx.all_reduce(numpy.ones(1, int)))\n"
        "dist.destroy_process_group()\n"
    )
    code, out, err = run("-n", "2", str(script))
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[0] 2 2", "[1] 2 2"]


# --- several launchers ------------------------------------------------------------------------------------------------


def test_two_launchers_find_each_other_and_share_out_the_ranks() -> None:
    one, other = pair(["-n", "2", WORKER, "tell"], "-n", "1", WORKER, "tell")
    with launched(one, other):
        found = ends(one, other)
    assert [code for code, _, _ in found] == [0, 0], found
    lines = "".join(out for _, out, _ in found)
    assert sorted(re.findall(r"\[(\d)\] told \d \d \d 2 sum 6", lines)) == ["0", "1", "2"]
    assert sorted(re.findall(r"told \d \d (\d)", lines)) in (["0", "0", "1"], ["0", "1", "1"])
    assert "starting 3 ranks on 2 machines" in found[0][2]


def test_a_failure_on_one_machine_ends_all_with_its_code_and_words() -> None:
    one, other = pair([WORKER, "fail"])
    with launched(one, other):
        for code, _, err in ends(one, other):
            assert code == 3, err
            assert "rank 1 failed first: it ended with exit code 3" in err
            assert err.rstrip().endswith("    the real cause")


def test_ctrl_c_on_one_machine_ends_all() -> None:
    one, other = pair([WORKER, "wait"])
    with launched(one, other):
        pids = one.pids(1) + other.pids(1)
        one.process.send_signal(signal.SIGINT)
        for code, _, err in ends(one, other):
            assert code == 128 + signal.SIGINT
            assert "SIGINT on" in err
        wait_until(lambda: are_gone(pids))


def test_after_a_crash_all_machines_start_again_and_finish_each_with_logs_of_its_own(tmp_path: Path) -> None:
    one, other = pair(["--max-restarts", "1", "--log-dir", str(tmp_path), WORKER, "crash_once"])
    with launched(one, other):
        found = ends(one, other)
    for code, _, err in found:
        assert code == 0, err
        assert "failed first: it was killed by SIGKILL" in err
        assert "starting again, 1 of 1" in err
    lines = "".join(out for _, out, _ in found)
    assert sorted(lines.splitlines()) == [f"[{rank}] restarts 1 1 1 sum 3" for rank in range(2)]
    names = {f"rank-{rank}.{platform.node()}" for rank in range(2)}
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{name}{restart}.log" for name in names for restart in ("", ".restart-1")
    }
    assert {(tmp_path / f"{name}.restart-1.log").read_text() for name in names} == {"restarts 1 1 1 sum 3\n"}


def test_one_machine_alone_starts_again_and_gives_up_after_the_last_restart() -> None:
    code, _, err = run("-n", "2", "--max-restarts", "1", WORKER, "kill")
    assert code == 128 + signal.SIGKILL
    assert err.count("rank 1 failed first: it was killed by SIGKILL") == 2
    assert "starting again, 1 of 1" in err


def test_ctrl_c_does_not_start_again() -> None:
    launcher = Launcher("-n", "1", "--max-restarts", "3", WORKER, "wait")
    with launched(launcher):
        launcher.pids(1)
        launcher.process.send_signal(signal.SIGINT)
        code, _, err = launcher.end()
    assert code == 128 + signal.SIGINT
    assert "starting again" not in err


def test_a_second_run_is_told_of_the_first_and_one_of_another_name_goes_on_beside_it(tmp_path: Path) -> None:
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    one, other = pair([WORKER, "follow", str(fifo)])
    with launched(one, other):
        one.pids(1)
        other.pids(1)
        second = Launcher("--nodes", "2", WORKER, "follow", str(fifo))
        third, fourth = pair(["--name", "beside", WORKER, "tell"])
        with launched(second, third, fourth):
            late, *beside = ends(second, third, fourth)
        assert late[0] == 1
        assert "the run 'run.py' started at" in late[2]
        assert "start another run with --name" in late[2]
        assert [code for code, _, _ in beside] == [0, 0], beside
        fifo.write_text("go")
        assert [code for code, _, _ in ends(one, other)] == [0, 0]


def test_a_launcher_that_dies_ends_the_run_on_the_other_machine_too() -> None:
    one, other = pair([WORKER, "wait"])
    with launched(one, other):
        pids = one.pids(1) + other.pids(1)
        one.process.kill()
        code, _, err = other.end()
        assert code == 1
        assert "is gone" in err
        wait_until(lambda: are_gone(pids))


def test_when_nobody_comes_it_says_what_to_try() -> None:
    code, out, err = run("--nodes", "2", "--timeout", "2", WORKER, "tell")
    assert (code, out) == (1, "")
    assert "error: Exceeded the timeout of 2 s: waiting for 2 machines\n  no other peer was seen\n" in err
    assert "ringfort doctor" in err
    assert "at least" not in err  # how many it waits for is said once, at the start


@needs_namespaces
def test_machines_of_two_clusters_are_told_long_before_the_time_is_up() -> None:
    with lan(2) as net:
        both = [
            Launcher(
                "--nodes", "2", "--timeout", "300", WORKER, "tell", host=host,
                variables={"RINGFORT_KEY": NetworkNamespace.generate("home").join_code()},
            )
            for host in net.hosts
        ]  # fmt: skip
        with launched(*both):
            for launcher, other in zip(both, reversed(net.hosts), strict=True):
                assert launcher.process.stderr is not None
                said = ""
                while f"1 machine of another cluster announces itself here ({other.address()})" not in said:
                    said = launcher.process.stderr.readline()
                    assert said, "it ended without a word about the other cluster"
                assert "`ringfort key join CODE` on the others" in launcher.process.stderr.readline()


def test_a_signal_before_the_start_ends_only_this_launcher() -> None:
    launcher = Launcher("--nodes", "2", WORKER, "tell")
    with launched(launcher):
        assert launcher.process.stderr is not None
        assert "waiting for 2 machines" in launcher.process.stderr.readline()
        launcher.process.terminate()
        assert launcher.end()[0] == 128 + signal.SIGTERM


def peers(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "ringfort.cli", "peers", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "RINGFORT_INTERFACES": "127.0.0.1"},
    )
    return done.returncode, done.stdout, done.stderr


def test_peers_shows_a_run_and_does_not_disturb_it(tmp_path: Path) -> None:
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    one, other = pair([WORKER, "follow", str(fifo)])
    with launched(one, other):
        one.pids(1)
        other.pids(1)
        code, out, err = peers("--json", "--seconds", "2")
        assert code == 0, err
        found = json.loads(out)["peers"]
        assert [peer["ranks"] for peer in found] == [[0], [1]]
        assert sorted(peer["role"] for peer in found) == ["leader", "member"]
        assert [peer["step"] for peer in found] == [3, 3]
        assert {peer["interface"] for peer in found} == {"lo"}
        assert all(0 < peer["round_trip_seconds"] < 10 for peer in found)
        fifo.write_text("go")
        assert [code for code, _, _ in ends(one, other)] == [0, 0]


def test_peers_says_what_to_try_when_nobody_is_there() -> None:
    code, out, err = peers("--seconds", "0.5")
    assert (code, out) == (1, "")
    assert "no other peer was seen\n" in err
    assert "ringfort doctor" in err


def listeners(pid: int) -> set[str]:
    """The TCP sockets on which a process listens, as the kernel of Linux numbers them; empty on other systems."""
    listening = {
        fields[9]
        for table in (Path(f"/proc/{pid}/net/{name}") for name in ("tcp", "tcp6"))
        if table.exists()
        for fields in map(str.split, table.read_text().splitlines())
        if fields[3] == "0A"
    }
    opened = {str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()} if listening else set[str]()
    return {number for number in listening if f"socket:[{number}]" in opened}


def test_peers_watch_ends_well_by_ctrl_c() -> None:
    watch = subprocess.Popen(
        [sys.executable, "-m", "ringfort.cli", "peers", "--watch", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "RINGFORT_INTERFACES": "127.0.0.1"},
    )
    assert watch.stdout is not None
    with watch:
        assert json.loads(watch.stdout.readline())["peers"] == []
        assert listeners(watch.pid) == set()  # a viewer connects to others, and nobody to it
        watch.send_signal(signal.SIGINT)
        watch.communicate(timeout=PATIENCE)
    assert watch.returncode == 0


# --- hosts ------------------------------------------------------------------------------------------------------------


def on_all(net: Lan, home: Path, *arguments: str) -> list[Launcher]:
    """The same typed on every host. Each has a key of its own, and all have the cluster's."""
    key = NetworkNamespace.generate("home").join_code()
    return [
        Launcher(
            "--nodes",
            str(len(net.hosts)),
            *arguments,
            host=host,
            variables={"RINGFORT_KEY": key, "RINGFORT_HOME": str(home / host.namespace)},
        )
        for host in net.hosts
    ]


@needs_namespaces
@pytest.mark.parametrize(("script", "needs"), [(WORKER, "numpy"), (TORCH_WORKER, "torch")], ids=["ringfort", "torch"])
def test_three_hosts_train_to_the_end(script: str, needs: str, tmp_path: Path) -> None:
    pytest.importorskip(needs)
    with lan(3) as net:
        launchers = on_all(net, tmp_path, script, "train")
        with launched(*launchers):
            found = ends(*launchers)
    assert [code for code, _, _ in found] == [0, 0, 0], found
    assert sorted(out for _, out, _ in found) == [f"[{rank}] error 0.000000\n" for rank in range(3)]


@needs_namespaces
def test_a_host_that_is_cut_off_ends_the_run_everywhere(tmp_path: Path) -> None:
    with lan(3) as net:
        launchers = on_all(net, tmp_path, "--patience", "2", WORKER, "wait")
        with launched(*launchers):
            for launcher in launchers:
                launcher.pids(1)
            net.cut(net.hosts[1])
            for code, _, err in ends(*launchers):
                assert code == 1
                assert "is gone: silent for" in err


@needs_namespaces
def test_a_link_that_is_down_for_two_seconds_ends_nothing(tmp_path: Path) -> None:
    with lan(2) as net:
        launchers = on_all(net, tmp_path, WORKER, "work", str(tmp_path / "go"))
        with launched(*launchers):
            for launcher in launchers:
                launcher.pids(1)
            net.cut(net.hosts[1])
            time.sleep(2.0)  # the fault itself
            net.heal(net.hosts[1])
            (tmp_path / "go").touch()
            found = ends(*launchers)
    assert [code for code, _, _ in found] == [0, 0], found
