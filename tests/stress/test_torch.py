"""Torch's own tests of torch.distributed, all of them, and training that is compared with Gloo's step by step."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.torch.test_process_group import check_curves
from tests.torch.zygote import Zygote

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture
def zygote() -> Iterator[Zygote]:
    with closing(Zygote()) as process:
        yield process


@pytest.mark.parametrize("world_size", ["2", "4"])
def test_torchs_own_tests_pass_or_do_not_apply(world_size: str) -> None:
    command = [sys.executable, "-m", "tests.torch.run_torch_tests", "--world-size", world_size]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, "\n".join(line for line in run.stdout.splitlines() if "<-" in line) or run.stderr


@pytest.mark.parametrize("curve", ["ddp_curve", "fsdp_curve"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_two_hundred_steps_are_those_over_gloo(zygote: Zygote, curve: str, world_size: int) -> None:
    print(curve, world_size, check_curves(zygote, curve, world_size=world_size, steps=200))


@pytest.mark.parametrize("kind", ["plain", "mended"])
def test_power_sgd_learns_as_it_does_over_gloo(zygote: Zygote, kind: str) -> None:
    scenario = "torch.callback_scenarios.power_sgd"
    assert zygote.run(scenario, 2, "ringfort", kind, 25) == zygote.run(scenario, 2, "gloo", kind, 25)
    # Gloo pairs the collectives of several buckets by chance. Here each run must be like the other.
    runs = [zygote.run(scenario, 2, "ringfort", kind, 0.01) for _ in range(3)]
    assert runs == runs[:1] * 3


def test_batched_power_sgd_as_torch_ships_it_does_what_it_does_over_gloo(zygote: Zygote) -> None:
    ours, theirs = (zygote.run("torch.callback_scenarios.batched_as_shipped", 2, name) for name in ("ringfort", "gloo"))
    assert ours == theirs


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_a_compiled_model_learns_as_it_does_over_gloo(zygote: Zygote, compiler: str) -> None:
    ours, theirs = (
        zygote.run("torch.model_scenarios.compiled", 2, name, compiler, patience=400) for name in ("ringfort", "gloo")
    )
    assert ours == theirs


def test_fsdp1_learns_as_it_does_over_gloo(zygote: Zygote) -> None:
    ours, theirs = (zygote.run("torch.model_scenarios.fsdp1", 2, name) for name in ("ringfort", "gloo"))
    assert ours == theirs


def test_the_benchmark_measures_torchs_group_beside_gloos(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--only", "torch"]
    command += ["--results", str(tmp_path), "--docs", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    result = json.loads((tmp_path / "torch.json").read_text())
    assert {one["way"] for one in result["steps"]} == {"ringfort", "tcp", "gloo", "nothing", "copy"}
    assert {one["call"] for one in result["calls"]} == {"all_reduce", "broadcast", "all_gather", "barrier"}
