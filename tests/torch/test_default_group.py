"""`ringfort run --torch-backend ringfort`: programs that name other backends, with real processes."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.torch.test_examples import PATIENCE

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")

PROGRAM = """
import datetime, sys
import torch, torch.distributed as dist
from torch.utils.data import DataLoader

class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, index): return index

def summed(group=None):
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    return x.tolist()

def main():
    assert sys.argv[1:] == ["--flag", "value"], sys.argv
    assert dist.is_initialized()  # as frameworks ask before they make a group
    try:
        dist.init_process_group("gloo", rank=5, world_size=7)
    except ValueError as error:
        print("refused:", error)
    dist.init_process_group("nccl", init_method="tcp://192.0.2.1:1", timeout=datetime.timedelta(seconds=77))
    assert summed() == [2, 2, 2]
    pair = dist.new_group([0, 1], backend="gloo")
    assert summed(pair) == [2, 2, 2]
    print("backends:", dist.get_backend(), dist.get_backend(pair))
    mesh = dist.init_device_mesh("cpu", (2,))
    assert summed(mesh.get_group()) == [2, 2, 2]
    # Workers that start from nothing import this file again; they make no group.
    assert [int(x) for x in DataLoader(Numbers(), num_workers=1, multiprocessing_context="spawn")] == [0, 1]
    try:
        dist.init_process_group("gloo")
    except ValueError as error:
        print("twice:", error)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    assert summed() == [2, 2, 2]
    print("again:", dist.get_backend())
    raise RuntimeError("the program's own")

if __name__ == "__main__":
    main()
"""


def test_a_program_that_names_another_backend_gets_the_group_that_exists(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "ringfort", "run", "-n", "2", "--torch-backend", "ringfort"]
    command += [str(program), "--flag", "value"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert run.returncode == 1, run.stderr
    out, err = run.stdout, run.stderr
    assert "[1] refused: rank=5: this process is rank 1 of 2 in the group that `ringfort run --torch-backend" in out
    assert out.count("backends: ringfort ringfort") == 2
    assert out.count("twice: trying to initialize the default process group twice") == 2
    assert out.count("again: ringfort") == 2
    # Rank 0 says it once; the launcher may repeat its last lines where it was the first to fail.
    line = "Using the group that `ringfort run --torch-backend ringfort` has made for init_process_group('nccl')"
    said = [each for each in err.splitlines() if each.startswith("[0] ") and line in each]
    assert len(said) == 1, err
    assert "2 ranks on one machine" in err
    # The traceback is that of plain Python, without what runs the program.
    assert "RuntimeError: the program's own" in err
    assert "runpy" not in err
    assert "torch_program" not in err
