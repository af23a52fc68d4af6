"""What torchrun, mpiexec and srun say in the environment: which of them counts, what is missing, where ranks meet."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys

import pytest

import ringfort
from ringfort.bootstrap.meeting_point import MeetingPoint, meeting_point
from ringfort.config import Environment
from ringfort.errors import ConfigError
from ringfort.launchers import FIRST_PORT, LAUNCHERS, PORTS, expand_hosts, half_told, port_of

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "ws", "MASTER_PORT": "29500"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-ws-29240@1",
    "PMIX_RANK": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "6", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "6"}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_NTASKS": "16",
}
SPECIAL = {"batch": "4294967291", "interactive": "4294967290", "extern": "4294967292"}


def place(variables: dict[str, str]) -> tuple[int | None, int | None, int | None]:
    told = Environment.from_mapping(variables)
    return told.rank, told.world_size, told.local_rank


@pytest.mark.parametrize(
    ("variables", "expected", "name"),
    [
        (TORCHRUN, (1, 2, 1), "torchrun and `ringfort run`"),
        (OPEN_MPI, (2, 4, 2), "mpiexec of Open MPI"),
        (MPICH, (3, 6, 3), "mpiexec of MPICH"),
        (SRUN, (5, 8, 1), "srun"),
        (SRUN | OPEN_MPI, (2, 4, 2), "mpiexec of Open MPI"),
        (SRUN | MPICH, (3, 6, 3), "mpiexec of MPICH"),
        (SRUN | OPEN_MPI | TORCHRUN, (1, 2, 1), "torchrun and `ringfort run`"),
        # Slurm's own PMI, which has the same numbers, and no local ones.
        (SRUN | {"PMI_RANK": "5", "PMI_SIZE": "8"}, (5, 8, 1), "srun"),
        # Half of one launcher and the whole of another make no place.
        (SRUN | {"RANK": "0"}, (0, None, None), "torchrun and `ringfort run`"),
        ({}, (None, None, None), ""),
        ({"LOCAL_RANK": "3"}, (None, None, 3), ""),
    ],
)
def test_the_place_comes_from_one_launcher(
    variables: dict[str, str], expected: tuple[int | None, ...], name: str
) -> None:
    assert place(variables) == expected
    assert Environment.from_mapping(variables).launcher == name


@pytest.mark.parametrize("step", [*SPECIAL.values(), ""], ids=[*SPECIAL, "none"])
def test_a_script_of_a_slurm_job_is_no_rank(step: str) -> None:
    told = Environment.from_mapping(SRUN | {"SLURM_STEP_ID": step})
    assert (told.rank, told.world_size, told.launcher, told.hosts) == (None, None, "", [])
    assert told.slurm_job == "7"


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda one: one.name)
@pytest.mark.parametrize("given", ["rank", "world_size"])
def test_half_a_place_names_the_other_half_and_who_sets_both(
    launcher: object, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in LAUNCHERS:
        for name in (one.rank, one.world_size):
            monkeypatch.delenv(name, raising=False)
    other = {"rank": "world_size", "world_size": "rank"}[given]
    has, misses = getattr(launcher, given), getattr(launcher, other)
    for name, value in {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", has: "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{has}=3 is set, and {misses} is not. Set {misses} too, or unset") as raised:
        ringfort.init()
    for one in LAUNCHERS:
        assert f"{one.rank} and {one.world_size}" in str(raised.value)
    assert len(str(raised.value).splitlines()) <= 3


def test_half_a_place_says_which_launcher_has_told_a_whole_one() -> None:
    assert "unset RANK to use what srun has set" in half_told(SRUN | {"RANK": "0"})
    assert half_told(SRUN) == half_told({}) == ""


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n0", ["n0"]),
        ("n[0-2]", ["n0", "n1", "n2"]),
        ("gpu[08-10,12],login", ["gpu08", "gpu09", "gpu10", "gpu12", "login"]),
        ("a,b[1,3]-ib,c", ["a", "b1-ib", "b3-ib", "c"]),
        ("rack1-n[001-002]", ["rack1-n001", "rack1-n002"]),
        ("", []),
    ],
)
def test_lists_of_hosts_are_expanded_in_order(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["n[0-", "n[a-b]", "n[3-1]", "n[0-99999999]", ",", "n0,,n1", "n[1]]", "[]"])
def test_other_text_is_no_list_of_hosts(text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        expand_hosts(text)
    with pytest.raises(ConfigError, match="SLURM_STEP_NODELIST"):
        _ = Environment.from_mapping(SRUN | {"SLURM_STEP_NODELIST": text}).hosts


def test_steps_that_run_at_once_have_ports_of_their_own() -> None:
    steps = list(itertools.product(range(10_000, 10_150), range(100)))
    ports = {port_of(job, step) for job, step in steps}
    assert len(ports) == len(steps)
    assert min(ports) >= FIRST_PORT
    assert max(ports) < FIRST_PORT + PORTS <= 32768


def meet(variables: dict[str, str]) -> MeetingPoint:
    told = Environment.from_mapping(variables)
    assert told.world_size is not None
    return meeting_point(told, told.world_size)


def test_ranks_of_a_step_meet_at_its_first_host() -> None:
    assert meet(SRUN) == MeetingPoint(f"gpu03:{port_of(7, 2)}", "Slurm step 7.2")
    assert meet(SRUN | {"SLURM_STEP_NODELIST": "gpu04"}).address == f"127.0.0.1:{port_of(7, 2)}"
    assert meet(SRUN | {"MASTER_ADDR": "10.0.0.3"}).address == f"10.0.0.3:{port_of(7, 2)}"
    assert meet(SRUN | {"MASTER_PORT": "29500"}).address == "gpu03:29500"
    assert meet(SRUN | {"RINGFORT_MASTER": "a:1"}) == MeetingPoint("a:1")


def test_ranks_of_an_mpiexec_meet_on_their_host() -> None:
    here = meet(OPEN_MPI)
    other = meet(OPEN_MPI | {"PMIX_NAMESPACE": "prterun-ws-29241@1"})
    assert here.address is not None
    assert re.fullmatch(r"127\.0\.0\.1:\d{5}", here.address)
    assert here.address != other.address
    assert (here.group, other.group) == ("mpiexec prterun-ws-29240@1", "mpiexec prterun-ws-29241@1")


def test_ranks_that_a_proxy_of_mpich_has_started_meet_at_its_port() -> None:
    # As the proxy does: a session for each rank. Here it is this process, with a shell between it and the program.
    program = "import os; from tests.unit.test_launchers import meet; print(*meet(dict(os.environ)))"
    shell = f"{shlex.quote(sys.executable)} -c {shlex.quote(program)}; exit $?"
    told = subprocess.run(
        ["/bin/sh", "-c", shell],
        start_new_session=True,
        env={**os.environ, **MPICH},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert told.stdout.strip() == f"127.0.0.1:{port_of(os.getpid())} mpiexec {os.getpid()}"


@pytest.mark.parametrize(
    ("variables", "missing", "advice"),
    [
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "MASTER_ADDR", "mpiexec -x MASTER_ADDR=..."),
        (MPICH | {"MPI_LOCALNRANKS": "2"}, "MASTER_ADDR", "mpiexec -genv MASTER_ADDR ..."),
        (MPICH | {"MPI_LOCALNRANKS": "2", "MASTER_ADDR": "a"}, "MASTER_PORT", "mpiexec -genv MASTER_ADDR ..."),
        (SRUN | {"SLURM_STEP_NODELIST": ""}, "MASTER_ADDR", "export MASTER_ADDR=..."),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT", "MASTER_ADDR=a is set, and MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_ADDR", "MASTER_PORT=1 is set, and MASTER_ADDR"),
    ],
)
def test_what_a_launcher_does_not_tell_is_named(variables: dict[str, str], missing: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(advice)) as raised:
        meet(variables)
    assert raised.value.name == missing


def test_several_hosts_with_an_address_need_no_port_under_open_mpi() -> None:
    found = meet(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "10.0.0.1"})
    assert found.address == meet(OPEN_MPI).address.replace("127.0.0.1", "10.0.0.1")  # type: ignore[union-attr]


def test_a_rank_that_is_alone_needs_no_address() -> None:
    assert meet(MPICH | {"PMI_SIZE": "1", "PMI_RANK": "0"}).address is None
    assert meet({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a"}).address is None


def test_peers_of_a_step_are_its_hosts_unless_others_are_named() -> None:
    assert Environment.from_mapping(SRUN).contacts == ("gpu03", "gpu04")
    assert Environment.from_mapping(SRUN | {"RINGFORT_PEERS": "a:1"}).contacts == ("a:1",)
    assert Environment.from_mapping(SRUN | {"SLURM_STEP_NODELIST": "gpu03"}).contacts == ()
    assert Environment.from_mapping({}).contacts == ()


def test_the_first_steps_of_jobs_in_a_row_have_different_ports() -> None:
    places = [(job, step) for job in range(70_000, 70_198) for step in range(101)]
    assert len({port_of(*place) for place in places}) == len(places)
    assert port_of(70_000, 2) == port_of(70_198, 4)  # there are 20,000, so further apart some are the same
