"""The parts of the measurement: what each runs, and how long it may take."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import connections, cores, cuda_steps, gpu, overlap, rpc, torch_group, wire
from benchmarks.claims import RUNS
from benchmarks.namespaces import BURST, RATE, two_hosts, why_not
from ringfort.bench.engines import OTHERS, choose_engines
from ringfort.bench.options import Options, parse_sizes
from ringfort.bench.results import Report
from ringfort.bench.runner import Step, run_bench

SIZES = parse_sizes("4,4K,16K,64K,256K,1M,16M,64M,256M")
LARGE = parse_sizes("64M,256M")
FROM_16_MIB = parse_sizes("16M,64M,256M")
FEW = tuple(name for name in OTHERS if name not in ("mlx", "mpich-tcp", "mpich-shm"))
"""Without those that take seconds a call when four ranks share two cores."""
QUICK_SIZES = parse_sizes("4,64K,1M")
QUICK_SECONDS = 0.1

OnStep = Callable[[Step], None]
Result = dict[str, Any]
"""Ready for JSON: `reports`, one for each run, or a section's own, or `skipped` with the reason."""


@dataclass(frozen=True)
class Section:
    """One part. `run` is told whether to be quick."""

    name: str
    title: str
    run: Callable[[bool, OnStep], Result]


def _bench(options: Options, quick: bool, on_step: OnStep) -> Result:
    """One run of the benchmark, with those engines that are there."""
    choice = choose_engines(",".join(options.against))
    options = replace(options, against=choice.names)
    if quick:
        options = replace(options, sizes=QUICK_SIZES, min_time=QUICK_SECONDS)
    return {**run_bench(options, on_step).to_dict(), "missing": choice.missing}


def _local(
    ranks: int, sizes: tuple[int, ...], against: tuple[str, ...] = OTHERS, min_time: float = 0.4
) -> Callable[[bool, OnStep], Result]:
    options = Options(sizes=sizes, ranks=(ranks,), against=against, min_time=min_time)
    return lambda quick, on_step: {"reports": [_bench(options, quick, on_step)]}


def _repeated(ranks: int, sizes: tuple[int, ...], against: tuple[str, ...]) -> Callable[[bool, OnStep], Result]:
    options = Options(sizes=sizes, ranks=(ranks,), against=against, min_time=0.4)
    return lambda quick, on_step: {"reports": [_bench(options, quick, on_step) for _ in range(1 if quick else RUNS)]}


def _cores(quick: bool, on_step: OnStep) -> Result:
    def run(options: Options) -> Report:
        return Report.from_dict(_bench(options, quick, on_step))

    reason = cores.why_not()
    return {"skipped": reason} if reason else cores.measure(run, is_quick=quick)


def _cuda_steps(quick: bool, on_step: OnStep) -> Result:
    del on_step
    reason = gpu.why_not()
    return {"skipped": reason} if reason else cuda_steps.measure(rounds=1 if quick else 21)


def _halves(quick: bool, on_step: OnStep) -> Result:
    each = Options(sizes=SIZES, ranks=(2,), against=("tcp", "gloo"), min_time=0.4)
    kinds = ("bfloat16", "float16")
    return {"reports": [_bench(replace(each, dtype=kind), quick, on_step) for kind in kinds]}


def _scaling(quick: bool, on_step: OnStep) -> Result:
    ranks = (2, 4) if quick else (2, 4, 8, 16)
    sizes = parse_sizes("1M,16M")
    options = Options(sizes=sizes, ranks=ranks, against=("plain",), min_time=0.8)
    return {"reports": [_bench(options, quick, on_step)]}


def _hosts(quick: bool, on_step: OnStep) -> Result:
    reason = why_not()
    if reason:
        return {"skipped": reason}
    options = Options(
        sizes=parse_sizes("1M" if quick else "1M,16M,64M"),
        ranks=(2,),
        against=choose_engines("plain,gloo,sockets").names,
        min_time=QUICK_SECONDS if quick else 5.0,  # 9 calls of the largest
        # Two namespaces of one machine could share memory; two machines cannot.
        shared_memory="off",
    )
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts())
        return {"reports": [run_bench(options, on_step, hosts).to_dict()], "bits_per_second": RATE, "burst": BURST}


def _wire(quick: bool, on_step: OnStep) -> Result:
    del on_step
    reason = why_not()
    return {"skipped": reason} if reason else wire.measure(rounds=1 if quick else 15)


def _overlap(quick: bool, on_step: OnStep) -> Result:
    del on_step
    return overlap.measure(rounds=2 if quick else 9)


def _connections(quick: bool, on_step: OnStep) -> Result:
    del on_step
    reason = why_not()
    return {"skipped": reason} if reason else connections.measure(rounds=1 if quick else 9)


def _torch(quick: bool, on_step: OnStep) -> Result:
    del on_step
    reason = torch_group.why_not()
    return {"skipped": reason} if reason else torch_group.measure(rounds=1 if quick else 21)


def _gpu(quick: bool, on_step: OnStep) -> Result:
    del on_step
    reason = gpu.why_not()
    return {"skipped": reason} if reason else gpu.measure(rounds=1 if quick else 10)


def _rpc(quick: bool, on_step: OnStep) -> Result:
    del on_step
    return rpc.measure(1, huge=64 << 20) if quick else rpc.measure(9)


SECTIONS = (
    Section("two", "Two ranks on one machine", _local(2, SIZES)),
    Section("four", "Four ranks on one machine", _local(4, tuple(size for size in SIZES if size not in LARGE))),
    Section("four-large", "Four ranks, large arrays", _local(4, LARGE, FEW)),
    Section("repeated-two", "Two ranks, large arrays, five runs", _repeated(2, LARGE, ("plain", "sockets"))),
    Section("repeated-four", "Four ranks, large arrays, five runs", _repeated(4, FROM_16_MIB, ("tcp", "gloo"))),
    Section("halves", "Sixteen-bit floats", _halves),
    Section("hosts", "Two hosts and a line of 1 Gbit/s", _hosts),
    Section("scaling", "More ranks", _scaling),
    Section("overlap", "While the caller computes", _overlap),
    Section("connections", "Several connections", _connections),
    Section("wire", "Options of sockets on a fast wire", _wire),
    Section("torch", "Under torch", _torch),
    Section("cores", "Where there are cores to spare", _cores),
    Section("cuda-steps", "Training steps on a GPU", _cuda_steps),
    Section("gpu", "Tensors on a GPU", _gpu),
    Section("rpc", "Calls between ranks", _rpc),
)
