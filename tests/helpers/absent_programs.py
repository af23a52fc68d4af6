"""Programs of an elastic run that are away for a while, in processes of their own, and a bus for logind's word."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.elastic_programs import Program, Start, programs

__all__ = ["Start"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with programs("tests.workers.elastic_absence", tmp_path / "home") as begin:

        def start(bus: str = "unix:path=/nowhere", **arguments: Any) -> Program:
            return begin({"DBUS_SYSTEM_BUS_ADDRESS": bus}, folder=str(tmp_path), **arguments)

        yield start


@pytest.fixture
def logind(tmp_path: Path, bus: str) -> Iterator[Program]:
    """A program on the bus that says what logind would."""
    with programs("tests.workers.fake_logind", tmp_path / "home") as begin:
        program = begin({"DBUS_SYSTEM_BUS_ADDRESS": bus})
        program.until(lambda line: "ready" in line)
        yield program


def ends_well(folder: Path, *programs: Program) -> None:
    """Stop the run. All have applied each sample equally often."""
    (folder / "stop").touch()
    ends = [program.end() for program in programs]
    assert [program.process.returncode for program in programs] == [0] * len(programs)
    assert len({end["done"] for end in ends}) == 1
    assert [end["seen"] for end in ends] == [[ends[0]["done"] // 3]] * len(ends)


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[str]:
    """The address of a private bus."""
    if shutil.which("dbus-daemon") is None or find_spec("jeepney") is None:
        pytest.skip("needs dbus-daemon and jeepney")
    address = f"unix:path={tmp_path}/bus"
    command = ["dbus-daemon", "--session", "--nofork", "--nopidfile", "--print-address", f"--address={address}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
        try:
            assert daemon.stdout.readline().startswith(address)
            yield address
        finally:
            daemon.kill()
