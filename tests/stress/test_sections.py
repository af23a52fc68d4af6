"""The sections of the benchmark that only run on machines with many cores or a GPU, at their quickest and without
those: so that whoever has such a machine types one command."""

from __future__ import annotations

import pytest

from benchmarks import cores, cuda_steps
from benchmarks.sections import SECTIONS


def test_the_section_of_many_cores_measures_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(cores, "why_not", lambda: None)
    section = next(section for section in SECTIONS if section.name == "cores")
    cells = section.run(True, lambda step: None)["cells"]
    assert {(one["way"], one["ranks"]) for one in cells} == {("tcp", 2), ("plain", 2), ("one", 2)}
    assert all(one["ratio"] > 0 and one["ms"] > 0 for one in cells)


def test_steps_are_measured_over_every_group_on_any_device() -> None:
    pytest.importorskip("torch")
    found = cuda_steps.measure(1, device="cpu", widths=(64, 128))
    assert [one["way"] for one in found["steps"]] == 2 * ["ringfort", "tcp", "gloo"]
    ratios = cuda_steps.ratios_of(found)
    assert len(ratios) == 6
    assert all(ratio > 0 for ratio in ratios.values())
    assert any("Gloo" in line for line in cuda_steps.cuda_steps_part(found))
