"""`ringfort.local` in a real kernel of Jupyter: output, Ctrl-C, a rank that dies, and restarts, which leave no process
behind. And the example notebook, as jupytext makes it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

NEEDED = {"ipykernel": "ipykernel", "jupyter_client": "jupyter-client", "jupytext": "jupytext"}
_missing = " ".join(package for name, package in NEEDED.items() if find_spec(name) is None)
pytestmark = pytest.mark.skipif(bool(_missing), reason=f"needs {_missing}: pip install {_missing}")

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0
"""Seconds for what takes two on an idle machine."""


class Seen(NamedTuple):
    """What a cell has shown."""

    printed: str
    result: str
    error: str


class Kernel:
    """A kernel, and the client of a notebook."""

    def __init__(self, folder: Path) -> None:
        import zmq
        from jupyter_client.manager import KernelManager

        self._zmq: Any = zmq.Context()
        self.manager: Any = KernelManager(kernel_name="python3", context=self._zmq)  # of this interpreter
        self.manager.start_kernel(cwd=str(folder), env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
        self.client: Any = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)

    def cell(self, code: str, *, interrupt_at: str = "") -> Seen:
        """Run a cell to its end. With `interrupt_at`, interrupt the kernel when that was printed."""
        request, printed, result, error = self.client.execute(code), "", "", ""
        while True:
            message = self.client.get_iopub_msg(timeout=PATIENCE)
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                printed += content["text"]
                if interrupt_at and interrupt_at in printed:
                    interrupt_at = ""
                    self.manager.interrupt_kernel()
            elif kind == "execute_result":
                result = content["data"]["text/plain"]
            elif kind == "error":
                error = f"{content['ename']}: {content['evalue']}\n" + "\n".join(content["traceback"])
            elif kind == "status" and content["execution_state"] == "idle":
                return Seen(printed, result, error)

    def ranks(self, count: int) -> list[psutil.Process]:
        """Start a group, and return its processes."""
        pids = self.cell(f"import ringfort, time\ngroup = ringfort.local({count})\ngroup.pids").result
        return [psutil.Process(pid) for pid in ast.literal_eval(pids)]

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()
        self._zmq.destroy(linger=0)
        from jupyter_core.utils import ensure_event_loop

        ensure_event_loop().close()  # the one that the methods of the client have used


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    made = Kernel(tmp_path)
    yield made
    made.close()


def all_gone(processes: list[psutil.Process]) -> bool:
    """Whether all processes end soon."""
    return not psutil.wait_procs(processes, timeout=10)[1]


TALK = """
def talk(ctx):
    for i in range(3):
        print("line", i)
    return scaled(ctx.rank)
group.run(talk)
"""
NAP = """
def nap(ctx):
    print("begin", flush=True)
    try:
        time.sleep(60) if ctx.rank else ctx.barrier()
    finally:
        print("end of", ctx.rank)
group.run(nap)
"""
FAIL = """
def fail(ctx):
    if ctx.rank == 2:
        raise ValueError("no data here")
    ctx.barrier()
group.run(fail)
"""
DIE = """
import os
def die(ctx):
    if ctx.rank == 1:
        os.kill(os.getpid(), 9)
    ctx.barrier()
group.run(die)
"""


def test_output_and_results_come_with_the_rank(kernel: Kernel) -> None:
    kernel.ranks(3)
    kernel.cell("SCALE = 2\ndef scaled(x):\n    return x * SCALE")
    seen = kernel.cell(TALK)
    assert (seen.result, seen.error) == ("[0, 2, 4]", "")
    lines = seen.printed.splitlines()
    for rank in range(3):  # each rank's lines are in its order
        assert [line for line in lines if line.startswith(f"[{rank}]")] == [f"[{rank}] line {i}" for i in range(3)]


def test_an_interrupt_reaches_the_ranks_and_the_next_call_has_new_ones(kernel: Kernel) -> None:
    ranks = kernel.ranks(2)
    seen = kernel.cell(NAP, interrupt_at="[1] begin")
    assert seen.error.startswith("KeyboardInterrupt")
    assert "[1] end of 1" in seen.printed
    assert all_gone(ranks)
    assert kernel.cell("group.run(lambda ctx: ctx.rank)").result == "[0, 1]"


def test_an_exception_and_a_killed_rank_are_named(kernel: Kernel) -> None:
    kernel.ranks(3)
    seen = kernel.cell(FAIL)
    assert "LocalRunError: Rank 2 raised ValueError: no data here" in seen.error
    assert "in fail" in seen.error  # the traceback of the rank
    seen = kernel.cell(DIE)
    assert "Rank 1 was killed by SIGKILL" in seen.error
    assert kernel.cell("group.run(lambda ctx: ctx.world_size)").result == "[3, 3, 3]"


@pytest.mark.parametrize("how", ["restart", "kill"])
@pytest.mark.parametrize("work", ["time.sleep(100)", "sum(iter(int, 1))", "None"])
def test_no_process_is_left_after_a_restart(kernel: Kernel, how: str, work: str) -> None:
    ranks = kernel.ranks(2)
    request = kernel.client.execute(f"print('run', flush=True); group.run(lambda ctx: {work})")
    while True:
        message = kernel.client.get_iopub_msg(timeout=PATIENCE)
        if message["parent_header"].get("msg_id") == request and message["msg_type"] == "stream":
            break
    time.sleep(0.5)  # until the ranks have the call
    if how == "kill":  # as when memory runs out; a frontend then starts another kernel
        os.kill(kernel.manager.provisioner.process.pid, 9)
    kernel.manager.restart_kernel(now=False)
    assert all_gone(ranks)
    kernel.client.wait_for_ready(timeout=PATIENCE)


def test_the_example_is_a_notebook_for_jupytext(kernel: Kernel, tmp_path: Path) -> None:
    made = tmp_path / "notebook.ipynb"
    source = str(ROOT / "examples" / "notebook.py")
    subprocess.run([sys.executable, "-m", "jupytext", "--to", "notebook", source, "--output", str(made)], check=True)
    cells = json.loads(made.read_text())["cells"]
    assert {cell["cell_type"] for cell in cells} == {"markdown", "code"}
    shown = [kernel.cell("".join(cell["source"])) for cell in cells if cell["cell_type"] == "code"]
    assert [seen.error for seen in shown] == [""] * len(shown)
    printed = "".join(seen.printed for seen in shown)
    assert "[0, 1]" in printed
    assert "Rank 1 raised ValueError: no data here" in printed
