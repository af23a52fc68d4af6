"""A program that ends without `destroy_process_group`, with real processes."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.torch.test_examples import PATIENCE, ringfort_run

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")

PROGRAM = """
import threading, time
import torch, torch.distributed as dist

dist.init_process_group("ringfort")
begun = threading.Event()

def follow(future):
    begun.set()
    time.sleep(0.2)  # the program ends meanwhile
    print("followed", flush=True)

dist.all_reduce(torch.ones(4), async_op=True).get_future().then(follow)
begun.wait()
"""


def test_the_end_of_the_program_waits_for_what_hangs_on_a_future(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run = subprocess.run(ringfort_run(2, program), capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("followed") == 2
