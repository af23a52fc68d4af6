"""What each rank is told."""

from __future__ import annotations

import pytest

from ringfort.config import Environment
from ringfort.launch.agreement import Assignment
from ringfort.launch.messages import Place
from ringfort.launch.ranks import rank_variables

WISHES = ("OMP_NUM_THREADS", "PYTHONUNBUFFERED", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WISHES:
        monkeypatch.delenv(name, raising=False)


def assignment(local: int = 2, host: str = "10.0.0.1") -> Assignment:
    return Assignment(3, local, 6, 1, 2, Place(host, 1234, 1235))


def test_a_rank_is_told_its_place_by_torchruns_names() -> None:
    told = rank_variables(assignment(), 1)
    assert {name: told[name] for name in told if not name.startswith(("TORCH", "ROLE"))} == {
        "RANK": "4",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
        "RINGFORT_MASTER": "10.0.0.1:1235",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }


def test_ringfort_meets_at_its_own_port_and_leaves_torchs_alone() -> None:
    found = Environment.from_mapping(rank_variables(assignment(host="fd00::1"), 0))
    assert (found.rank, found.world_size, found.master) == (3, 6, "[fd00::1]:1235")
    assert (found.master_addr, found.master_port) == ("fd00::1", 1234)


def test_a_rank_alone_on_its_machine_may_use_all_cores() -> None:
    assert "OMP_NUM_THREADS" not in rank_variables(assignment(local=1), 0)


def test_gloo_and_nccl_are_told_the_interface() -> None:
    told = rank_variables(assignment(), 0, "eth1")
    assert told["GLOO_SOCKET_IFNAME"] == told["NCCL_SOCKET_IFNAME"] == "eth1"


def test_what_a_person_has_set_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WISHES:
        monkeypatch.setenv(name, "mine")
    assert not set(WISHES) & rank_variables(assignment(), 0, "eth1").keys()
