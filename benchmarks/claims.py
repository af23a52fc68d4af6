"""What this library means to be: bounds on ratios, and whether the measurement keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any, NamedTuple

from ringfort.bench.results import OURS, Report, Row
from ringfort.bench.tables import size

KIB, MIB = 1 << 10, 1 << 20
LINE_SHARE = 0.95
TORCH_US = 40
GPU_SHARE = 0.8


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
CLAIMS = (
    Claim(f"2 ranks, {_GLOO}: every size", "two", "tcp", "gloo", 1.0),
    Claim(f"2 ranks, {_GLOO}: geometric mean", "two", "tcp", "gloo", 2.5, mean=True),
    Claim(f"2 ranks, {_GLOO}: from 16 MiB", "two", "tcp", "gloo", 1.15, least=16 * MIB),
    Claim(f"4 ranks, {_GLOO}: every size", "four", "tcp", "gloo", 1.2),
    Claim(f"2 ranks, {_MPI}: from 16 KiB", "two", "plain", "openmpi-tcp", 1.0, least=16 * KIB),
    Claim(f"2 ranks, {_MPI}: below", "two", "plain", "openmpi-tcp", 0.6, most=16 * KIB - 1),
    Claim(f"2 ranks, {_SHM}: from 64 KiB", "two", OURS, "openmpi-shm", 1.0, least=64 * KIB),
    Claim(f"2 ranks, {_SHM}: below", "two", OURS, "openmpi-shm", 0.4, most=64 * KIB - 1),
    Claim("2 ranks, shared memory against Gloo: every size", "two", OURS, "gloo", 3.0),
    Claim("2 ranks, TCP without encryption against bare sockets", "two", "plain", "sockets", 0.85, least=64 * MIB),
    Claim("2 ranks, bfloat16 and float16, shared memory against Gloo", "halves", OURS, "gloo", 1.0),
    Claim("2 ranks, bfloat16 and float16, encrypted TCP against Gloo", "halves", "tcp", "gloo", 1.0),
)


def verdicts(
    reports: Mapping[str, Sequence[Report]],
    line_share: float | None,
    torch: Mapping[str, Any] | None = None,
    gpu: Mapping[str, Any] | None = None,
) -> list[Verdict]:
    """Of every claim, in order; `line_share` is the part of the line's rate that we filled, `torch` and `gpu` are those
    sections."""
    found = [
        _judge(claim, [one for name, some in reports.items() if name.startswith(claim.section) for one in some])
        for claim in CLAIMS
    ]
    kept = None if line_share is None else line_share >= LINE_SHARE
    text = "not measured" if line_share is None else f"{line_share:.3f}"
    line = "two hosts, encrypted: part of the rate of a 1 Gbit/s line, with the headers of TCP, IP and Ethernet"
    return [*found, Verdict(line, f"{LINE_SHARE}", text, kept), *_under_torch(torch or {}), _on_gpu(gpu or {})]


def _under_torch(result: Mapping[str, Any]) -> Iterator[Verdict]:
    steps = {one["way"]: one["median_ms"] for one in result.get("steps", ())}
    for way, words, bound in (("ringfort", "shared memory", 1.5), ("tcp", "encrypted TCP", 1.0)):
        text = f"2 ranks, a step of DistributedDataParallel, {words}, against Gloo"
        ratio = steps["gloo"] / steps[way] if way in steps else None
        found = "not measured" if ratio is None else f"{ratio:.2f}"
        yield Verdict(text, f"{bound:g}", found, None if ratio is None else ratio >= bound)
    more = [one["torch_us"] - one["context_us"] for one in result.get("calls", ()) if one["call"] == "all_reduce"]
    text = f"2 ranks, an all-reduce through torch: microseconds above the same on the context, under {TORCH_US}"
    yield Verdict(text, "-", f"{max(more):.1f}" if more else "not measured", max(more) < TORCH_US if more else None)


def _on_gpu(result: Mapping[str, Any]) -> Verdict:
    text = "2 ranks, all-reduce of a CUDA tensor against the slower of its copies and the same in the host's memory"
    ratio = next((one["ratio"] for one in result.get("ways", ()) if one["way"] == OURS), None)
    if ratio is None:
        return Verdict(text, f"{GPU_SHARE:g}", "not measured", None)
    return Verdict(text, f"{GPU_SHARE:g}", f"{ratio:.2f}", ratio >= GPU_SHARE)


def _judge(claim: Claim, reports: Sequence[Report]) -> Verdict:
    rows = [row for report in reports for row in report.rows if claim.least <= row.bytes <= claim.most]
    ratio: Callable[[Row], float | None] = lambda row: row.ratio(claim.theirs, claim.ours)  # noqa: E731
    known = [(value, row) for row in rows if (value := ratio(row)) is not None]
    bound = f"{claim.bound:g}"
    if not known:
        return Verdict(claim.text, bound, "not measured", None)
    if claim.mean:
        mean = geometric_mean(value for value, _ in known)
        return Verdict(claim.text, bound, f"{mean:.2f}", mean >= claim.bound)
    worst, row = min(known, key=lambda pair: pair[0])
    return Verdict(claim.text, bound, f"{worst:.2f} at the least, at {size(row.bytes)}", worst >= claim.bound)
