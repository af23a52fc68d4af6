"""The parts of the page that are not a comparison of engines by size: two hosts, more ranks, computing beside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.namespaces import CONGESTION
from benchmarks.pictures import draw_scaling
from ringfort.bench.results import OURS, Report, Row
from ringfort.bench.tables import duration, size

HEADERS = 1514 / 1448
"""Bytes on the line for a byte of payload, as the shaper counts: a full frame of Ethernet, IP, TCP and time stamps."""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    """In Markdown, and an empty line."""
    yield f"| {' | '.join(heads)} |"
    yield f"|{' --- |' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def payload_share(row: Row, engine: str, rate: float, burst: int) -> float:
    """Of the line's rate, what the array's bytes took. Two ranks send each other as much as the array has.

    What the shaper lets through at once after a pause was not carried at its rate, and does not count.
    """
    return (row.bytes - burst) * 8 / (row.timings[engine].median_us / 1e6) / rate


def line_share(report: Report, rate: float, burst: int) -> float:
    """Of the line's rate, what we filled at the largest size, with the headers of TCP, IP and Ethernet."""
    return payload_share(report.rows[-1], OURS, rate, burst) * HEADERS


def hosts_part(report: Report, rate: float, burst: int) -> Iterable[str]:
    """The tables of two hosts."""
    yield (
        "Two network namespaces joined by a veth pair, each end with "
        f"`tc qdisc ... tbf rate {rate / 1e9:g}gbit burst {burst}`: a line of that rate each way. TCP finds its speed "
        f"by {CONGESTION}, Linux's own way, whatever the machine is set to. Gloo is told the interface by name. "
        "`ringfort` is encrypted TCP here; `sockets` is what the line can carry.\n"
    )
    engines = [OURS, *report.options.against]
    rows = [[size(row.bytes), *(duration(row.timings[name].median_us) for name in engines)] for row in report.rows]
    yield from table(["bytes", *(f"`{name}`" for name in engines)], rows)
    yield (
        "Part of the line's rate at the largest size. A full frame has 1514 bytes for 1448 of payload, so payload "
        f"alone cannot pass {1 / HEADERS:.3f}. The {burst >> 10} KiB that the shaper lets through at once are taken "
        "off.\n"
    )
    last = report.rows[-1]
    shares = {name: payload_share(last, name, rate, burst) for name in engines if name in last.timings}
    rows = [[f"`{name}`", f"{share:.3f}", f"{share * HEADERS:.3f}"] for name, share in shares.items()]
    yield from table(["engine", "payload alone", "with headers"], rows)


def scaling_part(report: Report, images: Path) -> Iterable[str]:
    """The cost of a rank and byte beside 2(n-1)/n."""
    cores = int(report.machine["threads"])
    ranks = list(report.options.ranks)
    yield (
        "A ring moves 2(n-1)/n of the array for each rank, so the cost of a rank per byte should grow from 1 at two "
        f"ranks towards 2. Here n ranks share {cores} cores, so a rank's cost is the time times {cores}/n, divided by "
        "the bytes, and 1 at two ranks. In brackets the times.\n"
    )
    predicted = [2 * (n - 1) / n for n in ranks]
    lines: dict[str, Sequence[float]] = {}
    times: dict[str, list[str]] = {}
    for nbytes in dict.fromkeys(row.bytes for row in report.rows):
        for engine in (OURS, *report.options.against):
            rows = [row for row in report.rows if row.bytes == nbytes and engine in row.timings]
            costs = [row.timings[engine].median_us * min(1, cores / row.ranks) / row.bytes for row in rows]
            lines[f"{engine}, {size(nbytes)}"] = [cost / costs[0] for cost in costs]
            times[f"{engine}, {size(nbytes)}"] = [duration(row.timings[engine].median_us) for row in rows]
    draw_scaling(ranks, lines, predicted, images / "scaling.png")
    yield "![The cost of a rank against the number of ranks](images/scaling.png)\n"
    rows = [
        [str(n), f"{predicted[i]:.2f}", *(f"{line[i]:.2f} ({times[name][i]})" for name, line in lines.items())]
        for i, n in enumerate(ranks)
    ]
    yield from table(["ranks", "2(n-1)/n", *lines], rows)


