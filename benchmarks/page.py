"""Writes docs/performance.md and its pictures from the numbers that the sections left."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import cores
from benchmarks.claims import verdicts, verdicts_with_cores
from benchmarks.cores import cores_part
from benchmarks.cuda_steps import cuda_steps_part
from benchmarks.gpu import gpu_part
from benchmarks.parts import connections_part, hosts_part, line_share, overlap_part, scaling_part, table, torch_part
from benchmarks.pictures import Pictures, draw_times
from benchmarks.rpc import rpc_part
from benchmarks.sections import SECTIONS
from benchmarks.wire import wire_part
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
- The host of a virtual machine may move its cores apart. On `2-cores`, writing to memory that the other core
  wrote last ran sometimes at 58 GB/s and sometimes at 20 GB/s, for seconds each, and 256 MiB over TCP took 75 or 190 ms
  accordingly, with any engine (measured on 2026-11-15). So results of different runs may differ by more than the effect
  of a change.
"""

CHANNELS = "2026-11-18"
"""Since when large all-reduces use several connections."""
LARGE_SECTIONS = (
    "two",
    "four",
    "four-large",
    "repeated-two",
    "repeated-four",
    "halves",
    "torch",
    "cores",
    "cuda-steps",
)
"""Those with large all-reduces over TCP."""
PARTS: Mapping[str, Callable[[Mapping[str, Any]], Iterable[str]]] = {
    "connections": connections_part,
    "cores": cores_part,
    "cuda-steps": cuda_steps_part,
    "gpu": gpu_part,
    "overlap": overlap_part,
    "rpc": rpc_part,
    "torch": torch_part,
    "wire": wire_part,
}
"""What writes the sections that are no reports of engines."""
COMPARISONS = (
    ("Encrypted TCP against others over TCP", "tcp", ("gloo", "mlx")),
    ("TCP without encryption, and the limit", "plain", ("openmpi-tcp", "mpich-tcp", "gloo", "sockets")),
    ("Default settings (shared memory), and the limit", OURS, ("openmpi-shm", "mpich-shm", "gloo", "memcpy")),
)
"""Title, whom of ours, with whom it is compared."""


def write_page(results: Path, docs: Path) -> Path:
    """Write the page into `docs` and its pictures into `docs/images`; returns its path. Each folder in `results` is a
    machine."""
    machines = {folder.name: _load(folder) for folder in sorted(results.iterdir()) if folder.is_dir()}
    # The one with most results first.
    order = sorted((name for name, found in machines.items() if found), key=lambda name: -len(machines[name]))
    images = docs / "images"
    images.mkdir(parents=True, exist_ok=True)
    path = docs / "performance.md"
    lines = _page({name: machines[name] for name in order}, images)
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return path


def _load(folder: Path) -> Results:
    return {
        section.name: json.loads(path.read_text(encoding="utf-8"))
        for section in SECTIONS
        if (path := folder / f"{section.name}.json").exists()
    }


def _page(machines: Mapping[str, Results], images: Path) -> Iterable[str]:
    yield "# Performance\n"
    yield "Written by `make bench` from the numbers in [benchmarks/results](../benchmarks/results); do not edit.\n"
    yield "Next: [Architecture](../ARCHITECTURE.md#what-made-it-fast), which explains these numbers.\n"
    yield from _names(machines)
    yield "## Claims and results\n"
    yield "The first column says what is compared: a ratio of medians, unless it names something else.\n"
    for name, found in machines.items():
        yield f"### Claims on `{name}`\n"
        yield from _claims(found)
    yield "## Method\n"
    yield METHOD
    for name, found in machines.items():
        yield f"## Machine `{name}`\n"
        yield from map(_lower, _sections(name, found, images))


def _lower(text: str) -> str:
    """Headings one level down: they are those of one machine."""
    return f"#{text}" if text.startswith("#") else text


def _reports(found: Results) -> dict[str, list[Report]]:
    return {name: [Report.from_dict(report) for report in result.get("reports", ())] for name, result in found.items()}


