"""`ringfort run --elastic` with real processes of this machine."""

from __future__ import annotations

import os
import platform
import re
import signal
from pathlib import Path
from urllib.request import urlopen

from tests.cluster.test_run import Launcher, launched, wait_until

HOST0, HOST1 = (f"{rank}.{platform.node()}" for rank in (0, 1))
WORKER = str(Path(__file__).parents[1] / "workers" / "run_elastic.py")


def run(*arguments: str) -> tuple[int, str, str]:
    launcher = Launcher("--elastic", *arguments)
    with launched(launcher):
        return launcher.end()


def test_a_rank_that_kills_itself_is_started_again_joins_the_run_and_no_sample_is_lost_or_counted_twice(
    tmp_path: Path,
) -> None:
    options = ("-n", "2", "--nodes", "2", "--patience", "3", "--log-dir", str(tmp_path))
    code, out, err = run(*options, WORKER, "train")
    assert code == 0, err
    found = sorted(re.findall(r"\[(\d)\] sum (\d+) expected (\d+) restarts (\d)", out))
    assert [(rank, restarts) for rank, _, _, restarts in found] == [("0", "0"), ("1", "1")], out + err
    assert {(total, expected) for _, total, expected, _ in found} == {(found[0][1], found[0][1])}, out
    contradiction = "nodes='2:4': contradicts RINGFORT_ELASTIC_NODES=2, which `ringfort run --elastic --nodes` sets"
    assert contradiction in out
    assert re.search(r"started rank 0 \(pid \d+\) and rank 1 \(pid \d+\) of run_elastic.py with --nodes 2", err)
    assert re.search(r"rank 1 was killed by SIGKILL after .* s; starting it again in 0.5 s, restart 1 of 3", err)
    assert re.search(r"started rank 1 again \(pid \d+\), restart 1 of 3", err)
    assert re.search(r"\[0\] .* joined, .* left: 2 members from step \d+; .* s without a sealed step", err)
    assert not re.search(r"\[1\] .*(is sealed by|Copied the state)", err)  # one rank of a machine says what happens
    assert "never called" not in err
    logs = {name: (tmp_path / f"rank-{name}.log").read_text() for name in (HOST0, HOST1, f"{HOST1}.restart-1")}
    assert {name for name, text in logs.items() if "\nsum " in f"\n{text}"} == {HOST0, f"{HOST1}.restart-1"}


def test_a_script_that_never_calls_elastic_just_runs_and_that_is_said_at_the_end() -> None:
    code, out, err = run("-n", "2", WORKER, "alone")
    assert (code, sorted(out.splitlines())) == (0, ["[0] alone", "[1] alone"])
    assert err.splitlines()[-1].endswith("run_elastic.py never called ringfort.elastic(): its 2 ranks ran alone")


def test_sigterm_is_passed_on_and_ranks_that_leave_well_end_the_launcher_well() -> None:
    launcher = Launcher("--elastic", "-n", "2", WORKER, "leave")
    with launched(launcher):
        launcher.pids(2)
        launcher.process.send_signal(signal.SIGTERM)
        code, out, err = launcher.end()
    assert (code, sorted(out.splitlines())) == (0, ["[0] left", "[1] left"]), err
    assert "again" not in err


def ranks_of(url: str) -> list[tuple[str, str]]:
    """The ranks of this machine in the metrics of the run `mine`, each with its steps."""
    with urlopen(url) as answer:
        text = answer.read().decode()
    return re.findall(rf'^ringfort_steps_total\{{host="{platform.node()}",rank="(\d)",run="mine"\}} (\d+)', text, re.M)


def test_a_rank_that_is_sent_sigterm_alone_leaves_and_is_not_started_again_while_metrics_tell_of_both() -> None:
    launcher = Launcher("--elastic", "-n", "2", "--name", "mine", "--metrics-port", "0", WORKER, "asked")
    with launched(launcher):
        assert launcher.process.stderr is not None
        first = launcher.process.stderr.readline()
        (pid,) = launcher.pids(1)
        url = first.removeprefix("ringfort run: metrics for Prometheus are at ").strip()
        wait_until(lambda: [int(steps) > 0 for _, steps in ranks_of(url)] == [True, True])
        os.kill(pid, signal.SIGTERM)
        code, out, err = launcher.end()
    assert (code, out.splitlines()) == (0, ["[0] alone again"]), err
    assert re.search(r"rank 1 was ended by SIGTERM after .* s; 1 other here continues", err)
    assert "(it leaves) left: 1 member from step" in err
    assert "again" not in err
