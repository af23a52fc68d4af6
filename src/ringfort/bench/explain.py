"""`ringfort bench --explain`: every strategy, predicted and measured side by side, and what AUTO made of it.

All strategies run in the same processes and take turns, a burst each in alternating order: `python -m
ringfort.bench.explain OPTIONS` is one of the ranks.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import ringfort
from ringfort.bench.machine import describe_machine
from ringfort.bench.options import MAX_ROUNDS, MIN_ROUNDS, STRATEGIES, Case, Options
from ringfort.bench.patterns import fill, first_difference, new_source
from ringfort.bench.show import duration, size
from ringfort.collectives import cost_model, parallel
from ringfort.collectives.ops import ReduceOp
from ringfort.compression import auto as compression
from ringfort.compression.strategy import CompressionStrategy
from ringfort.context import DistributedContext
from ringfort.errors import InvalidArgumentError
from ringfort.launch.local_ranks import LocalRanks, report

AUTO = "auto"
MEMORY = "shared memory"
"""What AUTO takes where all ranks share a arena: no strategy, and nothing that the model knows of."""
BURST_SECONDS = 0.01
MAX_BURST = 20
"""Calls of one strategy before the next one's turn: short beside what drifts on a machine."""


@dataclass(frozen=True)
class Explained:
    """One size among some ranks. Times in microseconds."""

    ranks: int
    bytes: int
    chosen: str
    """By AUTO."""
    predicted: dict[str, float]
    measured: dict[str, float]
    """The medians, of AUTO too; a call takes as long as its slowest rank."""
    connections: int = 1
    """Over which every two ranks moved it. What is predicted is what one carries."""
    compression: str = ""
    """What `compression="auto"` takes for it and why, in words; empty where it cannot be compressed."""
    compressed: dict[str, float] = field(default_factory=dict[str, float])
    """Predicted for each strategy of compression that it weighed; empty on one host, where it weighs none."""

    @property
    def best(self) -> str:
        """The quickest strategy."""
        return min((name for name in self.measured if name != AUTO), key=self.measured.__getitem__)

    @property
    def over_best(self) -> float:
        """How many times as long AUTO took as the quickest strategy."""
        return self.measured[AUTO] / self.measured[self.best]

    def to_dict(self) -> dict[str, Any]:
        """Ready for `json.dumps`."""
        return {**asdict(self), "best": self.best, "auto_over_best": self.over_best}


def explain(options: Options, on_row: Callable[[Explained], None]) -> dict[str, Any]:
    """Measures everything in `options`; returns what is ready for `json.dumps`.

    Raises `InvalidArgumentError` for an operation without strategies, `RankFailedError` when a rank ends badly.
    """
    if options.op not in STRATEGIES:
        raise InvalidArgumentError("op", options.op, f"has no strategies; choose one of: {', '.join(STRATEGIES)}")
    rows: list[Explained] = []
    for ranks in options.ranks:
        with LocalRanks("ringfort.bench.explain", ranks, [options.to_json()]) as group:
            for _, message in group.messages():
                rows.append(Explained(**message))
                on_row(rows[-1])
    return {
        "schema": 1,
        "options": asdict(options),
        "machine": describe_machine(["numpy", "ringfort"]),
        "rows": [row.to_dict() for row in rows],
    }


def print_explained(console: Console, options: Options, rows: Sequence[Explained]) -> None:
    """A line for each strategy: predicted, measured, and which AUTO chose."""
    table = Table(title=f"{options.op} of {options.dtype}: how AUTO chooses", title_justify="left", box=SIMPLE_HEAD)
    for head in ("ranks", "size", "strategy", "predicted", "measured", ""):
        # What is said of the choice may be broken up where there is little room; names and numbers may not.
        width = len("halving_doubling") if head == "strategy" else len("0.00 ms") if head else None
        table.add_column(head, justify="right" if head else "left", no_wrap=bool(head), min_width=width)
    for row in rows:
        where = (str(row.ranks), size(row.bytes))
        for name in sorted(row.predicted, key=row.measured.__getitem__):
            notes = [word for word, holds in (("chosen", name == row.chosen), ("best", name == row.best)) if holds]
            times = duration(row.predicted[name]), duration(row.measured[name])
            table.add_row(*where, name, *times, ", ".join(notes))
            where = ("", "")
        note = f"{row.over_best:.2f} of the best: {row.chosen}"
        if row.connections > 1:
            note += f", {row.connections} connections"
        table.add_row(*where, AUTO, "", duration(row.measured[AUTO]), note, end_section=not row.compression)
        for name, micros in sorted(row.compressed.items(), key=lambda item: item[1]):
            table.add_row("", "", name, duration(micros), "", "compressed" if name != "none" else "not compressed")
        if row.compression:
            table.add_row("", "", "compression", "", "", row.compression, end_section=True)
    console.print(table)


