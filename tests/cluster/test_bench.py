"""`ringfort bench` as people run it: real processes from start to end."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ringfort.bench.engines import ENGINES, OTHERS
from ringfort.bench.options import MAX_ROUNDS, MIN_ROUNDS, OPS, Options
from ringfort.bench.results import Row
from ringfort.bench.runner import MAX_BURST, all_workers

RINGFORT = [sys.executable, "-m", "ringfort.cli"]
SMALL = ("--repeat", "3", "--sizes", "4,5000", "--ranks", "2")
QUICK = ("--repeat", "3", "--sizes", "4,5000", "--ranks", "2,3")
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
BESIDE = tuple(name for name in ("gloo", "openmpi-shm") if ENGINES[name].available())


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RINGFORT, "bench", *arguments], capture_output=True, text=True, timeout=100, check=False)


def bench_json(*arguments: str) -> Any:
    done = bench(*arguments, "--json", "-")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@cache
def rows_of_every_operation(ranks: int, against: tuple[str, ...]) -> dict[str, list[Row]]:
    """All operations in one set of processes: starting them takes longer than measuring."""
    options = Options(sizes=(4, 5000), ranks=(ranks,), against=against, repeat=3)
    with all_workers(options, ranks) as schedule:
        found = {op: [schedule.measure(case, ignore) for case in replace(options, op=op).cases(ranks)] for op in OPS}
        schedule.end()
    return found


def ignore(part: float) -> None:
    del part


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("ranks", "against"), [(3, ()), (2, BESIDE)], ids=["alone", "beside others"])
def test_every_operation_is_measured_as_often_by_all_and_their_results_are_right(
    op: str, ranks: int, against: tuple[str, ...]
) -> None:
    rows = rows_of_every_operation(ranks, against)[op]
    assert len(rows) == (1 if op == "barrier" else 2)
    for row in rows:
        assert row.skipped == {}
        assert {name: timing.calls for name, timing in row.timings.items()} == dict.fromkeys(("ringfort", *against), 3)
        assert all(timing.median_us > 0 for timing in row.timings.values())


@pytest.mark.parametrize("op", ["barrier", "scatter"])
def test_an_operation_is_measured_for_every_number_of_ranks_and_every_size(op: str) -> None:
    report = bench_json("--op", op, *QUICK, "--against", "none")
    assert [row["ranks"] for row in report["rows"]] == ([2, 3] if op == "barrier" else [2, 2, 3, 3])
    for row in report["rows"]:
        assert set(row["engines"]) == {"ringfort"}
        assert row["engines"]["ringfort"]["calls"] == 3
        assert row["engines"]["ringfort"]["median_us"] > 0


@cache
def comparison() -> Any:
    """With every engine that is installed, at once: starting them takes longer than measuring."""
    return bench_json(*SMALL, "--against", ",".join(name for name in OTHERS if ENGINES[name].available()))


@pytest.mark.parametrize("name", OTHERS)
def test_every_engine_that_is_installed_can_be_compared_with(name: str) -> None:
    if not ENGINES[name].available():
        pytest.skip(f"{name} is not installed: {ENGINES[name].install}")
    report = comparison()
    for row in report["rows"]:
        assert row["skipped"] == {}
        assert row["engines"][name]["calls"] == row["engines"]["ringfort"]["calls"] == 3
        assert row["ratios"][name] > 0
    assert set(report["geometric_mean_ratios"][name]) == {"2", "all"}


def test_the_limits_are_those_of_all_reduce_and_say_so() -> None:
    done = bench("--op", "broadcast", *SMALL, "--against", "sockets")
    assert done.returncode == 0, done.stderr
    assert "sockets was left out" in done.stdout


def test_an_engine_whose_ranks_die_is_left_out_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    # mpiexec.hydra takes it from the environment: no such way of starting processes, so no rank ever comes.
    if not ENGINES["mpich-shm"].available():
        pytest.skip("mpich is not installed")
    monkeypatch.setenv("HYDRA_LAUNCHER", "no-such-launcher")
    report = bench_json(*SMALL, "--against", "mpich-shm,plain")
    for row in report["rows"]:
        assert set(row["engines"]) == {"ringfort", "plain"}
        assert "mpich-shm" in row["skipped"]


@needs_torch
def test_what_gloo_cannot_do_is_left_out_and_said() -> None:
    done = bench("--dtype", "uint32", "--repeat", "2", "--sizes", "64", "--ranks", "2", "--against", "gloo")
    assert done.returncode == 0, done.stderr
    assert "gloo was left out" in done.stdout


@pytest.mark.parametrize("strategy", ["ring", "tree", "tree(3)", "direct", "halving_doubling"])
def test_the_strategy_can_be_chosen(strategy: str) -> None:
    report = bench_json("--strategy", strategy, "--repeat", "2", "--sizes", "4096", "--ranks", "3", "--against", "none")
    assert report["options"]["strategy"] == strategy


def test_repetitions_follow_from_the_time_they_may_take() -> None:
    report = bench_json("--sizes", "4", "--ranks", "2", "--min-time", "0.05", "--against", "none")
    assert MIN_ROUNDS <= report["rows"][0]["engines"]["ringfort"]["calls"] <= MAX_ROUNDS * MAX_BURST


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_table_a_file_and_a_picture_come_out(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    numbers, picture = tmp_path / "out.json", tmp_path / f"out.{suffix}"
    done = bench(*QUICK, "--against", "none", "--json", str(numbers), "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    assert "GB/s" in done.stdout
    assert json.loads(numbers.read_text())["schema"] == 1
    assert picture.read_bytes().startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
