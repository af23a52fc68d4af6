"""Elastic runs of models that are sharded over the local ranks of a machine: real processes, on loopback."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.torch.sharded_scenarios import DATA, plain
from tests.torch.zygote import Outcome, Zygote

STEPS = DATA.samples // DATA.batch
"""Of a pass."""
PATIENCE = 100
"""Seconds for what takes ten on an idle machine."""
Plan = list[dict[str, Any]]


@pytest.fixture
def hurried(tmp_path: Path) -> Path:
    """Where the processes of a test meet that are in a hurry."""
    (tmp_path / "hurry").touch()
    return tmp_path


def machine(name: str, ranks: int, **options: Any) -> Plan:
    """The plan of a machine with so many local ranks; with 0, of one process whose model is not sharded."""
    return [{"machine": name, "ranks": ranks, "rank": rank, **options} for rank in range(max(1, ranks))]


def outcomes(zygote: Zygote, folder: Path, *plans: Plan, **options: Any) -> list[Outcome]:
    every = [{"name": f"{os.getpid()}-{folder.name}", **options, **one} for plan in plans for one in plan]
    variables = {"RINGFORT_HOME": str(folder / "home")}
    scenario = "torch.sharded_scenarios.machines"
    return zygote.outcomes(scenario, len(every), str(folder), every, patience=PATIENCE, **variables)


def results(found: list[Outcome]) -> list[dict[str, Any]]:
    for outcome in found:
        assert outcome.code == 0, outcome.words
    return [outcome.value for outcome in found]


def close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        for row, wanted in zip(found[name], values, strict=True):
            assert row == pytest.approx(wanted, rel=1e-4, abs=1e-6), name


def test_a_machine_dies_with_one_of_its_local_ranks_and_joins_again(zygote: Zygote, tmp_path: Path) -> None:
    passes = 12
    first, second = machine("one", 2), machine("other", 2)
    second[1]["gets"] = "SIGKILL"
    found = outcomes(zygote, tmp_path, first, second, machine("again", 2, waits_for="alone"), epochs=passes)
    # The other local rank ends with an error that says why.
    assert (found[2].code, found[3].code) == (1, -signal.SIGKILL)
    assert "Lost local rank 1" in found[2].words or "Connection closed by peer" in found[2].words
    every = results(found[:2] + found[4:])
    for one in every:
        assert one["is_sharded"]
        assert one["done"] == passes * STEPS
        assert one["seen"] == pytest.approx([passes] * DATA.samples)
        assert {**one, "steps": 0} == {**every[0], "steps": 0}  # to the bit
    assert every[0]["steps"] == list(range(1, passes * STEPS + 1))
    close(every[0]["weights"], plain("adam", passes))


def test_a_machine_leaves_after_its_step_when_one_of_its_local_ranks_is_asked_to_end(
    zygote: Zygote, hurried: Path
) -> None:
    (hurried / "two").touch()
    asked = machine("asked", 2)
    asked[1]["gets"] = "SIGTERM"
    for outcome in outcomes(zygote, hurried, asked, epochs=1000):
        # All end as that rank does: none of them can go on alone.
        assert (outcome.code, "SystemExit: 143" in outcome.words) == (1, True), outcome.words
        assert "Lost" not in outcome.words


def test_machines_with_other_numbers_of_local_ranks_are_members_of_one_run(zygote: Zygote, hurried: Path) -> None:
    plans = machine("four", 4, strategy="HYBRID_SHARD(2)"), machine("one", 1, strategy="FULL_SHARD"), machine("", 0)
    options = {"epochs": 2, "nodes": "3:", "optimizer": "sgd", "clip_norm": 0.05, "scale": 8.0, "microbatch": 2}
    every = results(outcomes(zygote, hurried, *plans, **options))
    assert [one["is_sharded"] for one in every] == [True] * 5 + [False]
    for one in every:
        assert one["steps"] == list(range(1, 2 * STEPS + 1))
        close(one["weights"], plain("sgd", 2, 0.05))


def test_a_sharded_machine_continues_from_the_checkpoint_of_an_unsharded_one(zygote: Zygote, hurried: Path) -> None:
    saved = str(hurried / "saved")
    results(outcomes(zygote, hurried, machine("whole", 0), epochs=1, checkpoint=saved))
    sharded = machine("sharded", 2, backend="ringfort", workers=1)
    one, other = results(outcomes(zygote, hurried, sharded, epochs=2, checkpoint=saved))
    assert one == other
    assert one["steps"] == list(range(STEPS + 1, 2 * STEPS + 1))
    assert one["seen"] == pytest.approx([2] * DATA.samples)
    close(one["weights"], plain("adam", 2))


def test_statistics_of_all_local_ranks_are_averaged_and_padding_alone_counts_nothing(
    zygote: Zygote, hurried: Path
) -> None:
    norms = machine("norms", 2, has_norm=True, microbatch=8)
    one, other = results(outcomes(zygote, hurried, norms, epochs=1))
    assert one == other
    assert one["weights"]["layers.1.num_batches_tracked"] == STEPS
    assert one["weights"]["layers.1.running_mean"] != [0.0] * 5
    padded = machine("padded", 2, has_padding=True, microbatch=8)
    one, other = results(outcomes(zygote, hurried, padded, epochs=1, name=f"{os.getpid()}-padded"))
    assert one == other
    assert sorted(one["seen"]) == pytest.approx([0] * 48 + [2] * 48)  # half of the samples, with twice the weight


def test_shards_that_are_not_those_of_one_machine_are_refused(zygote: Zygote) -> None:
    expected = [
        "its shards are on several machines, and a machine that leaves would take its shards with it",
        "its shards are on several machines, and a machine that leaves would take its shards with it",
        "its mesh must have all 4 ranks of the default process group",
        "model='frozen.weight': is a DTensor that fully_shard does not manage",
        "model='seen.weight': is trained but not sharded; freeze it, or shard it too",
    ]
    for said in zygote.run("torch.sharded_scenarios.refused", 4, RINGFORT_INTERFACES="127.0.0.1"):
        for words, part in zip(said, expected, strict=True):
            assert part in words


def test_a_sharded_model_needs_the_backward_of_the_run(zygote: Zygote, tmp_path: Path) -> None:
    name, home = f"{os.getpid()}-unweighted", str(tmp_path / "home")
    for said in zygote.run("torch.sharded_scenarios.unweighted", 2, name, RINGFORT_HOME=home):
        assert "a sharded model needs run.backward(loss)" in said