def _names(machines: Mapping[str, Results]) -> Iterable[str]:
    rows: list[list[str]] = []
    for name, found in machines.items():
        machine = next(iter(found.values()))["machine"]
        dates = sorted({result["date"] for result in found.values() if "date" in result})
        when = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "-"
        rows.append([f"[`{name}`](#machine-{name})", machine["processor"], str(machine["cores"]), when])
    yield from table(["machine", "processor", "cores", "measured"], rows)
    older = {
        name: [key for key, one in found.items() if one.get("date", "") < CHANNELS] for name, found in machines.items()
    }
    for name, keys in older.items():
        old = [key for key in keys if key in LARGE_SECTIONS and "date" in machines[name][key]]
        if old:
            yield (
                f"On `{name}` these sections are older than {CHANNELS}, when large all-reduces began to use several "
                f"connections: {', '.join(f'`{key}`' for key in old)}. `make bench` measures them again.\n"
            )


def _sections(name: str, found: Results, images: Path) -> Iterable[str]:
    reports = _reports(found)
    yield from _machine(found, [report for several in reports.values() for report in several])
    local = [report for name in ("two", "four") for report in reports.get(name, ())]
    pictures = Pictures(images, name)
    if local:
        draw_times(local, pictures.path("all-reduce"))
    for section in SECTIONS:
        if section.name not in found:
            continue
        result = found[section.name]
        yield f"## {section.title}\n"
        if "skipped" in result:
            yield f"Not measured: {result['skipped']}.\n"
        elif section.name in ("two", "four", "four-large"):
            if reports[section.name][0] is local[0]:
                yield f"![All-reduce: time against size, all engines]({pictures.link('all-reduce')})\n"
            yield from _local(reports[section.name][0])
        elif section.name.startswith("repeated"):
            yield from _repeated(reports[section.name])
        elif section.name == "halves":
            yield from _halves(reports["halves"])
        elif section.name == "hosts":
            yield from hosts_part(reports["hosts"][0], result["bits_per_second"], result["burst"])
        elif section.name == "scaling":
            yield from scaling_part(reports["scaling"][0], pictures)
        else:
            yield from PARTS[section.name](result)


def _claims(found: Results) -> Iterable[str]:
    reports, hosts = _reports(found), found.get("hosts", {})
    share = line_share(reports["hosts"][0], hosts["bits_per_second"], hosts["burst"]) if reports.get("hosts") else None
    if next(iter(found.values()))["machine"]["cores"] >= cores.LEAST:
        judged = verdicts_with_cores(*(found.get(name, {}) for name in ("cores", "cuda-steps", "gpu")))
    else:
        judged = verdicts(reports, share, found.get("torch", {}))
    words = {True: "yes", False: "**no**", None: "-"}
    rows = [[one.text, one.bound, one.found, words[one.kept]] for one in judged]
    yield from table(["claim", "at least", "measured", "kept"], rows)


def _machine(found: Results, reports: Sequence[Report]) -> Iterable[str]:
    machine = next(iter(found.values()))["machine"]
    versions = dict(machine["versions"])
    for report in reports:
        versions.update(report.machine["versions"])
    count = f"{machine['cores']} cores ({machine['threads']} threads)"
    yield f"{machine['processor']}, {count}, {machine['memory_gib']} GiB; {machine['system']}.\n"
    yield ", ".join(f"{name} {number}" for name, number in versions.items()) + ".\n"
    if reports:
        used = dict.fromkeys([OURS, *(name for report in reports for name in report.options.against)])
        yield from table(
            ["engine", "what it is and how it was set"], [[f"`{name}`", ENGINES[name].about] for name in used]
        )
    runs = [run for one in found.values() for run in one.get("reports", ())]
    missing = {name: how for run in runs for name, how in run.get("missing", {}).items()}
    for name, how in missing.items():
        yield f"`{name}` was not installed (`{how}`).\n"
    failed = {name: why for report in reports for row in report.rows for name, why in row.skipped.items()}
    for name, why in failed.items():
        yield f"`{name}` was left out where it failed or has no such operation: {why[:200]}.\n"


def _repeated(reports: Sequence[Report]) -> Iterable[str]:
    engines = reports[0].options.against
    ours, theirs = engines
    yield f"{len(reports)} runs of `{ours}` and `{theirs}`: the ratio of each, and their median.\n"
    rows: list[list[str]] = []
    for nbytes in dict.fromkeys(row.bytes for row in reports[0].rows):
        found = [row.ratio(theirs, ours) for report in reports for row in report.rows if row.bytes == nbytes]
        known = [ratio for ratio in found if ratio is not None]
        if known:
            rows.append([size(nbytes), ", ".join(f"{ratio:.2f}" for ratio in known), f"{median(known):.2f}"])
    yield from table(["bytes", "each run", "median"], rows)


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
