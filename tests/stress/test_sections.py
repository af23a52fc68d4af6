"""The sections of the benchmark that only run on machines with many cores or a GPU, at their quickest and without
those, so that whoever has such a machine types one command; and that of fast wires."""

from __future__ import annotations

import pytest

from benchmarks import cores, cuda_steps
from benchmarks.namespaces import why_not
from benchmarks.sections import SECTIONS
from benchmarks.wire import RATES, WAYS


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


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_every_option_of_sockets_moves_all_bytes_over_every_wire() -> None:
    section = next(section for section in SECTIONS if section.name == "wire")
    cells = {(one["rate"], one["way"]): one for one in section.run(True, lambda step: None)["cells"]}
    assert set(cells) == {(rate, way) for rate in RATES for way in WAYS}
    assert all(one["ms"] > 50 * 8 / rate for (rate, _), one in cells.items()), "faster than the wire"
    assert cells[RATES[0], "zero copy"]["copied"] + cells[RATES[0], "zero copy"]["uncopied"] > 64
