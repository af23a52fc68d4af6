"""Programs that Slurm starts: the real slurmctld, two slurmd on two hosts, and one home directory that both see."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.namespaces import Lan, lan, needs_namespaces
from tests.helpers.slurm import Cluster, needs_slurm, slurm
from tests.workers.elastic import plain_loop
from tests.workers.launched import digest

pytestmark = [needs_namespaces, needs_slurm, pytest.mark.timeout(700)]

WORKER = (sys.executable, "-m", "tests.workers.launched")
PATIENCE = 300.0
"""Seconds for what takes ten on an idle machine."""


@dataclass
class Site:
    """The cluster, its network and its home directory."""

    net: Lan
    cluster: Cluster
    home: Path

    def lines(self, *arguments: str, variables: dict[str, str] | None = None) -> list[dict[str, Any]]:
        """Run a step, and return what its tasks said, by rank."""
        return parsed(self.cluster.srun(*arguments, variables=self.variables | (variables or {})))

    def start(self, *arguments: str, variables: dict[str, str] | None = None) -> subprocess.Popen[Any]:
        return self.cluster.start("srun", *arguments, variables=self.variables | (variables or {}))

    @property
    def variables(self) -> dict[str, str]:
        return {"HOME": str(self.home), "RINGFORT_HOME": "", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("slurm")
    home = folder / "home"
    home.mkdir(0o700)
    with lan(2, machine_ids=True) as net, slurm(net, folder / "slurm") as cluster:
        net.block_multicast()  # as in many clusters: nothing may depend on it
        yield Site(net, cluster, home)


def parsed(out: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert lines, out
    return sorted(lines, key=lambda line: line.get("rank", 0))


def test_srun_numbers_the_ranks_and_each_host_has_a_key_of_its_own(site: Site) -> None:
    found = site.lines("-N2", "--ntasks-per-node=2", "--distribution=block", *WORKER, "meet")
    assert [(line["rank"], line["size"], line["local"], line["host"]) for line in found] == [
        (0, 4, 0, "n0"), (1, 4, 1, "n0"), (2, 4, 0, "n1"), (3, 4, 1, "n1"),
    ]  # fmt: skip
    assert {line["total"] for line in found} == {15.0}
    assert {tuple(line["hosts"]) for line in found} == {(0, 0, 2, 2)}
    assert {line["encrypted"] for line in found} == {"on"}
    assert len({(line["host"], line["node"]) for line in found}) == len({line["node"] for line in found}) == 2
    keys = sorted(path.relative_to(site.home) for path in site.home.rglob("node_keypair"))
    assert [len(key.parts) for key in keys] == [4, 2]  # of the first host, and in a folder of the other


def test_srun_distributes_ranks_cyclically_and_on_one_host(site: Site) -> None:
    found = site.lines("-N2", "--ntasks-per-node=2", "--distribution=cyclic", *WORKER, "meet")
    assert [line["host"] for line in found] == ["n0", "n1", "n0", "n1"]
    assert {line["total"] for line in found} == {15.0}
    found = site.lines("-w", "n1", "-n2", *WORKER, "meet")
    assert [(line["rank"], line["host"]) for line in found] == [(0, "n1"), (1, "n1")]


def test_two_steps_on_the_same_hosts_at_once_are_two_groups(site: Site) -> None:
    steps = [site.start("-N2", "-n2", *WORKER, "meet", "2") for _ in range(3)]
    outputs = [step.communicate(timeout=PATIENCE)[0] for step in steps]
    assert [step.returncode for step in steps] == [0, 0, 0], outputs
    for out in outputs:
        assert [(line["rank"], line["size"], line["total"]) for line in parsed(out)] == [(0, 2, 3.0), (1, 2, 3.0)]


def test_steps_of_one_job_at_once_are_two_groups(site: Site) -> None:
    both = f"for i in 1 2; do srun --overlap -N2 -n2 {' '.join(WORKER)} meet 2 & done; wait"
    process = site.cluster.start("salloc", "-Q", "-N2", "-n2", "sh", "-c", both, variables=site.variables)
    out = process.communicate(timeout=PATIENCE)[0]
    assert [line["total"] for line in parsed(out)] == [3.0] * 4, out


def test_torch_gets_its_group_and_its_store_over_the_same_links(site: Site) -> None:
    found = site.lines("-N2", "-n2", *WORKER, "torch")
    assert [(line["rank"], line["size"], line["slope"]) for line in found] == [(0, 2, 1.0), (1, 2, 1.0)]


def test_one_launcher_per_host_starts_the_ranks_of_all(site: Site, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist, json, platform\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.full((3,), 2.0 ** dist.get_rank())\n"
        "dist.all_reduce(x)\n"
        "print(json.dumps({'rank': dist.get_rank(), 'total': x[0].item(), 'name': type(dist.group.WORLD).__name__,"
        " 'host': platform.node()}))\n"
    )
    out = site.cluster.srun(
        "-N2", "--ntasks-per-node=1", sys.executable, "-m", "ringfort", "run", "-n", "2", "--torch-backend", "ringfort",
        str(script), variables=site.variables,
    )  # fmt: skip
    found = sorted(
        (json.loads(line[line.index("{") :]) for line in out.splitlines() if "{" in line), key=lambda line: line["rank"]
    )
    assert [(line["rank"], line["total"], line["name"]) for line in found] == [
        (rank, 15.0, "RingfortProcessGroup") for rank in range(4)
    ], out
    assert [line["host"] for line in found] in (["n0", "n0", "n1", "n1"], ["n1", "n1", "n0", "n0"])


def test_an_elastic_run_loses_a_job_and_gets_another_without_losing_a_step(site: Site, tmp_path: Path) -> None:
    total = 150
    variables = {"RINGFORT_PEERS": "n0,n1"}
    run = (*WORKER, "elastic", str(total), "1:4", "0.02", str(tmp_path))
    stays = site.start("-w", "n0", "-n1", *run, variables=variables)
    goes = site.start("-w", "n1", "-n1", "--job-name=goes", *run, variables=variables)
    until(tmp_path, "n0-", lambda step, members: members == 2 and step >= 10)
    site.cluster.start("scancel", "--name=goes", "--signal=KILL").communicate(timeout=PATIENCE)
    goes.communicate(timeout=PATIENCE)
    until(tmp_path, "n0-", lambda step, members: members == 1)
    comes = site.start("-w", "n1", "-n1", *run, variables=variables)
    until(tmp_path, "n0-", lambda step, members: members == 2)
    (tmp_path / "hurry").touch()
    for process in (stays, comes):
        [end] = parsed(process.communicate(timeout=PATIENCE)[0])
        assert (end["done"], end["state"]) == (total, digest(plain_loop(total)))


def until(folder: Path, name: str, wanted: Any) -> None:
    """Wait until a member has reached what is wanted of its step and its number of members."""
    deadline = time.monotonic() + PATIENCE
    seen = ""
    while time.monotonic() < deadline:
        for path in folder.glob(f"{name}*"):
            seen = path.read_text()
            if seen and wanted(*map(int, seen.split())):
                return
        time.sleep(0.05)
    raise AssertionError(seen)


def test_an_elastic_step_finds_its_hosts_without_multicast(site: Site) -> None:
    found = site.lines("-N2", "-n2", *WORKER, "elastic", "20", "2:")
    assert [line["done"] for line in found] == [20, 20]
    assert found[0]["state"] == found[1]["state"] == digest(plain_loop(20))


def test_a_batch_script_is_no_rank_and_is_told_of_srun(site: Site, tmp_path: Path) -> None:
    script, out = tmp_path / "job.sh", tmp_path / "out"
    script.write_text(f"#!/bin/sh\nexec {' '.join(WORKER)} meet\n")
    process = site.cluster.start(
        "sbatch", "--wait", "-N2", "-n2", "-o", str(out), str(script), variables=site.variables
    )
    assert "Submitted" in process.communicate(timeout=PATIENCE)[0]
    assert '"size": 1' in out.read_text()
    assert "start it with `srun python SCRIPT`" in out.read_text()


def test_half_a_set_of_variables_names_the_other_half_and_srun(site: Site) -> None:
    out = site.cluster.srun("-N2", "-n2", *WORKER, "meet", variables=site.variables | {"RANK": "0"}, status=1)
    assert "RANK=0 is set, and WORLD_SIZE is not. Set WORLD_SIZE too, or unset RANK to use what srun has set" in out
    assert "srun sets SLURM_PROCID and SLURM_STEP_NUM_TASKS" in out
