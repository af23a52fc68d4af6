"""Compression between real processes: `auto` is on for a slow wire, off on one host; ranks of a host add up first."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.namespaces import lan, needs_namespaces

WORKER = (sys.executable, "-m", "tests.workers.compressed")


def variables(rank: int, address: str, home: Path, port: int = 29_555, world_size: int = 2) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "RINGFORT_HOME": str(home),
        "RINGFORT_TIMEOUT": "60",
    }


def answers(running: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for process in running:
        out, err = process.communicate(timeout=90)
        assert process.returncode == 0, err
        found.append(json.loads(out))
    return found


@needs_namespaces
@pytest.mark.parametrize(("asked", "expected"), [("auto", "int4"), ("auto(0.05)", "int8")])
def test_auto_compresses_on_a_slow_wire_and_says_why(tmp_path: Path, asked: str, expected: str) -> None:
    with lan(2) as net:
        for host in net.hosts:
            net.limit(host, 50)
        running = [
            host.start(
                *WORKER,
                asked,
                variables=variables(rank, net.hosts[0].address(), tmp_path),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, host in enumerate(net.hosts)
        ]
        one, other = answers(running)
    assert one["sum"] == other["sum"]
    assert one["said"] == other["said"]
    assert one["chosen"] == other["chosen"] == [expected]
    assert one["said"][0].startswith(f"Compression auto chose {expected} for 500000 elements: at ")
    assert "and no compression takes" in one["said"][0]


@pytest.mark.parametrize(("shared", "words"), [("on", "share memory"), ("off", "are on one host")])
def test_auto_is_off_on_one_host(tmp_path: Path, shared: str, words: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running: list[subprocess.Popen[str]] = []
    try:
        for rank in range(2):
            environment = {**os.environ, **variables(rank, "127.0.0.1", tmp_path, port), "RINGFORT_SHM": shared}
            running.append(
                subprocess.Popen(
                    [*WORKER, "auto"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
        one, other = answers(running)
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.communicate()
    assert one["sum"] == other["sum"]
    assert one["chosen"] == other["chosen"] == ["none"]
    assert words in one["said"][0]


@needs_namespaces
def test_ranks_of_a_host_send_what_one_would(tmp_path: Path) -> None:
    with lan(2) as net:
        address = net.hosts[0].address()
        running = [
            net.hosts[rank // 2].start(
                *WORKER,
                "int8",
                variables=variables(rank, address, tmp_path, world_size=4),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(4)
        ]
        found = answers(running)
        on_wire = int(net.hosts[0].run("cat", "/sys/class/net/eth0/statistics/tx_bytes"))
    assert len({one["sum"] for one in found}) == 1
    encoded = 3 * 500_000 * (1 + 4 / 512)  # three steps; 1.75 times as much if each rank compressed its own
    for host in (found[:2], found[2:]):
        assert encoded < sum(one["away"] for one in host) < 1.03 * encoded
    assert on_wire < 1.15 * encoded
