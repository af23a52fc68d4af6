"""Which ranks are on one machine, and that the id of a machine tells nothing about it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ringfort.errors import InvalidArgumentError
from ringfort.transport import machine
from ringfort.transport.machine import Machine, check_hosts, hosts_of, this_machine


def test_two_processes_of_one_machine_say_the_same() -> None:
    code = "from ringfort.transport.machine import this_machine; print(this_machine(shares=True).id.hex())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert bytes.fromhex(other.stdout) == this_machine(shares=True).id
    assert len(this_machine(shares=True).id) == 16


@pytest.mark.parametrize("changed", ["_BOOT_ID", "_NETWORK"])
def test_another_boot_or_another_network_is_another_machine(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not machine._BOOT_ID.exists():
        pytest.skip("not Linux")
    ours = this_machine(shares=True).id
    (tmp_path / "other").write_text("other\n")
    monkeypatch.setattr(machine, changed, tmp_path / "other")
    assert machine._machine_id.__wrapped__() != ours


def test_without_proc_the_machine_has_an_id_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_BOOT_ID", tmp_path / "missing")
    first, second = machine._machine_id.__wrapped__(), machine._machine_id.__wrapped__()
    assert first == second
    assert len(first) == 16


def test_ranks_are_grouped_by_machine_and_those_that_do_not_say_are_alone() -> None:
    a, b, silent = Machine(b"a"), Machine(b"b"), Machine()
    assert hosts_of(dict(enumerate([a, b, a, silent, b, silent]))) == (0, 1, 0, 3, 1, 5)


@pytest.mark.parametrize("hosts", [(0, 0), (0, 0, 0, 0), (1, 1, 1), (0, 2, 2), (0, 0, 1), (0, 0, -1), (0, 0, 3)])
def test_hosts_that_name_no_lowest_rank_are_refused(hosts: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="lowest rank on its host"):
        check_hosts(hosts, 3)
    assert check_hosts([0, 1, 1], 3) == (0, 1, 1)


@pytest.mark.parametrize(
    ("limit", "count"),
    [("200000 100000\n", 2), ("150000 100000\n", 2), ("50000 100000\n", 1), ("max 100000\n", 8), ("", 8), (None, 8)],
)
def test_a_container_that_may_use_less_time_has_fewer_cores(
    limit: str | None, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpu.max"
    if limit is not None:
        file.write_text(limit)
    monkeypatch.setattr(machine, "_CPU_LIMIT", file)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert machine.cores() == count
