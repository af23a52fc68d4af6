"""What real processes write into their traces: who waits for whom, and what for."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from socket import gethostname

import pytest

from ringfort.launch.local_ranks import LocalRanks
from tests.helpers.traces import by_rank
from tests.workers.phases import BATCH, COMPUTING, ELEMENTS, LOADING, STEPS

LIMIT = 60.0
"""Seconds for what takes two on an idle machine."""


def test_a_context_shows_who_computes_who_loads_and_who_waits(tmp_path: Path) -> None:
    variables = {"RINGFORT_TELEMETRY": str(tmp_path), "RINGFORT_SHM": "off"}
    with LocalRanks("tests.workers.phases", 2, ["context"], variables=variables) as ranks:
        assert not list(ranks.messages())
    slow, quick = by_rank(tmp_path)
    for rank, written in enumerate((slow, quick)):
        header = written.header
        assert (header.rank, header.world_size, header.program) == (rank, 2, "phases.py")
        assert header.gradient_bytes == 4 * ELEMENTS
        assert 0 < header.codec_seconds["int8"] < header.codec_seconds["int4"] < 1e-3
        assert written.step == STEPS
        assert written.numbers == list(range(1, STEPS + 1))  # the loader has said when the first one began
        assert written.samples == [4 + rank] * STEPS
        assert written.values["loss"] == {number: pytest.approx(1 / number) for number in written.numbers}
        assert written.sent[-1].sent[1 - rank] > 4 * ELEMENTS
        assert written.sent[-1].received > 4 * ELEMENTS
    assert min(step.compute for step in slow.steps) > 0.9 * COMPUTING
    assert min(step.data for step in quick.steps) > 0.9 * LOADING
    assert quick.usual("exchange") > max(0.01, slow.least("exchange"))  # it waits while the other computes
    assert not slow.total("seal")


def test_an_elastic_run_writes_steps_seals_samples_and_events(tmp_path: Path) -> None:
    variables = {**os.environ, "RINGFORT_TELEMETRY": str(tmp_path), "RINGFORT_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "tests.workers.phases", "elastic", str(tmp_path)]
    with ExitStack() as stack:
        for process in [stack.enter_context(subprocess.Popen(command, env=variables)) for _ in range(2)]:
            assert process.wait(LIMIT) == 0
    slow, quick = sorted(by_rank(tmp_path), key=lambda written: -written.values["slow"][STEPS])
    assert {slow.header.rank, quick.header.rank} == {0, 1}
    for written in (slow, quick):
        header = written.header
        assert (header.world_size, header.run, header.total_steps) == (2, "watched", STEPS)
        assert header.epoch >= 1
        assert header.gradient_bytes >= 8 * ELEMENTS
        assert written.step == STEPS
        assert written.numbers == list(range(1, STEPS + 1))
        assert min(step.seal for step in written.steps) > 0
        assert set(written.values["loss"].values()) == {1.0}
        assert "epoch" in [kind for kind, _ in written.events]
    saved = [text for written in (slow, quick) for kind, text in written.events if kind == "checkpoint"]
    assert f"{gethostname()} has saved step {STEPS}" in saved
    # Together they take each sample of a step once.
    assert [mine + theirs for mine, theirs in zip(slow.samples, quick.samples, strict=True)] == [BATCH] * STEPS
    computing = sum(COMPUTING * samples / 4 for samples in slow.samples)
    assert slow.total("compute") > 0.9 * computing
    assert slow.total("seconds") < quick.total("seconds")  # which has waited for the other, that was aside
    assert quick.usual("exchange") > max(0.01, slow.least("exchange"))  # it waits while the other computes
