"""What this library means to be: bounds on ratios, and whether the measurement keeps them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from benchmarks.cores import rate_of
from benchmarks.cuda_steps import ratios_of
from benchmarks.gpu import GPU_SHARE
from ringfort.bench.results import OURS, Report
from ringfort.bench.tables import size

KIB, MIB = 1 << 10, 1 << 20
LINE_SHARE = 0.95
TORCH_US = 40
COPY_SHARE = 0.9
RATE = 4.0
"""GB/s."""
STEP_RATIO = 1.2
RUNS = 5
"""Runs of which a claim with `is_repeated` takes the median: single ones differ by more than what is claimed."""


@dataclass(frozen=True)
class Claim:
    """`theirs` takes at least `bound` times as long as `ours`, at all sizes from `least` to `most` bytes."""

    text: str
    section: str
    """And those whose names begin with it."""
    ours: str
    theirs: str
    bound: float
    least: int = 0
    most: int = 1 << 62
    mean: bool = False
    """Whether the bound is on the geometric mean, and not on every size."""
    is_repeated: bool = False
    """Whether the bound is on the median of `RUNS` runs, at each size."""


class Verdict(NamedTuple):
    """What became of a claim."""

    text: str
    bound: str
    found: str
    kept: bool | None
    """None if it was not measured."""


_GLOO = "encrypted TCP against plaintext Gloo"
_MPI = "TCP without encryption against Open MPI over TCP"
_SHM = "shared memory against Open MPI's"
_FIVE = f"median of {RUNS} runs"
CLAIMS = (
    Claim(f"2 ranks, {_GLOO}: every size", "two", "tcp", "gloo", 1.0),
    Claim(f"2 ranks, {_GLOO}: geometric mean", "two", "tcp", "gloo", 2.5, mean=True),
    Claim(f"2 ranks, {_GLOO}: from 16 MiB", "two", "tcp", "gloo", 1.15, least=16 * MIB),
    Claim(f"4 ranks, {_GLOO}: below 16 MiB", "four", "tcp", "gloo", 1.2, most=16 * MIB - 1),
    Claim(
        f"4 ranks, {_GLOO}: from 16 MiB, {_FIVE}",
        *("repeated-four", "tcp", "gloo", 1.0),
        least=16 * MIB,
        is_repeated=True,
    ),
    Claim(f"2 ranks, {_MPI}: from 16 KiB", "two", "plain", "openmpi-tcp", 1.0, least=16 * KIB),
    Claim(f"2 ranks, {_MPI}: below", "two", "plain", "openmpi-tcp", 0.6, most=16 * KIB - 1),
    Claim(f"2 ranks, {_SHM}: from 64 KiB", "two", OURS, "openmpi-shm", 1.0, least=64 * KIB),
    Claim(f"2 ranks, {_SHM}: below", "two", OURS, "openmpi-shm", 0.4, most=64 * KIB - 1),
    Claim("2 ranks, shared memory against Gloo: every size", "two", OURS, "gloo", 3.0),
    Claim(
        f"2 ranks, TCP without encryption against bare sockets: from 64 MiB, {_FIVE}",
        *("repeated-two", "plain", "sockets", 0.85),
        least=64 * MIB,
        is_repeated=True,
    ),
    Claim("2 ranks, bfloat16 and float16, shared memory against Gloo", "halves", OURS, "gloo", 1.0),
    Claim("2 ranks, bfloat16 and float16, encrypted TCP against Gloo", "halves", "tcp", "gloo", 1.0),
)
"""Of machines with few cores."""
CORES_CLAIMS = ((2, 1.3, 1.8), (4, 1.1, 1.4), (8, 0.95, None))
"""Of machines with many: ranks, what every size keeps over encrypted TCP against Gloo, and the mean from 16 MiB."""


def verdicts(
    reports: Mapping[str, Sequence[Report]], line_share: float | None, torch: Mapping[str, Any] | None = None
) -> list[Verdict]:
    """Of every claim for a machine with few cores, in order; `line_share` is the part of the line's rate that we
    filled, `torch` is that section."""
    found = [
        _judge(claim, [one for name, some in reports.items() if name.startswith(claim.section) for one in some])
        for claim in CLAIMS
    ]
    line = "two hosts, encrypted: part of the rate of a 1 Gbit/s line, with the headers of TCP, IP and Ethernet"
    return [*found, _bounded(line, LINE_SHARE, line_share), *_under_torch(torch or {})]


def verdicts_with_cores(cores: Mapping[str, Any], steps: Mapping[str, Any], gpu: Mapping[str, Any]) -> list[Verdict]:
    """Of every claim for a machine with many cores, in order; the arguments are those sections."""
    return [*_over_cores(cores), *_on_gpu(steps, gpu)]


def _bounded(text: str, bound: float, found: float | None, where: str = "") -> Verdict:
    if found is None:
        return Verdict(text, f"{bound:g}", "not measured", None)
    digits = 3 if text.startswith("two hosts") else 2
    return Verdict(text, f"{bound:g}", f"{found:.{digits}f}{where}", found >= bound)


def _under_torch(result: Mapping[str, Any]) -> Iterator[Verdict]:
    steps = {one["way"]: one["median_ms"] for one in result.get("steps", ())}

    def ratio(theirs: str, ours: str) -> float | None:
        return steps[theirs] / steps[ours] if theirs in steps and ours in steps else None

    step = "2 ranks, a step of DistributedDataParallel"
    yield _bounded(
        f"{step}, shared memory, against the limit: gradients copied, not summed", COPY_SHARE, ratio("copy", OURS)
    )
    yield _bounded(f"{step}, encrypted TCP, against Gloo", 1.0, ratio("gloo", "tcp"))
    more = [one["torch_us"] - one["context_us"] for one in result.get("calls", ()) if one["call"] == "all_reduce"]
    text = f"2 ranks, an all-reduce through torch: microseconds above the same on the context, under {TORCH_US}"
    yield Verdict(text, "-", f"{max(more):.1f}" if more else "not measured", max(more) < TORCH_US if more else None)


def _over_cores(result: Mapping[str, Any]) -> Iterator[Verdict]:
    for ranks, every, mean in CORES_CLAIMS:
        cells = [one for one in result.get("cells", ()) if one["way"] == "tcp" and one["ranks"] == ranks]
        for words, some in (
            ("below 2 MiB", [one for one in cells if one["bytes"] < 2 * MIB]),
            ("from 2 MiB", [one for one in cells if one["bytes"] >= 2 * MIB]),
        ):
            worst = min(some, key=lambda one: one["ratio"], default=None)
            where = "" if worst is None else f" at the least, at {size(worst['bytes'])}"
            yield _bounded(f"{ranks} ranks, {_GLOO}: {words}", every, worst and worst["ratio"], where)
        large = [one["ratio"] for one in cells if one["bytes"] >= 16 * MIB]
        if mean is not None:
            found = geometric_mean(large) if large else None
            yield _bounded(f"{ranks} ranks, {_GLOO}: geometric mean from 16 MiB", mean, found)
    yield _bounded("2 ranks, encrypted TCP, 256 MiB: GB/s each way", RATE, rate_of(result))


def _on_gpu(steps: Mapping[str, Any], gpu: Mapping[str, Any]) -> Iterator[Verdict]:
    found = ratios_of(steps)
    for number in dict.fromkeys(parameters for parameters, _ in found) or (None,):
        model = "" if number is None else f" with {number / 1e6:.0f} million parameters"
        text = f"2 ranks, a step of DistributedDataParallel on CUDA{model}, encrypted TCP, against Gloo"
        yield _bounded(text, STEP_RATIO, None if number is None else found.get((number, "tcp")))
    text = "2 ranks, all-reduce of a CUDA tensor against the slower of its copies and the same in the host's memory"
    share = next((one["ratio"] for one in gpu.get("ways", ()) if one["way"] == OURS), None)
    yield _bounded(text, GPU_SHARE, share)


def _judge(claim: Claim, reports: Sequence[Report]) -> Verdict:
    ratios: dict[tuple[str, int], list[float]] = {}
    for report in reports:
        for row in report.rows:
            ratio = row.ratio(claim.theirs, claim.ours) if claim.least <= row.bytes <= claim.most else None
            if ratio is not None:
                ratios.setdefault((report.options.dtype, row.bytes), []).append(ratio)
    bound = f"{claim.bound:g}"
    if not ratios:
        return Verdict(claim.text, bound, "not measured", None)
    if claim.mean:
        mean = geometric_mean(value for some in ratios.values() for value in some)
        return Verdict(claim.text, bound, f"{mean:.2f}", mean >= claim.bound)
    worst, nbytes = min((median(some), nbytes) for (_, nbytes), some in ratios.items())
    fewest = min(map(len, ratios.values()))
    found = f"{worst:.2f} at the least, at {size(nbytes)}"
    if claim.is_repeated and fewest < RUNS:
        return Verdict(claim.text, bound, f"{found}, but only {fewest} runs", None)
    return Verdict(claim.text, bound, found, worst >= claim.bound)
