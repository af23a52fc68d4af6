"""Writes docs/performance.md and its pictures from the numbers that the sections left."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.claims import verdicts
from benchmarks.gpu import gpu_part
from benchmarks.parts import connections_part, hosts_part, line_share, overlap_part, scaling_part, table, torch_part
from benchmarks.pictures import draw_times
from benchmarks.rpc import rpc_part
from benchmarks.sections import SECTIONS
from ringfort.bench.engines import ENGINES
from ringfort.bench.results import OURS, Report, Row
from ringfort.bench.tables import duration, size

Results = Mapping[str, Mapping[str, Any]]

METHOD = """\
- Every engine has its own processes, one per rank. The engines are measured alternately: in each round every engine
  makes calls for 20 milliseconds, or one call if that takes longer, and sleeps until the next round; every other round
  runs in reverse order. So a disturbance of the machine affects all engines alike.
- The time of a call is that of its slowest rank, from that rank's start to its end. Tables have the median of all calls
  and the 10th to 90th percentile. A **ratio** is the other engine's median divided by ours: above 1 we are faster. In
  brackets are the 10th and 90th percentile of the ratios of single rounds.
- Before anything is timed, the result of each engine is compared with the known one. Buffers are float32 unless stated
  otherwise, and are summed in place (MLX's arrays are immutable, so each call makes a new one).
- Our rings are pipelined: a rank passes on what arrives while it arrives, so the 2(n-1) steps of a ring overlap. The
  limit `sockets` moves as many bytes in a single step.
- Each rank has one thread for arithmetic, also in torch. Garbage collection is off while calls are timed, as in
  `timeit`.
- With more ranks than cores, the scheduler is measured too: trust the ratios, not the times.
- The host of a virtual machine may move its cores apart. On the machine below, writing to memory that the other core
  wrote last ran sometimes at 58 GB/s and sometimes at 20 GB/s, for seconds each, and 256 MiB over TCP took 75 or 190 ms
  accordingly, with any engine (measured on 2026-11-15). So results of different runs may differ by more than the effect
  of a change.
"""

COMPARISONS = (
    ("Encrypted TCP against others over TCP", "tcp", ("gloo", "mlx")),
    ("TCP without encryption, and the limit", "plain", ("openmpi-tcp", "mpich-tcp", "gloo", "sockets")),
    ("Default settings (shared memory), and the limit", OURS, ("openmpi-shm", "mpich-shm", "gloo", "memcpy")),
)
"""Title, whom of ours, with whom it is compared."""


def write_page(results: Path, docs: Path) -> Path:
    """Write the page into `docs` and its pictures into `docs/images`; returns its path."""
    found = {
        section.name: json.loads(path.read_text(encoding="utf-8"))
        for section in SECTIONS
        if (path := results / f"{section.name}.json").exists()
    }
    images = docs / "images"
    images.mkdir(parents=True, exist_ok=True)
    path = docs / "performance.md"
    path.write_text("\n".join(_page(found, images)).rstrip() + "\n", encoding="utf-8")
    return path


def _page(found: Results, images: Path) -> Iterable[str]:
    reports = {
        name: [Report.from_dict(report) for report in result.get("reports", ())] for name, result in found.items()
    }
    yield "# Performance\n"
    yield "Written by `make bench` from the numbers in [benchmarks/results](../benchmarks/results); do not edit.\n"
    yield "Next: [Architecture](../ARCHITECTURE.md#what-made-it-fast), which explains these numbers.\n"
    yield from _claims(reports, found)
    yield "## Method\n"
    yield METHOD
    yield from _machine(found, [report for several in reports.values() for report in several])
    local = [report for name in ("two", "four") for report in reports.get(name, ())]
    if local:
        draw_times(local, images / "all-reduce.png")
    for section in SECTIONS:
        if section.name not in found:
            continue
        result = found[section.name]
        yield f"## {section.title}\n"
        if "skipped" in result:
            yield f"Not measured: {result['skipped']}.\n"
        elif section.name in ("two", "four", "four-large"):
            if reports[section.name][0] is local[0]:
                yield "![All-reduce: time against size, all engines](images/all-reduce.png)\n"
            yield from _local(reports[section.name][0])
        elif section.name == "halves":
            yield from _halves(reports["halves"])
        elif section.name == "hosts":
            yield from hosts_part(reports["hosts"][0], result["bits_per_second"], result["burst"])
        elif section.name == "scaling":
            yield from scaling_part(reports["scaling"][0], images)
        elif section.name == "connections":
            yield from connections_part(result)
        elif section.name == "torch":
            yield from torch_part(result)
        elif section.name == "gpu":
            yield from gpu_part(result)
        elif section.name == "rpc":
            yield from rpc_part(result)
        else:
            yield from overlap_part(result)


def _claims(reports: Mapping[str, Sequence[Report]], found: Results) -> Iterable[str]:
    hosts = found.get("hosts", {})
    share = line_share(reports["hosts"][0], hosts["bits_per_second"], hosts["burst"]) if reports.get("hosts") else None
    yield "## Claims and results\n"
    words = {True: "yes", False: "**no**", None: "-"}
    rows = [
        [one.text, one.bound, one.found, words[one.kept]]
        for one in verdicts(reports, share, found.get("torch", {}), found.get("gpu", {}))
    ]
    yield from table(["ratio of medians", "at least", "measured", "kept"], rows)


def _machine(found: Results, reports: Sequence[Report]) -> Iterable[str]:
    if not found:
        return
    machine = next(iter(found.values()))["machine"]
    versions = dict(machine["versions"])
    for report in reports:
        versions.update(report.machine["versions"])
    yield "## Machine and engines\n"
    cores = f"{machine['cores']} cores ({machine['threads']} threads)"
    yield f"{machine['processor']}, {cores}, {machine['memory_gib']} GiB; {machine['system']}.\n"
    yield ", ".join(f"{name} {number}" for name, number in versions.items()) + ".\n"
    used = dict.fromkeys([OURS, *(name for report in reports for name in report.options.against)])
    yield from table(["engine", "what it is and how it was set"], [[f"`{name}`", ENGINES[name].about] for name in used])
    runs = [run for one in found.values() for run in one.get("reports", ())]
    missing = {name: how for run in runs for name, how in run.get("missing", {}).items()}
    for name, how in missing.items():
        yield f"`{name}` was not installed (`{how}`).\n"
    failed = {name: why for report in reports for row in report.rows for name, why in row.skipped.items()}
    for name, why in failed.items():
        yield f"`{name}` was left out where it failed or has no such operation: {why[:200]}.\n"


def _local(report: Report) -> Iterable[str]:
    engines = [OURS, *report.options.against]
    yield "Medians:\n"
    rows = [[size(row.bytes), *(_time(row, name) for name in engines)] for row in report.rows]
    yield from table(["bytes", *(f"`{name}`" for name in engines)], rows)
    for title, ours, others in COMPARISONS:
        yield f"### {title}, {report.options.ranks[0]} ranks\n"
        yield from _compare(report, ours, [name for name in others if name in engines])


def _halves(reports: Sequence[Report]) -> Iterable[str]:
    yield "In our processes torch is loaded, as in programs that train with 16-bit floats, and may do the additions.\n"
    for report in reports:
        for ours in (OURS, "tcp"):
            yield f"### {report.options.dtype}, {'shared memory' if ours == OURS else 'encrypted TCP'}, against Gloo\n"
            yield from _compare(report, ours, [name for name in ("gloo",) if name in report.options.against])


def _compare(report: Report, ours: str, others: Sequence[str]) -> Iterable[str]:
    rows = [
        [size(row.bytes), _time(row, ours, spread=True), *(_ratio(row, name, ours) for name in others)]
        for row in report.rows
    ]
    means = [report.geometric_means(name, ours).get("all") for name in others]
    rows.append(["geometric mean", "", *("-" if mean is None else f"{mean:.2f}" for mean in means)])
    yield from table(["bytes", f"`{ours}`", *(f"`{name}`, ratio" for name in others)], rows)


def _time(row: Row, engine: str, *, spread: bool = False) -> str:
    timing = row.timings.get(engine)
    if timing is None:
        return "-"
    middle = duration(timing.median_us)
    return f"{middle} ({duration(timing.p10_us)} to {duration(timing.p90_us)})" if spread else middle


def _ratio(row: Row, engine: str, ours: str) -> str:
    ratio, spread = row.ratio(engine, ours), row.ratio_spread(engine, ours)
    if ratio is None or spread is None:
        return "-"
    return f"{ratio:.2f} ({spread[0]:.2f} to {spread[1]:.2f})"
