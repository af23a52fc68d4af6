"""Some of torch's own tests of torch.distributed, and the list of those that do not apply. All: tests/stress."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.torch.run_torch_tests import not_applicable, report

SOME = (
    "test_all_gather_coalesced_complex",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_sum_async",
    "test_all_to_all_single_unequal_split",
    "test_all_gather_object_default_pg",
    "test_DistributedDataParallelCPU",
    "test_isend",
    "test_reduce_scatter_tensor_cuda",
    "test_scatter_complex",
    "test_send_recv_any_source",
)


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_some_of_torchs_own_tests_pass() -> None:
    command = [sys.executable, "-m", "tests.torch.run_torch_tests", "--only", *SOME]
    run = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{len(SOME) - 1} passed, 1 do not apply" in run.stdout


def test_every_line_of_the_list_has_a_reason() -> None:
    for world_size in (2, 4):
        assert all(not_applicable(world_size).values())


@pytest.mark.parametrize("line", ["test_x", "test_x | 2", "test_x | 3 | why", "x | 2 | why", "test_x | 2 |"])
def test_a_line_that_makes_no_sense_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "list").write_text(line)
    with pytest.raises(ValueError, match="must be"):
        not_applicable(2, tmp_path / "list")


def test_a_listed_test_that_passes_is_as_bad_as_another_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    good = [("test_a", "passed", "", 0.1), ("test_b", "skipped", "no GPU", 0.1)]
    assert report(iter(good), {"test_b": "needs a GPU"}, verbose=False) == 0
    assert report(iter([("test_b", "passed", "", 0.1)]), {"test_b": "needs a GPU"}, verbose=False) == 1
    assert report(iter([("test_a", "failed", "trace\nwhy", 0.1)]), {}, verbose=False) == 1
    assert "why" in capsys.readouterr().out
