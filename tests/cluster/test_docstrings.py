"""The examples in the docstrings of public names run as they stand, in a world of one."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ringfort
from ringfort.testing import run_ranks
from ringfort.training import average_gradients

NAMES = {**{name: getattr(ringfort, name) for name in ringfort.__all__}, "average_gradients": average_gradients}
SEES = {"np": np, "ringfort": ringfort, "run_ranks": run_ranks, **NAMES}
"""What a reader of the API reference has imported."""


def examples() -> Iterator[doctest.DocTest]:
    """Those of the public names and of their methods."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name, value in NAMES.items():
        if inspect.isclass(value) or inspect.isfunction(value):
            # The module is left out: the doctest finder then takes members that are imported there, too.
            yield from (found for found in finder.find(value, name, globs=dict(SEES)) if found.examples)


FOUND = list(examples())


def test_there_are_examples() -> None:
    names = {found.name for found in FOUND}
    assert {"init", "local", "elastic", "average_gradients", "DistributedContext"} <= names


@pytest.mark.parametrize("example", FOUND, ids=lambda found: found.name)
def test_an_example_runs(example: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFORT_HOME", str(tmp_path))
    monkeypatch.setenv("RINGFORT_INTERFACES", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    outcome = doctest.DocTestRunner().run(example, out=said.append, clear_globs=False)
    assert outcome.attempted
    assert outcome.failed == 0, "".join(said)