def overlap_part(result: Mapping[str, Any]) -> Iterable[str]:
    """What an all-reduce and the computing beside it cost each other."""
    cells: Sequence[Mapping[str, Any]] = result["cells"]
    yield (
        f"An asynchronous all-reduce of {size(result['bytes'])} among {result['ranks']} ranks, while the main thread "
        "of every rank does nothing, computes in pure Python, or multiplies matrices in torch; at several values of "
        "`sys.setswitchinterval` (Python's own is 5 ms). Milliseconds until the all-reduce is done, and in brackets "
        "what the computing kept of the speed that it has alone. Where ranks share cores, as on two of them here, "
        "computing and moving data also compete for those.\n"
    )
    intervals = list(dict.fromkeys(cell["interval"] for cell in cells))
    for way in dict.fromkeys(cell["way"] for cell in cells):
        mine = {(cell["beside"], cell["interval"]): cell for cell in cells if cell["way"] == way}
        kinds = list(dict.fromkeys(kind for kind, _ in mine))
        yield f"### {'As it comes' if way == 'as it comes' else 'Encrypted TCP'}\n"
        rows = [[f"{interval * 1e3:g} ms", *(_cell(mine[kind, interval]) for kind in kinds)] for interval in intervals]
        yield from table(["switch interval", *(f"beside {kind}" for kind in kinds)], rows)


def connections_part(result: Mapping[str, Any]) -> Iterable[str]:
    """What several connections gain where one is held back, and where a ring leaves half of the cables unused."""
    cells: Sequence[Mapping[str, Any]] = result["cells"]
    yield (
        f"An encrypted all-reduce of {size(result['bytes'])} round a ring, with `CollectiveConfig(connections=...)`. "
        f"**Held back**: two hosts on a wire that gives each connection {result['flow_rate'] / 1e6:g} Mbit/s each way "
        f"and no more. **Cables**: three hosts without a switch, each joined to each by a cable of "
        f"{result['cable_rate'] / 1e6:g} Mbit/s each way, of which a ring uses one direction and two connections "
        "use both. "
        "In brackets how many times as quick as one connection. On one machine, where a single connection already "
        "keeps the cores busy, more gain nothing, and `auto` stays with one.\n"
    )
    titles = {"flows": "held back", "cables": "cables"}
    by_way: dict[str, list[str]] = {}
    for network in titles:
        mine = [cell for cell in cells if cell["network"] == network]
        one = next(cell["median_ms"] for cell in mine if cell["connections"] == 1)
        for cell in mine:
            chosen = f", took {cell['used']}" if cell["connections"] == "auto" else ""
            words = f"{duration(cell['median_ms'] * 1e3)} ({one / cell['median_ms']:.2f}{chosen})"
            by_way.setdefault(str(cell["connections"]), []).append(words)
    yield from table(["connections", *titles.values()], [[way, *words] for way, words in by_way.items()])


TORCH_WAYS = {
    "ringfort": "shared memory, as it comes",
    "tcp": "encrypted TCP",
    "gloo": "Gloo",
    "copy": "the limit: gradients copied out and in, not summed",
    "nothing": "the limit: nothing sent",
}
"""The groups of the measurement under torch, and what stands in for one."""


def torch_part(result: Mapping[str, Any]) -> Iterable[str]:
    """What torch's process group costs above the context, and a step of DistributedDataParallel beside Gloo's."""
    yield (
        f"One call of {size(result['bytes'])} through `torch.distributed` and the same on the group's own context, "
        f"{result['ranks']} ranks, in turns.\n"
    )
    rows = [
        [
            f"`{one['call']}`",
            TORCH_WAYS[one["way"]],
            f"{one['torch_us']:.1f} us",
            f"{one['context_us']:.1f} us",
            f"{one['torch_us'] - one['context_us']:.1f} us",
        ]
        for one in result["calls"]
    ]
    yield from table(["call", "over", "through torch", "on the context", "more"], rows)
    yield (
        f"A training step (forward, backward, SGD) of a transformer of {result['parameters'] / 1e6:.1f} million "
        f"parameters under DistributedDataParallel, {result['ranks']} ranks, one sequence of {result['tokens']} tokens "
        "each. All groups are in the same processes and take turns. In brackets the 10th and 90th percentile.\n"
    )
    gloo = next(one["median_ms"] for one in result["steps"] if one["way"] == "gloo")
    rows = [
        [
            TORCH_WAYS[one["way"]],
            f"{one['median_ms']:.0f} ms ({one['p10_ms']:.0f} to {one['p90_ms']:.0f})",
            f"{gloo / one['median_ms']:.2f}",
        ]
        for one in result["steps"]
    ]
    yield from table(["over", "step", "times as quick as over Gloo"], rows)


def _cell(cell: Mapping[str, Any]) -> str:
    kept = "" if cell["beside"] == "nothing" else f" (kept {cell['kept']:.0%})"
    return f"{cell['median_ms']:.1f}{kept}"
