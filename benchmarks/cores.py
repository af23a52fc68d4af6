"""All-reduces on a machine with cores to spare, encrypted and in plaintext, against Gloo's in the same run, and what
one thread does there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.parts import noted, table
from ringfort.bench.options import Options, parse_sizes
from ringfort.bench.results import Report
from ringfort.bench.tables import size
from ringfort.transport.machine import cores

LEAST = 8
"""Cores from which there are some to spare: two ranks then have several connections."""
SIZES = parse_sizes("4,4K,64K,1M,2M,4M,16M,64M,256M")
LARGE = parse_sizes("2M,4M,16M,64M,256M")
RANKS = (2, 4, 8)
WAYS = {
    "tcp": "`auto`",
    "plain": "`auto`, encryption off",
    "one": "`connections=1`",
}
RATE_BYTES = 256 << 20
"""The size of which the rate is told."""

Measure = Callable[[Options], Report]


def why_not() -> str | None:
    """Why this cannot be measured here; None if it can."""
    return None if cores() >= LEAST else f"it needs {LEAST} cores, and this machine has {cores()}"


def measure(run: Measure, *, is_quick: bool) -> dict[str, Any]:
    """One cell for each way, number of ranks and size: milliseconds, and the speed relative to Gloo."""
    ranks = RANKS[:1] if is_quick else RANKS
    cells: list[dict[str, Any]] = []
    for ways, options in (
        (("tcp", "plain"), Options(sizes=SIZES, ranks=ranks, against=("tcp", "plain", "gloo"), shared_memory="off")),
        (("one",), Options(sizes=LARGE, ranks=ranks, against=("tcp", "gloo"), shared_memory="off", connections=1)),
    ):
        for row in run(options).rows:
            for way in ways:
                engine = "tcp" if way == "one" else way
                ratio = row.ratio("gloo", engine)
                if ratio is not None:
                    ms = row.timings[engine].median_us / 1e3
                    cells.append({"way": way, "ranks": row.ranks, "bytes": row.bytes, "ratio": ratio, "ms": ms})
    return {"cells": cells}


def cores_part(result: Mapping[str, Any]) -> Iterable[str]:
    """The table of ratios, and the rate."""
    cells: Sequence[Mapping[str, Any]] = result["cells"]
    yield (
        "All-reduces over TCP between processes of this machine, with shared memory off: how many times as fast as "
        "Gloo, which sends plaintext and has threads of its own (medians; all are measured alternately in the same "
        "run). `auto` is the default and uses several connections with two threads each, see "
        "[Collectives](collectives.md#several-connections).\n"
    )
    yield from noted(result)
    sizes = sorted({cell["bytes"] for cell in cells})
    found = {(cell["ranks"], cell["way"], cell["bytes"]): cell["ratio"] for cell in cells}
    kinds = list(dict.fromkeys((cell["ranks"], cell["way"]) for cell in cells))
    rows = [
        [f"{ranks} ranks, {WAYS[way]}", *(_number(found.get((ranks, way, nbytes))) for nbytes in sizes)]
        for ranks, way in sorted(kinds, key=lambda kind: (kind[0], list(WAYS).index(kind[1])))
    ]
    yield from table(["", *map(size, sizes)], rows)
    rate = rate_of(result)
    if rate is not None:
        yield f"{size(RATE_BYTES)} of two ranks, encrypted, went at {rate:.1f} GB/s each way.\n"


def rate_of(result: Mapping[str, Any]) -> float | None:
    """Return the GB/s each way of two ranks over encrypted TCP at `RATE_BYTES`; None if they were not measured. Each
    sends the other as much as the array has."""
    wanted = ("tcp", 2, RATE_BYTES)
    found = (one for one in result.get("cells", ()) if (one["way"], one["ranks"], one["bytes"]) == wanted)
    return next((RATE_BYTES / one["ms"] / 1e6 for one in found if one.get("ms") is not None), None)


def _number(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2g}"
