"""Elastic runs of models that are sharded over local ranks, with parameters on a GPU, which the ranks share here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.torch.test_elastic_sharded import DATA, STEPS, close, machine, outcomes, plain, results
from tests.torch.zygote import Zygote


@pytest.fixture
def hurried(tmp_path: Path) -> Path:
    (tmp_path / "hurry").touch()
    return tmp_path


def test_a_sharded_and_an_unsharded_machine_learn_as_one_process_does(zygote: Zygote, hurried: Path) -> None:
    options: dict[str, Any] = {"device": "cuda", "epochs": 2, "nodes": "2:", "clip_norm": 0.05, "microbatch": 2}
    every = results(outcomes(zygote, hurried, machine("two", 2, backend="ringfort"), machine("", 0), **options))
    for one in every:
        assert one["steps"] == list(range(1, 2 * STEPS + 1))
        close(one["weights"], plain("adam", 2, 0.05))


def test_statistics_on_a_gpu_are_averaged_over_local_ranks(zygote: Zygote, hurried: Path) -> None:
    norms = machine("norms", 2, backend="ringfort", has_norm=True, microbatch=8, device="cuda")
    one, other = results(outcomes(zygote, hurried, norms, epochs=1))
    assert one == other
    assert one["weights"]["layers.1.num_batches_tracked"] == STEPS
    assert one["seen"] == pytest.approx([1] * DATA.samples)
