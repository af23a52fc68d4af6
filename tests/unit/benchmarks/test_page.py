"""The page of the benchmark says what the numbers say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cores
from benchmarks.__main__ import measure
from benchmarks.claims import CLAIMS, Verdict, verdicts, verdicts_with_cores
from benchmarks.page import write_page
from benchmarks.parts import line_share, payload_share
from benchmarks.sections import Section
from ringfort.bench.engines import OTHERS
from ringfort.bench.options import Options
from ringfort.bench.results import Report, Row, Timing

MIB = 1 << 20
MACHINE = {
    "processor": "Some CPU",
    "cores": 2,
    "threads": 2,
    "memory_gib": 8.0,
    "load_at_start": 0.1,
    "system": "Linux",
    "versions": {"python": "3.11"},
}


def row(ranks: int, nbytes: int, **medians: float) -> Row:
    timings = {name.replace("_", "-"): Timing(3, us, us, us, [us, us, us]) for name, us in medians.items()}
    return Row(ranks, nbytes, timings)


def report(*rows: Row, against: tuple[str, ...] = OTHERS, ranks: tuple[int, ...] = (2,)) -> Report:
    return Report(Options(against=against, ranks=ranks), MACHINE, rows)


def on_a_machine(results: Path, name: str, result: Mapping[str, Any]) -> None:
    (results / "some").mkdir(parents=True, exist_ok=True)
    (results / "some" / f"{name}.json").write_text(json.dumps(result))


def test_a_claim_is_judged_at_its_worst_size_and_only_at_its_sizes() -> None:
    found = report(row(2, 4, tcp=10, gloo=30), row(2, 16 * MIB, tcp=10, gloo=11))
    by_text = {one.text: one for one in verdicts({"two": [found]}, None)}
    gloo = "2 ranks, encrypted TCP against plaintext Gloo"
    assert by_text[f"{gloo}: every size"].kept is True
    assert by_text[f"{gloo}: every size"].found == "1.10 at the least, at 16 MiB"
    assert by_text[f"{gloo}: geometric mean"].kept is False
    assert by_text[f"{gloo}: from 16 MiB"].kept is False


def test_what_was_not_measured_is_neither_kept_nor_broken() -> None:
    found = verdicts({}, None)
    assert len(found) == len(CLAIMS) + 4  # the share of a line, and three of torch
    found += verdicts_with_cores({}, {}, {})
    assert {(one.kept, one.found) for one in found} == {(None, "not measured")}


def test_a_claim_of_several_runs_is_judged_by_their_median_at_each_size() -> None:
    def judged(*ratios: float) -> Verdict:
        runs = [report(row(4, 16 * MIB, tcp=10, gloo=10 * one), row(4, 4, tcp=1, gloo=9)) for one in ratios]
        return next(one for one in verdicts({"repeated-four": runs}, None) if one.found != "not measured")

    assert judged(0.5, 1.1, 1.2, 0.9, 1.05)[2:] == ("1.05 at the least, at 16 MiB", True)
    assert judged(0.5, 1.1, 1.2, 0.9, 0.95)[2:] == ("0.95 at the least, at 16 MiB", False)
    assert judged(1.5, 1.5)[2:] == ("1.50 at the least, at 16 MiB, but only 2 runs", None)


def test_machines_with_cores_have_claims_of_their_own_and_stand_beside_others(tmp_path: Path) -> None:
    def run(options: Options) -> Report:
        rows = [
            row(ranks, size, tcp=100.0 * ranks, plain=50.0 * ranks, gloo=200.0)
            for ranks in options.ranks
            for size in options.sizes
        ]
        return Report(options, MACHINE, rows)

    cells = cores.measure(run, is_quick=False)
    steps = [
        {"parameters": 25_000_000, "way": way, "median_ms": ms}
        for way, ms in (("ringfort", 10), ("tcp", 40), ("gloo", 30))
    ]
    by_text = {one.text: one for one in verdicts_with_cores(cells, {"steps": steps}, {})}
    gloo = "encrypted TCP against plaintext Gloo"
    assert by_text[f"2 ranks, {gloo}: from 2 MiB"][2:] == ("1.00 at the least, at 2 MiB", False)
    assert by_text[f"8 ranks, {gloo}: below 2 MiB"][2:] == ("0.25 at the least, at 4 B", False)
    assert by_text["2 ranks, encrypted TCP, 256 MiB: GB/s each way"].found == f"{256 * MIB / 200e-6 / 1e9:.2f}"
    cuda = "2 ranks, a step of DistributedDataParallel on CUDA with 25 million parameters, encrypted TCP, against Gloo"
    assert by_text[cuda][2:] == ("0.75", False)

    many = {**MACHINE, "cores": 16, "threads": 16, "processor": "A large CPU"}
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "cores.json").write_text(json.dumps({**cells, "machine": many, "date": "2026-01-02"}))
    (tmp_path / "small").mkdir()
    two = report(row(2, 4, ringfort=10, tcp=20, plain=15, gloo=50))
    for name in ("two", "four"):
        result = {"reports": [two.to_dict()], "machine": MACHINE, "date": "2026-01-01"}
        (tmp_path / "small" / f"{name}.json").write_text(json.dumps(result))
    page = write_page(tmp_path, tmp_path).read_text()
    assert "| [`large`](#machine-large) | A large CPU | 16 | 2026-01-02 |" in page
    claims = page[page.index("### Claims on `large`") : page.index("## Method")]
    assert "8 ranks" in claims
    assert "Open MPI" not in claims
    assert page.index("## Machine `small`") < page.index("## Machine `large`")
    assert "On `small` these sections are older than 2026-11-18" in page
    assert "| 2 ranks, `connections=1` | - | - | - | - | 1 | 1 | 1 | 1 | 1 |" in page


def test_the_lines_share_leaves_out_what_the_shaper_let_through_at_once() -> None:
    # 1.5 MB in 10 ms, of which 0.5 MB were free, is 0.8 Gbit/s.
    hosts = report(row(2, 1_500_000, ringfort=10_000.0))
    assert payload_share(hosts.rows[-1], "ringfort", 1e9, 500_000) == pytest.approx(0.8)
    assert line_share(hosts, 1e9, 500_000) == pytest.approx(0.8 * 1514 / 1448)


def test_the_page_has_every_section_that_was_measured_and_says_why_one_was_not(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results, docs = tmp_path / "results", tmp_path / "docs"
    two = report(row(2, 4, ringfort=10, tcp=20, plain=15, gloo=50, openmpi_shm=5, sockets=9))
    more = report(
        row(2, MIB, ringfort=10, plain=10), row(4, MIB, ringfort=30, plain=60), against=("plain",), ranks=(2, 4)
    )
    cells = [{"way": "tcp", "beside": "Python", "interval": 0.005, "median_ms": 42.0, "kept": 0.5}]
    given = {
        "two": {"reports": [{**two.to_dict(), "missing": {"mlx": "pip install it"}}]},
        "hosts": {"skipped": "network namespaces need root"},
        "scaling": {"reports": [more.to_dict()]},
        "overlap": {"bytes": MIB, "ranks": 2, "cells": cells},
    }
    for name, result in given.items():
        on_a_machine(results, name, {**result, "machine": MACHINE})
    text = write_page(results, docs).read_text()
    for part in (
        "| `tcp` | this library over TCP, encrypted",
        "| 4 B | 20.0 us (20.0 us to 20.0 us) | 2.50 (2.50 to 2.50) | - |",
        "`mlx` was not installed (`pip install it`)",
        "Not measured: network namespaces need root.",
        # Four ranks on two cores: 3 times as long is 1.5 times the cost a rank, and 6 times is 3.
        "| 4 | 1.50 | 1.50 (30.0 us) | 3.00 (60.0 us) |",
        "| 5 ms | 42.0 (kept 50%) |",
    ):
        assert part in text
    assert "Sixteen-bit" not in text
    assert {path.name for path in (docs / "images").iterdir()} == {"all-reduce-some.png", "scaling-some.png"}


def test_connections_are_shown_beside_one_connection(tmp_path: Path) -> None:
    cells = [
        {"network": network, "ranks": 2, "connections": way, "used": used, "median_ms": ms}
        for network in ("flows", "cables")
        for way, used, ms in ((1, 1, 800.0), (2, 2, 400.0), ("auto", 4, 200.0))
    ]
    result = {"bytes": 32 * MIB, "flow_rate": 2e8, "cable_rate": 4e8, "cells": cells, "machine": MACHINE}
    on_a_machine(tmp_path, "connections", result)
    page = write_page(tmp_path, tmp_path).read_text()
    assert "| 2 | 400 ms (2.00) | 400 ms (2.00) |" in page
    assert "| auto | 200 ms (4.00, took 4) | 200 ms (4.00, took 4) |" in page


def test_what_is_claimed_under_torch_is_judged_and_shown(tmp_path: Path) -> None:
    calls = [{"way": "tcp", "call": "all_reduce", "torch_us": 90.0, "context_us": 45.0}]
    steps = [
        {"way": way, "median_ms": ms, "p10_ms": ms, "p90_ms": ms}
        for way, ms in {"ringfort": 50.0, "tcp": 125.0, "gloo": 100.0, "copy": 40.0, "nothing": 25.0}.items()
    ]
    result = {"ranks": 2, "parameters": 25e6, "tokens": 8, "bytes": 4096, "calls": calls, "steps": steps}
    assert [(one.found, one.kept) for one in verdicts({}, None, result)[-3:]] == [
        ("0.80", False),
        ("0.80", False),
        ("45.0", False),
    ]
    on_a_machine(tmp_path, "torch", {**result, "machine": MACHINE})
    page = write_page(tmp_path, tmp_path).read_text()
    assert "| `all_reduce` | encrypted TCP | 90.0 us | 45.0 us | 45.0 us |" in page
    assert "| shared memory (default) | 50 ms (50 to 50) | 2.00 |" in page
    assert "| the limit: nothing sent | 25 ms (25 to 25) | 4.00 |" in page


def test_what_is_claimed_of_tensors_on_a_gpu_is_judged_and_shown(tmp_path: Path) -> None:
    ways = [
        {"way": "ringfort", "host_ms": 60.0, "device_ms": 80.0, "call_ms": 79.0, "ratio": 0.75},
        {"way": "16 MiB chunks", "host_ms": None, "device_ms": 75.0, "call_ms": 74.0, "ratio": 0.8},
    ]
    result = {
        "ranks": 2,
        "mib": 256,
        "rounds": 10,
        "date": "2026-01-02",
        "device": "Some GPU",
        "torch": "2.7",
        "cores": 16,
        "down_ms": 9.0,
        "up_ms": 8.0,
        "ways": ways,
        "small": [{"way": "gloo", "device_us": 600.0, "host_us": 200.0}],
    }
    last = verdicts_with_cores({}, {}, result)[-1]
    assert (last.bound, last.found, last.kept) == ("0.8", "0.75", False)
    on_a_machine(tmp_path, "gpu", {**result, "machine": MACHINE})
    page = write_page(tmp_path, tmp_path).read_text()
    assert "Measured on 2026-01-02 on a machine with one Some GPU" in page
    assert "| shared memory (default; 8 MiB chunks) | 60.0 ms | 80.0 ms | 0.75 |" in page
    assert "| 16 MiB chunks | - | 75.0 ms | 0.80 |" in page
    assert "| Gloo | 200 us | 600 us |" in page


def test_a_machine_that_cannot_measure_a_section_leaves_what_another_has_found(tmp_path: Path) -> None:
    section = Section("gpu", "Tensors on a GPU", lambda *_: {"skipped": "there is no GPU"})
    measure([section], tmp_path, quick=True)
    path = tmp_path / "gpu.json"
    assert json.loads(path.read_text())["skipped"] == "there is no GPU"
    path.write_text('{"ways": []}')
    measure([section], tmp_path, quick=True)
    assert json.loads(path.read_text()) == {"ways": []}
