"""Programs that the `mpiexec` of Open MPI and of MPICH starts, without mpi4py: on this machine, and on two hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ringfort.bench.engines.mpi import MpichEngine, MpiEngine, OpenMpiEngine, installed
from ringfort.launchers import LAUNCHERS
from tests.helpers.namespaces import lan, needs_namespaces

WORKER = (sys.executable, "-m", "tests.workers.launched")
PATIENCE = 110.0
"""Seconds for what takes three on an idle machine."""
ROOT = Path(__file__).parents[2]
FLAGS = {OpenMpiEngine: OpenMpiEngine.flags, MpichEngine: ()}
PASS = {
    OpenMpiEngine: ("-x", "MASTER_ADDR={}", "-x", "MASTER_PORT=29400"),
    MpichEngine: ("-genv", "MASTER_ADDR", "{}", "-genv", "MASTER_PORT", "29400"),
}
"""How each passes variables to all ranks."""


@pytest.fixture(params=[OpenMpiEngine, MpichEngine], ids=["openmpi", "mpich"])
def engine(request: pytest.FixtureRequest) -> type[MpiEngine]:
    kind = request.param
    if installed(kind.starter) is None:
        pytest.skip(f"needs {kind.packages[0]}: pip install {kind.packages[0]} (`make integration` does it)")
    return kind


def command(engine: type[MpiEngine], ranks: int, *arguments: str) -> list[str]:
    return [str(installed(engine.starter)), *FLAGS[engine], "-n", str(ranks), *arguments]


def environment() -> dict[str, str]:
    """This process's environment, without what another launcher may have set."""
    hidden = {name for one in LAUNCHERS for name in (one.rank, one.world_size)}
    return {name: value for name, value in os.environ.items() if name not in hidden} | {"OMP_NUM_THREADS": "1"}


def start(engine: type[MpiEngine], ranks: int, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(engine, ranks, *arguments), env=environment(), cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def said(process: subprocess.Popen[Any]) -> list[dict[str, Any]]:
    """What the ranks have said, by rank."""
    out = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 0, out
    return sorted(
        (json.loads(line) for line in out.splitlines() if line.startswith("{")), key=lambda line: line["rank"]
    )


def test_mpiexec_numbers_the_ranks(engine: type[MpiEngine]) -> None:
    found = said(start(engine, 3, *WORKER, "meet"))
    assert [(line["rank"], line["size"], line["local"], line["total"]) for line in found] == [
        (rank, 3, rank, 7.0) for rank in range(3)
    ]
    assert {line["encrypted"] for line in found} == {"on"}


def test_two_mpiexecs_at_once_are_two_groups(engine: type[MpiEngine]) -> None:
    both = [start(engine, 2, "sh", "-c", f"{' '.join(WORKER)} meet 2; exit $?") for _ in range(2)]
    for process in both:
        assert [line["total"] for line in said(process)] == [3.0, 3.0]


def test_torch_gets_its_group(engine: type[MpiEngine]) -> None:
    found = said(start(engine, 2, *WORKER, "torch"))
    assert [(line["rank"], line["size"], line["slope"]) for line in found] == [(0, 2, 1.0), (1, 2, 1.0)]


@needs_namespaces
def test_mpiexec_reaches_two_hosts_with_the_address_of_rank_0(engine: type[MpiEngine], tmp_path: Path) -> None:
    with lan(2, machine_ids=True) as net:
        agent = tmp_path / "agent"
        # In place of ssh: the name of a host is its number in the network.
        cases = "\n".join(f"{host.address()}) space={host.namespace};;" for host in net.hosts)
        agent.write_text(
            "#!/bin/sh\nwhile [ \"${1#-}\" != \"$1\" ]; do shift; done\nhost=$1; shift\n"
            f"case $host in\n{cases}\nesac\nexec ip netns exec $space unshare --uts sh -c \"hostname $space; $*\"\n"
        )  # fmt: skip
        agent.chmod(0o755)
        hosts = [host.address() for host in net.hosts]
        if engine is OpenMpiEngine:
            where = ["--host", ",".join(f"{host}:1" for host in hosts), "--prefix", sys.prefix]
            where += ["--prtemca", "plm_ssh_agent", str(agent)]
        else:
            where = ["-hosts", ",".join(hosts), "-launcher", "ssh", "-launcher-exec", str(agent), "-ppn", "1"]
        told = [part.format(hosts[0]) for part in PASS[engine]]
        process = net.hosts[0].start(
            *command(engine, 2, *where, *told, *WORKER, "meet"), variables=environment(),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        found = said(process)
    assert [(line["rank"], line["total"]) for line in found] == [(0, 3.0), (1, 3.0)]
    assert {tuple(line["hosts"]) for line in found} == {(0, 1)}
