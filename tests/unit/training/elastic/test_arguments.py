"""The arguments of `ringfort.elastic()` and `ElasticRun.steps()`: invalid ones are named at the call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ringfort
from ringfort.errors import InvalidArgumentError

DATA: dict[str, Any] = {"samples": 10, "batch": 4, "microbatch": 2}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("nodes", "3:2", "1 <= MIN <= MAX"),
        ("nodes", 0, "1 <= MIN <= MAX"),
        ("nodes", "few", "must be MIN:MAX, such as 2:8"),
        ("name", "", "printable characters"),
        ("checkpoint", "", "path of a folder"),
        ("checkpoint", 3, "path of a folder"),
        ("checkpoint", "a\0b", "path of a folder"),
        ("checkpoint_every", 0, "at least 1"),
        ("keep", 1.5, "at least 1"),
        ("patience", float("nan"), "positive, finite"),
        ("nonfinite", "ignore", "error or skip"),
        ("machine_class", 3, "text"),
        ("config", {"interfaces": []}, "AutoDiscoveryConfig"),
        ("group", 3, "DistributedConfig"),
    ],
)
def test_an_invalid_argument_is_named(name: str, value: Any, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words) as raised:
        ringfort.elastic({"w": np.zeros(2)}, **{name: value})
    assert str(raised.value).startswith(f"{name}=")
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("checkpoint", [Path("run1"), "run1", None])
def test_a_folder_is_a_path_or_its_text(checkpoint: Any) -> None:
    ringfort.elastic({"w": np.zeros(2)}, checkpoint=checkpoint).close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value)
        for name in ("total", "samples", "batch", "batch_per_member", "microbatch", "seed")
        for value in ("x", 1.5, None, True, np.float64(2))
        if value is not None or name not in ("batch", "batch_per_member")
    ],
)
def test_a_number_that_is_not_whole_is_named(name: str, value: Any) -> None:
    given = {"total": 3, **DATA, name: value}
    if name == "batch_per_member":
        del given["batch"]
    with pytest.raises(InvalidArgumentError, match=f"^{name}=.*: must be a whole number"):
        ringfort.elastic({"w": np.zeros(2)}).steps(given.pop("total"), **given)


@pytest.mark.parametrize("given", [{}, {"batch": 8, "batch_per_member": 8}])
def test_a_step_has_a_batch_or_one_for_each_member(given: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="pass either batch="):
        ringfort.elastic({"w": np.zeros(2)}).steps(3, samples=8, microbatch=2, **given)


@pytest.mark.parametrize("name", ["batch", "batch_per_member"])
def test_a_batch_of_no_samples_is_named_as_it_was_passed(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{name}=0: must be a whole number of at least 1"):
        ringfort.elastic({"w": np.zeros(2)}).steps(3, samples=8, microbatch=2, **{name: 0})  # pyright: ignore[reportArgumentType]


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    run = ringfort.elastic({"w": np.zeros(2)})
    run.steps(np.int64(3), **{name: np.int32(value) for name, value in DATA.items()}, seed=np.uint8(1))  # pyright: ignore[reportArgumentType]
    run.close()
