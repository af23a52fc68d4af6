"""The walks in ARCHITECTURE.md are those that real calls take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ringfort import Backend, CollectiveConfig, DistributedConfig, DistributedContext
from ringfort.testing import results, run_ranks, tcp_group
from tests.helpers.documents import ROOT
from tests.helpers.walk import Hop, Walk, documented
from tests.unit.test_layers import LEVEL, layer_of

ATTEMPTS = 50
"""A peer that is late makes a rank look around, in modules that a walk without trouble does not enter."""


def module_name(path: str) -> str:
    return "ringfort." + path.removesuffix(".py").replace("/", ".")


def assert_downwards(calls: set[tuple[str, str]]) -> None:
    levels = [(LEVEL[layer_of(module_name(a))], LEVEL[layer_of(module_name(b))], a, b) for a, b in calls]
    assert [f"{a} calls {b}, which is above it" for caller, called, a, b in levels if called > caller] == []


def assert_hops(table: list[Hop], modules: list[str], calls: set[tuple[str, str]]) -> None:
    """Every row of the table was a hop."""
    assert table
    for hop in table:
        assert hop.module in modules, f"{hop.module} was not entered"
        assert not hop.caller or (hop.caller, hop.module) in calls, f"{hop.caller} did not call {hop.module}"


def test_an_all_reduce_of_4_mib_takes_the_documented_walk_and_never_turns_back() -> None:
    walks: list[Walk] = []

    def program(backend: Backend) -> None:
        context, x = DistributedContext(backend), np.zeros(1 << 20, np.float32)
        context.all_reduce(x)
        for _ in range(ATTEMPTS):
            if context.rank:
                context.all_reduce(x)
                continue
            with Walk() as walk:
                context.all_reduce(x)
            walks.append(walk)

    one_thread = CollectiveConfig(connections=1)
    with tcp_group(2, DistributedConfig(timeout=20, shared_memory="off", collective=one_thread)) as backends:
        results(run_ranks(backends, program))
    for walk in walks:
        assert_downwards(walk.calls)
    shortest = min(walks, key=lambda walk: len(walk.modules))
    table = documented("One all-reduce")
    assert_hops(table, shortest.modules, shortest.calls)
    assert {hop.module for hop in table} == set(shortest.modules)
    assert len(shortest.modules) <= 12


def walk_of(command: list[str], ranks: int, home: Path, **variables: str) -> tuple[list[str], set[tuple[str, str]]]:
    """What rank 0 of some processes printed."""
    environment = {**os.environ, "RINGFORT_HOME": str(home), "RINGFORT_INTERFACES": "lo", **variables}
    started = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(ranks)
    ]
    said = [process.communicate(timeout=100)[0] for process in started]
    assert [process.returncode for process in started] == [0] * ranks
    (text,) = [text for text in said if "[[" in text]
    modules, calls = json.loads(text[text.index("[[") :].splitlines()[0])
    return modules, {(a, b) for a, b in calls}


def test_a_join_takes_the_documented_walk(tmp_path: Path) -> None:
    modules, calls = walk_of([sys.executable, "-m", "tests.workers.walks", "join"], 2, tmp_path)
    assert_hops(documented("One join"), modules, calls)


def test_an_all_reduce_of_torch_takes_the_documented_walk(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    run = [sys.executable, "-m", "ringfort", "run", "-n", "2", "-m", "tests.workers.walks", "torch"]
    modules, calls = walk_of(run, 1, tmp_path)
    table = documented("One dist.all_reduce")
    assert_hops(table, modules, calls)
    assert {hop.module for hop in table} == set(modules)
    assert_downwards(calls)
