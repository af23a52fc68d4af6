"""`ringfort bench --explain` as people run it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ringfort.bench.explain import Explained


@pytest.mark.parametrize("op", ["all_reduce", "reduce", "broadcast"])
def test_every_strategy_is_predicted_and_measured_and_one_is_chosen(op: str) -> None:
    command = [sys.executable, "-m", "ringfort.cli", "bench", "--explain", "--op", op, "--shared-memory", "off"]
    command += ["--sizes", "4,70000,2M", "--ranks", "3", "--connections", "2", "--repeat", "2", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [(row["bytes"], row["connections"]) for row in rows] == [(4, 1), (70000, 1), (1 << 21, 2)]
    assert "2 connections" in " ".join(done.stderr.split())
    for row in rows:
        assert set(row["measured"]) == {"auto", *row["predicted"]}
        assert row["chosen"] == min(row["predicted"], key=row["predicted"].__getitem__)
        assert all(time > 0 for time in (*row["predicted"].values(), *row["measured"].values()))
        assert row["auto_over_best"] == pytest.approx(row["measured"]["auto"] / row["measured"][row["best"]])
    for name in rows[0]["predicted"]:
        assert name in done.stderr


def test_auto_is_held_against_the_best_of_the_others() -> None:
    row = Explained(2, 4, "ring", {"ring": 1.0, "direct": 2.0}, {"auto": 15.0, "ring": 12.0, "direct": 10.0})
    assert row.best == "direct"
    assert row.over_best == 1.5
