"""A machine without power closes no connection. A group with fixed ranks misses it after its patience, and no peer that
only computes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.namespaces import Lan, lan, needs_namespaces

pytestmark = needs_namespaces

PATIENCE = 1.0
"""Seconds."""
SLACK = 2.0
"""Seconds beyond the patience within which everybody must know."""


@contextmanager
def ranks(home: Path, *what: str) -> Iterator[tuple[Lan, list[subprocess.Popen[Any]]]]:
    with lan(2) as net:
        told = {
            "WORLD_SIZE": "2",
            "RINGFORT_MASTER": f"{net.hosts[0].address()}:29500",
            "RINGFORT_PATIENCE": str(PATIENCE),
            "RINGFORT_HOME": str(home),
        }
        yield (
            net,
            [
                host.start(
                    *(sys.executable, "-m", "tests.workers.patience", *what),
                    variables={**told, "RANK": str(rank)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for rank, host in enumerate(net.hosts)
            ],
        )


def next_line(process: subprocess.Popen[Any]) -> dict[str, Any]:
    line = process.stdout.readline()
    assert line, "it ended without a word"
    return json.loads(line)


@pytest.mark.parametrize(
    "what",
    [("lose", str(16 << 20)), ("wait",), ("call",)],
    ids=["in the middle of data", "while nothing is under way", "in a call"],
)
def test_a_machine_that_vanishes_is_lost_after_the_patience(what: tuple[str, ...], tmp_path: Path) -> None:
    with ranks(tmp_path, *what) as (net, (here, gone)):
        assert next_line(here)["began"]
        assert next_line(gone)["began"]
        net.cut(net.hosts[1])
        cut_at = time.monotonic()
        found = next_line(here)
        assert found["error"] in ("PeerLostError", "RpcPeerLostError")
        assert found["peer"] == 1
        print(f"lost after {found['at'] - cut_at:.2f} s: {found['words']}")
        assert PATIENCE / 2 < found["at"] - cut_at < PATIENCE + SLACK


def test_a_peer_that_computes_for_longer_than_the_patience_is_not_lost(tmp_path: Path) -> None:
    with ranks(tmp_path, "compute", "3") as (_, (sender, receiver)):
        assert next_line(receiver)["same"]
        assert [process.wait(30) for process in (sender, receiver)] == [0, 0]
