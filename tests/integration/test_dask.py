"""`ringfort.integrations.dask` with real schedulers and workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringfort.errors import DistributedError, InvalidArgumentError
from tests.helpers.documents import blocks

if find_spec("distributed") is None:
    pytest.skip("needs Dask: pip install distributed (`make integration` does it)", allow_module_level=True)

from distributed import Client, LocalCluster

from ringfort.integrations import dask as ours
from ringfort.integrations.dask import DaskRunError, WorkerLostError, run

pytestmark = [
    pytest.mark.filterwarnings("default"),  # Dask's own
    pytest.mark.timeout(400),
]


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> None:
    """In place of the check of all tests: Dask keeps threads and connections for the next call."""


@pytest.fixture(autouse=True, scope="module")
def _end_threads_of_dask() -> Iterator[None]:
    yield
    from distributed.utils import _offload_executor

    _offload_executor.shutdown()


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        LocalCluster(
            n_workers=3, threads_per_worker=1, dashboard_address=None, worker_dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(3)
        yield client


def summed(context: Any, scale: float = 1.0) -> tuple[int, int, float, int]:
    x = context.all_reduce(np.full(100_000, scale * 2.0**context.rank))
    return context.rank, context.world_size, float(x[0]), os.getpid()


def test_each_worker_is_a_rank_and_the_results_are_in_order(client: Client) -> None:
    found = run(client, summed, scale=3.0)
    assert [one[:3] for one in found] == [(0, 3, 21.0), (1, 3, 21.0), (2, 3, 21.0)]
    assert len({one[3] for one in found}) == 3
    assert [one[:3] for one in run(client, summed, workers=2)] == [(0, 2, 3.0), (1, 2, 3.0)]
    addresses = sorted(client.run(lambda: 0))
    assert run(client, lambda context: context.world_size, workers=[addresses[2]]) == [1]


def raising(context: Any, which: int) -> int:
    context.barrier()
    if context.rank == which:
        raise KeyError("spoiled")
    context.barrier()
    return context.rank


def test_an_exception_comes_back_with_its_rank_and_the_others_are_told(client: Client) -> None:
    with pytest.raises(DaskRunError, match="Rank 1 failed: KeyError: 'spoiled'") as raised:
        run(client, raising, 1, timeout=20)
    assert raised.value.rank == 1
    assert isinstance(raised.value.__cause__, KeyError)
    others = [error for rank, error in raised.value.errors.items() if rank != 1]
    assert all(isinstance(error, DistributedError) for error in others)
    assert raised.value.results == {}
    assert [one[1] for one in run(client, summed)] == [3, 3, 3]


def returning(context: Any) -> int:
    if context.rank == 0:
        raise ValueError("early")
    return context.rank


def test_ranks_that_need_nobody_return_although_one_has_failed(client: Client) -> None:
    with pytest.raises(DaskRunError, match="Rank 0 failed: ValueError: early") as raised:
        run(client, returning)
    assert raised.value.results == {1: 1, 2: 2}


def waiting(context: Any, seconds: float) -> None:
    if context.rank == 0:
        time.sleep(seconds)
    context.barrier()


def test_an_interrupt_stops_the_ranks_that_wait(client: Client) -> None:
    main = threading.get_ident()
    threading.Timer(3.0, signal.pthread_kill, (main, signal.SIGINT)).start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(client, waiting, 8.0, timeout=60)
    assert time.monotonic() - begun < 7
    # Ranks 1 and 2 are free at once, rank 0 when its sleep is over.
    assert [one[1] for one in run(client, summed, timeout=30)] == [3, 3, 3]


def test_a_worker_that_dies_is_named() -> None:
    with (
        LocalCluster(
            n_workers=3, threads_per_worker=1, dashboard_address=None, worker_dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(3)
        begun = time.monotonic()
        with pytest.raises(
            DaskRunError, match="Rank 2 failed: WorkerLostError: The worker of rank 2, tcp://"
        ) as raised:
            run(client, dying, timeout=60)
        assert time.monotonic() - begun < 30
        assert isinstance(raised.value.errors[2], WorkerLostError)
        client.wait_for_workers(3)  # its nanny has started another
        assert len(run(client, summed)) == 3


def test_the_block_of_the_document_runs(tmp_path: Path) -> None:
    [block] = [block for block in blocks() if block.needs == ("a Dask cluster",)]
    script = tmp_path / "train.py"
    script.write_text(block.code)
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout) == (0, "[6.0, 6.0, 6.0]\n"), run.stderr


def dying(context: Any) -> None:
    context.barrier()
    if context.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    context.barrier()


def test_bad_workers_are_refused_before_anything_starts(client: Client) -> None:
    for workers, why in (
        (0, "there are 3"),
        (9, "there are 3"),
        (["tcp://nobody:1"], "not a worker"),
        ([], "there are"),
    ):
        with pytest.raises(InvalidArgumentError, match=why):
            run(client, summed, workers=workers)
    twice = [sorted(client.run(lambda: 0))[0]] * 2
    with pytest.raises(InvalidArgumentError, match="each worker once"):
        run(client, summed, workers=twice)
    assert ours._contexts == {}


def test_workers_at_two_addresses_meet() -> None:
    python = [sys.executable, "-m", "distributed.cli"]
    started = list[subprocess.Popen[Any]]()
    try:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        place = "127.0.0.1:28786"
        started.append(
            subprocess.Popen(
                [
                    *python[:2],
                    "distributed.cli.dask_scheduler",
                    "--host",
                    "127.0.0.1",
                    "--port",
                    "28786",
                    "--no-dashboard",
                ],
                **quiet,
            )
        )
        for address in ("127.0.0.2", "127.0.0.3"):
            command = [*python[:2], "distributed.cli.dask_worker", place, "--host", address, "--nthreads", "1"]
            started.append(subprocess.Popen([*command, "--no-dashboard", "--no-nanny"], **quiet))
        with Client(place, timeout=60) as client:
            client.wait_for_workers(2, timeout=60)
            workers = sorted(client.run(lambda: 0))
            assert [worker.rpartition(":")[0] for worker in workers] == ["tcp://127.0.0.2", "tcp://127.0.0.3"]
            assert [one[:3] for one in run(client, summed, workers=workers[::-1])] == [(0, 2, 3.0), (1, 2, 3.0)]
    finally:
        for process in started:
            process.kill()
            process.wait(30)
