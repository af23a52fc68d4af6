"""The parts of the page that are not a comparison of engines by size: two hosts, more ranks, computing beside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.namespaces import CONGESTION
from benchmarks.pictures import Pictures, draw_scaling
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


def noted(result: Mapping[str, Any]) -> Iterable[str]:
    """What has to be said of figures that the section did not measure itself."""
    if "note" in result:
        yield f"{result['note']}\n"


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
        f"`tc qdisc ... tbf rate {rate / 1e9:g}gbit burst {burst}`: a line of that rate in each direction. TCP uses "
        f"{CONGESTION}, Linux's default congestion control, whatever the machine is set to. Gloo is told the interface "
        "by name. Here `ringfort` is encrypted TCP, and `sockets` is what the line can carry.\n"
    )
    engines = [OURS, *report.options.against]
    rows = [[size(row.bytes), *(duration(row.timings[name].median_us) for name in engines)] for row in report.rows]
    yield from table(["bytes", *(f"`{name}`" for name in engines)], rows)
    yield (
        "Share of the line's rate at the largest size. A full frame has 1514 bytes for 1448 bytes of payload, so "
        f"payload alone cannot exceed {1 / HEADERS:.3f}. The {burst >> 10} KiB that the shaper lets through at once "
        "are subtracted.\n"
    )
    last = report.rows[-1]
    shares = {name: payload_share(last, name, rate, burst) for name in engines if name in last.timings}
    rows = [[f"`{name}`", f"{share:.3f}", f"{share * HEADERS:.3f}"] for name, share in shares.items()]
    yield from table(["engine", "payload alone", "with headers"], rows)


def scaling_part(report: Report, pictures: Pictures) -> Iterable[str]:
    """The cost of a rank and byte beside 2(n-1)/n."""
    cores = int(report.machine["threads"])
    ranks = list(report.options.ranks)
    yield (
        "In a ring each rank moves 2(n-1)/n of the array, so the cost per rank and byte should grow from 1 with two "
        f"ranks towards 2. Here n ranks share {cores} cores, so the cost of a rank is the time multiplied by "
        f"{cores}/n and divided by the number of bytes, relative to two ranks. Times are in brackets.\n"
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
    draw_scaling(ranks, lines, predicted, pictures.path("scaling"))
    yield f"![The cost of a rank against the number of ranks]({pictures.link('scaling')})\n"
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
        "of every rank does nothing, computes in pure Python, or multiplies matrices in torch, at several values of "
        "`sys.setswitchinterval` (Python's default is 5 ms). The tables have the milliseconds until the all-reduce is "
        "done and, in brackets, which share of its speed alone the computation kept. If ranks share cores, as here, "
        "computing and moving data also compete for the cores.\n"
    )
    intervals = list(dict.fromkeys(cell["interval"] for cell in cells))
    for way in dict.fromkeys(cell["way"] for cell in cells):
        mine = {(cell["beside"], cell["interval"]): cell for cell in cells if cell["way"] == way}
        kinds = list(dict.fromkeys(kind for kind, _ in mine))
        yield f"### {'Shared memory' if way == 'as it comes' else 'Encrypted TCP'}\n"
        rows = [[f"{interval * 1e3:g} ms", *(_cell(mine[kind, interval]) for kind in kinds)] for interval in intervals]
        yield from table(["switch interval", *(f"beside {kind}" for kind in kinds)], rows)


def connections_part(result: Mapping[str, Any]) -> Iterable[str]:
    """What several connections gain where one is held back, and where a ring leaves half of the cables unused."""
    cells: Sequence[Mapping[str, Any]] = result["cells"]
    yield (
        f"An encrypted ring all-reduce of {size(result['bytes'])}, with `CollectiveConfig(connections=...)`. "
        f"**Limited**: two hosts on a network that limits each connection to {result['flow_rate'] / 1e6:g} Mbit/s in "
        f"each direction. **Cables**: three hosts without a switch, with a cable of "
        f"{result['cable_rate'] / 1e6:g} Mbit/s in each direction between every two; a ring uses one direction of each "
        "cable, and two connections use both. The speed relative to one connection is in brackets. What more "
        "cores gain, measured on another machine, is in [Collectives](collectives.md#several-connections).\n"
    )
    titles = {"flows": "limited", "cables": "cables"}
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
    "ringfort": "shared memory (default)",
    "tcp": "encrypted TCP",
    "gloo": "Gloo",
    "copy": "the limit: gradients copied out and in, not summed",
    "nothing": "the limit: nothing sent",
}
"""The groups of the measurement under torch, and what stands in for one."""


def torch_part(result: Mapping[str, Any]) -> Iterable[str]:
    """What torch's process group costs above the context, and a step of DistributedDataParallel beside Gloo's."""
    yield (
        f"One call of {size(result['bytes'])} through `torch.distributed`, alternating with the same call on the "
        f"context of the group, {result['ranks']} ranks.\n"
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
    yield from table(["call", "over", "through torch", "on the context", "difference"], rows)
    yield (
        f"A training step (forward, backward, SGD) of a transformer of {result['parameters'] / 1e6:.1f} million "
        f"parameters under DistributedDataParallel, {result['ranks']} ranks, one sequence of {result['tokens']} tokens "
        "each. All groups are in the same processes and are measured alternately. The 10th and 90th percentile are in "
        "brackets.\n"
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
    yield from table(["over", "step", "speed relative to Gloo"], rows)


def _cell(cell: Mapping[str, Any]) -> str:
    kept = "" if cell["beside"] == "nothing" else f" (kept {cell['kept']:.0%})"
    return f"{cell['median_ms']:.1f}{kept}"