# --- one rank ---------------------------------------------------------------------------------------------------------


def run_rank(options: Options) -> None:
    """Measures every case, and at rank 0 reports it."""
    with ringfort.init(config=options.settings(), encryption=options.encryption) as ctx:
        group = ctx.group
        model = cost_model.model_of(group)
        gc.disable()  # as timeit does: a collection in the middle of a call is not the call's
        kind = STRATEGIES[options.op]
        for case in options.cases(ctx.world_size):
            weighed = model.candidates(kind)
            predicted = {str(strategy): model.predict(strategy, case.nbytes, case.dtype) for strategy in weighed}
            measured = measure(ctx, case, [AUTO, *predicted], options)
            chosen = MEMORY if group.shares_memory else str(model.choose(kind, case.nbytes, case.dtype))
            said, compressed = _compression(ctx, case)
            if ctx.is_master:
                micros = {name: seconds * 1e6 for name, seconds in predicted.items()}
                report(
                    ranks=ctx.world_size,
                    bytes=case.nbytes,
                    chosen=chosen,
                    predicted=micros,
                    measured=measured,
                    connections=parallel.count_for(group, case.nbytes),
                    compression=said,
                    compressed=compressed,
                )


def _compression(ctx: DistributedContext, case: Case) -> tuple[str, dict[str, float]]:
    """What AUTO says of compressing this case, and the microseconds that it predicts for each strategy."""
    if case.op != "all_reduce" or case.dtype != "float32":
        return "", {}
    asked, shapes = CompressionStrategy.AUTO, [(case.nbytes // 4,)]
    choice = compression.explain(ctx.group, asked, shapes)
    predicted = {str(strategy): seconds * 1e6 for strategy, seconds in choice.predicted.items()}
    return f"auto takes {choice.strategy}: {choice.why}", predicted


def measure(ctx: DistributedContext, case: Case, names: Sequence[str], options: Options) -> dict[str, float]:
    """The median microseconds of each strategy, the slowest rank of each call; the same at every rank."""
    method: Callable[..., Any] = getattr(ctx, case.op)
    ways = {name: STRATEGIES[case.op].parse(name) for name in names}
    x = new_source(case, ctx.rank)
    assert x is not None
    estimates: list[float] = []
    for way in ways.values():
        fill(x, ctx.rank)
        result = method(x, strategy=way)
        if case.op != "reduce" or ctx.is_master:
            assert first_difference(case, ctx.rank, np.asarray(result)) is None
        x.fill(0)
        ctx.barrier()
        start = time.perf_counter()
        method(x, strategy=way)
        estimates.append(time.perf_counter() - start)
    slowest = float(ctx.all_reduce(np.array(estimates), ReduceOp.MAX).max())
    burst = min(max(1, int(BURST_SECONDS / slowest)), MAX_BURST)
    rounds = options.repeat or min(max(MIN_ROUNDS, int(options.min_time / (burst * slowest))), MAX_ROUNDS)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in list(names)[:: 1 if turn % 2 == 0 else -1]:
            ctx.barrier()
            for _ in range(burst):
                start = time.perf_counter()
                method(x, strategy=ways[name])
                taken[name].append(time.perf_counter() - start)
    calls_of = ctx.all_reduce(np.array([taken[name] for name in names]), ReduceOp.MAX)
    return {name: float(np.median(times)) * 1e6 for name, times in zip(names, calls_of, strict=True)}


if __name__ == "__main__":
    run_rank(Options.from_json(sys.argv[1]))
