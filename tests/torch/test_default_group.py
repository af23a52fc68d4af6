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


WITH_CHILDREN = """
import os, socket
import torch, torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, IterableDataset

def summed(size):
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [size] * 3, x

def child(rank, port, size):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    summed(size)
    print("child", dist.get_backend())
    dist.destroy_process_group()

class Part(IterableDataset):
    def __iter__(self):  # in a forked worker, which knows its parent's place
        yield from range(dist.get_rank(), 8, dist.get_world_size())

def start(method, size):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    mp.start_processes(child, args=(port, size), nprocs=size, start_method=method)

if __name__ == "__main__":
    start("spawn", 1)  # before this program has asked for the group, and
    start("fork", 3)
    dist.init_process_group("gloo")
    start("fork", 3)  # after
    loader = DataLoader(Part(), num_workers=1, multiprocessing_context="fork", batch_size=None)
    assert [int(x) for x in loader] == list(range(dist.get_rank(), 8, 2))
    summed(2)
    print("done")
"""


def test_processes_that_a_program_starts_make_encrypted_groups_of_their_own(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(WITH_CHILDREN)
    command = [sys.executable, "-m", "ringfort", "run", "-n", "2", "--torch-backend", "ringfort", str(program)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("done") == 2
    assert run.stdout.count("child") == run.stdout.count("ringfort") == 2 * (1 + 3 + 3), run.stdout
