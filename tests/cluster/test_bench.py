"""`ringfort bench` as people run it: real processes from start to end."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ringfort.bench.engines import ENGINES, OTHERS
from ringfort.bench.options import MAX_ROUNDS, MIN_ROUNDS, OPS
from ringfort.bench.turns import MAX_BURST

RINGFORT = [sys.executable, "-m", "ringfort.cli"]
SMALL = ("--repeat", "3", "--sizes", "4,5000", "--ranks", "2")
QUICK = ("--repeat", "3", "--sizes", "4,5000", "--ranks", "2,3")
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RINGFORT, "bench", *arguments], capture_output=True, text=True, timeout=100, check=False)


def bench_json(*arguments: str) -> Any:
    done = bench(*arguments, "--json", "-")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("op", OPS)
def test_every_operation_is_measured_and_its_results_are_right(op: str) -> None:
    report = bench_json("--op", op, *QUICK, "--against", "none")
    assert [row["ranks"] for row in report["rows"]] == ([2, 3] if op == "barrier" else [2, 2, 3, 3])
    for row in report["rows"]:
        assert set(row["engines"]) == {"ringfort"}
        assert row["engines"]["ringfort"]["calls"] == 3
        assert row["engines"]["ringfort"]["median_us"] > 0


@needs_torch
@pytest.mark.parametrize("op", OPS)
def test_other_engines_run_beside_us_with_as_many_calls(op: str) -> None:
    others = [name for name in ("gloo", "openmpi-shm") if ENGINES[name].available()]
    report = bench_json("--op", op, *SMALL, "--against", ",".join(others))
    for row in report["rows"]:
        assert row["skipped"] == {}
        assert {name: timing["calls"] for name, timing in row["engines"].items()} == dict.fromkeys(
            ["ringfort", *others], 3
        )
        assert row["ratios"]["gloo"] > 0
    assert set(report["geometric_mean_ratios"]["gloo"]) == {"2", "all"}


@pytest.mark.parametrize("name", [name for name in OTHERS if name not in ("gloo", "openmpi-shm")])
def test_every_engine_that_is_installed_can_be_compared_with(name: str) -> None:
    if not ENGINES[name].available():
        pytest.skip(f"{name} is not installed: {ENGINES[name].install}")
    report = bench_json(*SMALL, "--against", name)
    for row in report["rows"]:
        assert row["skipped"] == {}
        assert row["engines"][name]["calls"] == 3


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
