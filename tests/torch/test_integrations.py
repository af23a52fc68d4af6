"""Accelerate and Lightning in elastic runs: their examples, of which a member is killed in the middle and comes back;
and what each does in a run of one member."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringfort.training.elastic import checkpoint_export as export
from ringfort.training.elastic.sample_order import sample_order
from tests.helpers.forked_examples import Example, Forker

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed: pip install torch")

ROOT = Path(__file__).parents[2]
EPOCHS = 4
PASS = re.compile(r"^step (\d+): loss", re.MULTILINE)
LAST = re.compile(r"done at step (\d+), weights ([0-9a-f]{16})")


def trained(program: dict[str, Any], epochs: int) -> dict[str, Any]:
    """The weights after a plain loop over the samples in the order of the run, each once per pass."""
    import torch
    from torch.nn.functional import mse_loss
    from torch.optim.lr_scheduler import LinearLR

    model, (x, y), batch = program["network"](), program["product"]().tensors, program["BATCH"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = LinearLR(optimizer, 1.0, 0.1, total_iters=200)
    for epoch in range(epochs):
        for begin in range(0, len(x), batch):
            part = sample_order(0, epoch, len(x), begin, min(begin + batch, len(x)))
            optimizer.zero_grad()
            mse_loss(model(x[part]), y[part]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def exported(folder: Path, prefix: str) -> dict[str, Any]:
    """The weights of the newest checkpoint of a member, as other programs read them."""
    from safetensors.numpy import load_file

    checkpoint, image = export.read_newest(folder, None, pytest.fail)
    export.write(folder / "weights", image, export.select(checkpoint), checkpoint.stamp)
    return {name.removeprefix(prefix): weight for name, weight in load_file(folder / "weights").items()}


def forker(library: str, folder: Path) -> Iterator[Forker]:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install {library}")
    (folder / "home").mkdir(0o700)
    with closing(Forker(folder, f"ringfort.integrations.{library}", library)) as process:
        yield process


@pytest.fixture(scope="module")
def accelerate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    yield from forker("accelerate", tmp_path_factory.mktemp("accelerate"))


@pytest.fixture(scope="module")
def lightning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    yield from forker("lightning", tmp_path_factory.mktemp("lightning"))


def survives(process: Forker, program: Path, folder: Path, prefix: str) -> None:
    """Start three members, kill one in the middle, start it again, and check what they end with."""

    def start(number: int) -> Example:
        # With fewer than three, the run waits: so the one that comes back is needed for the end.
        launcher = {"RINGFORT_ELASTIC_NODES": "3", "RINGFORT_INTERFACES": "127.0.0.1", "LOCAL_RANK": "0"}
        arguments = ["--epochs", str(EPOCHS), "--checkpoint", str(folder / f"run{number}"), "--pause", "0.01"]
        return process.start(program, *arguments, **launcher)

    members = [start(number) for number in range(3)]
    members[1].says("step 16: loss")
    assert "done" not in members[1].words
    members[1].kill()
    members[1] = start(1)
    codes = [member.end() for member in members]
    assert codes == [0, 0, 0], "\n\n".join(member.words for member in members)
    # At the end of a pass a member has all of its steps, those without a part of it too.
    assert {int(step) % 16 for member in members for step in PASS.findall(member.words)} == {0}
    ends = [LAST.findall(member.words) for member in members]
    assert ends[0][0][0] == str(16 * EPOCHS)
    assert ends == [ends[0]] * 3
    expected = trained(runpy.run_path(str(program)), EPOCHS)
    for number in range(3):
        weights = exported(folder / f"run{number}", prefix)
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            np.testing.assert_allclose(weight, expected[name], rtol=1e-4, atol=1e-5)


def seen(process: Forker, program: str, *arguments: str) -> Any:
    """What a program of tests/workers, or of this folder, has seen as the only member of a run."""
    path = ROOT / "tests" / "workers" / f"{program}.py"
    path = path if path.exists() else Path(__file__).with_name(f"{program}.py")
    member = process.start(path, *arguments, RINGFORT_INTERFACES="127.0.0.1")
    assert member.end() == 0, member.words
    return json.loads(member.words.partition("\nseen ")[2] or member.words.partition("seen ")[2])


# --- Accelerate -------------------------------------------------------------------------------------------------------


def test_under_accelerate_a_killed_member_comes_back_and_all_have_the_same_weights(
    accelerate: Forker, tmp_path: Path
) -> None:
    survives(accelerate, ROOT / "examples" / "elastic_accelerate.py", tmp_path, "")


def test_the_loop_of_accelerate_is_one_pass_per_for(accelerate: Forker) -> None:
    found = seen(accelerate, "accelerate_cases", "passes")
    assert (found["samples"], found["step"], found["length"]) == ([90, 90, 90, 0], 3, 12)
    assert (found["type"], found["inside"]) == ("torch.float32", "torch.bfloat16")
    assert found["rate"] == [0.5**4]  # stepped by the run, and not by the loop too
    assert found["weights"] == pytest.approx(found["plain"], abs=2e-3)  # of bfloat16


def test_with_local_steps_accelerate_has_the_same_passes(accelerate: Forker) -> None:
    found = seen(accelerate, "accelerate_cases", "rounds")
    assert found == {"samples": [90, 90, 0], "length": 12, "rounds": 2 * 2}  # of 6 steps


def test_with_steps_it_is_the_whole_run_and_losses_are_scaled_once(accelerate: Forker) -> None:
    found = seen(accelerate, "accelerate_cases", "steps")
    assert (found["samples"], found["again"], found["step"]) == (450, 0, 5)
    assert found["weights"] == pytest.approx(found["plain"], rel=1e-4)


def test_a_loop_of_accelerate_that_is_left_goes_on_with_what_it_has_not_computed(
    accelerate: Forker, tmp_path: Path
) -> None:
    found = seen(accelerate, "integration_cases", "accelerate", str(tmp_path))
    assert (found["length"], found["size"], found["is_same"]) == (12, 8, True)
    assert (found["counted"], found["times"], found["step"]) == ([5, 7, 12, 0], [2], 6)
    assert "pass it as scheduler=" in found["scheduler"]


def test_what_accelerate_cannot_do_in_a_run_is_refused(accelerate: Forker) -> None:
    words = {
        "neither": "give either epochs= or steps=",
        "both": "give either epochs= or steps=",
        "sampler": "must be the default",
        "accumulate": "gradient_accumulation_steps=2: must be 1",
        "processes": "num_processes=2: must be 1",
        "clip": "pass clip_norm=2.0 to prepare()",
        "infinite": "only norm_type=2 is supported",
        "same": "none",
        "value": "clips by norm alone",
    }
    found = seen(accelerate, "accelerate_cases", "refusals")
    assert found.keys() == words.keys()
    assert {name: word in found[name] for name, word in words.items()} == dict.fromkeys(words, True), found


# --- Lightning --------------------------------------------------------------------------------------------------------


def test_under_lightning_a_killed_member_comes_back_and_all_have_the_same_weights(
    lightning: Forker, tmp_path: Path
) -> None:
    survives(lightning, ROOT / "examples" / "elastic_lightning.py", tmp_path, "network.")


def test_a_batch_of_lightning_is_a_step_of_the_run(lightning: Forker, tmp_path: Path) -> None:
    found = seen(lightning, "lightning_cases", "whole", str(tmp_path))
    first, again = found["first"], found["again"]
    assert first["batches"] == [[0, 0, 1], [0, 1, 2], [0, 2, 3], [1, 0, 4], [1, 1, 5], [1, 2, 6]]
    assert first["epochs"] == [[0, 3, 2], [1, 6, 4]]  # epoch, step, batches of the validation
    assert first["counted"] == {"training_step": 24, "samples": 180, "validation_step": 4}
    assert (first["step"], first["epoch"], first["estimate"], first["rate"]) == (6, 2, 6, 0.125)
    assert first["saved"] == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]
    heading, *rows = [line.split(",") for line in first["log"].splitlines()]
    logged = [dict(zip(heading, row, strict=True)) for row in rows]
    assert [row["step"] for row in logged if row["train_step"]] == ["0", "1", "2", "3", "4", "5"]
    assert [row["lr-SGD"] for row in logged if row["lr-SGD"]] == ["0.5", "0.25"]
    # The same program after the end of the run gets the final state, and trains nothing.
    assert (again["batches"], again["counted"], again["step"], again["epoch"]) == ([], {}, 6, 2)
    assert again["weights"] == first["weights"]


def test_with_local_steps_lightning_counts_the_optimizer_steps_of_rounds(lightning: Forker, tmp_path: Path) -> None:
    found = seen(lightning, "lightning_cases", "rounds", str(tmp_path))
    local, auto = found["local"], found["auto"]
    assert local["batches"] == [[0, 3, 4], [0, 7, 8], [0, 11, 12], [1, 3, 16], [1, 7, 20], [1, 11, 24]]
    assert local["epochs"] == [[0, 12, 2], [1, 24, 4]]  # epoch, step, batches of the validation
    assert (local["samples"], local["step"], local["estimate"], local["rate"]) == (180, 24, 24, 0.125)
    assert local["logged"] == [4, 9, 14, 19]  # as without rounds, one by one
    assert auto["batches"] == [[0, 5, 6], [0, 11, 12], [1, 5, 18]]  # the last round goes beyond step 14
    assert (auto["epochs"][0], auto["samples"], auto["estimate"]) == ([0, 12, 2], 90 + 48, 14)


def test_lightning_scales_losses_once_and_clips_the_mean(lightning: Forker, tmp_path: Path) -> None:
    found = seen(lightning, "lightning_cases", "precision", str(tmp_path))
    assert found["step"] == 3
    assert found["weights"] == pytest.approx(found["plain"], abs=2e-3)  # of float16


def test_a_training_step_without_a_loss_counts_nothing(lightning: Forker, tmp_path: Path) -> None:
    found = seen(lightning, "lightning_cases", "skipping", str(tmp_path))
    assert (found["counted"]["called"], found["counted"]["training_step"], found["step"]) == (12, 6, 3)


def test_lightning_leaves_sigterm_to_the_run_which_may_be_waiting(lightning: Forker) -> None:
    variables = {"RINGFORT_ELASTIC_NODES": "2", "RINGFORT_INTERFACES": "127.0.0.1"}
    member = lightning.start(ROOT / "examples" / "elastic_lightning.py", **variables)
    member.says("Waiting")
    os.kill(member.pid, signal.SIGTERM)
    assert member.end() in (-signal.SIGTERM, 128 + signal.SIGTERM), member.words


def test_what_lightning_cannot_do_in_a_run_is_refused(lightning: Forker, tmp_path: Path) -> None:
    words = {
        "hook": "optimizer_step='Hooked': is not called in a run",
        "plateau": "lr_scheduler='ReduceLROnPlateau'",
        "manual": "automatic_optimization=False",
        "accumulate": "accumulate_grad_batches=2",
        "limit": "limit_train_batches=2",
        "value": "gradient_clip_algorithm='value'",
        "endless": "max_epochs=-1",
        "devices": "devices=2: must be 1",
        "two": "must be one DataLoader",
        "sampler": "sampler='list'",
        "ckpt": "ckpt_path=",
    }
    found = seen(lightning, "lightning_cases", "refusals", str(tmp_path))
    assert found.keys() == words.keys()
    assert {name: word in found[name] for name, word in words.items()} == dict.fromkeys(words, True), found


def test_callbacks_of_lightning_that_change_one_machine_alone_and_a_second_fit_are_refused(
    lightning: Forker, tmp_path: Path
) -> None:
    found = seen(lightning, "integration_cases", "lightning", str(tmp_path))
    for name, words in found["refused"].items():
        assert f"callbacks='{name}'" in words
        assert "on_step= of ElasticStrategy" in words
    assert {"StochasticWeightAveraging", "Unfreezing", "GradientAccumulationScheduler"} <= found["refused"].keys()
    assert "this strategy has had its run" in found["again"]
    assert found["before"] == found["after"] == [3, 12]
    assert found["longer"] == [9, 36]  # another Trainer continues from the checkpoint


def test_lightning_knows_the_strategies_by_name(lightning: Forker, tmp_path: Path) -> None:
    found = seen(lightning, "integration_cases", "names", str(tmp_path))
    samples = found["of"]
    assert found["steps"] == found["plain"] == -(-samples // 32)
    assert sum(found["sizes"]) == samples
    assert set(found["sizes"][:8]) == {4}  # an eighth of a step
    assert found["backend"] == "ringfort"
