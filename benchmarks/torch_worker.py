"""One rank of `torch_group.py`: `python -m benchmarks.torch_worker ROUNDS FOLDER`; and of `cuda_steps.py`, with the
device and the width of the model as further arguments.

All groups are in the same processes and take turns, so that what disturbs the machine disturbs all of them alike.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from importlib import import_module
from typing import Any

import numpy as np

from ringfort.config import Environment
from ringfort.launch.local_ranks import report

WAYS: dict[str, dict[str, str]] = {"ringfort": {}, "tcp": {"RINGFORT_SHM": "off"}, "gloo": {}}
"""The groups and what is set while they form: as it comes, over encrypted TCP, and Gloo."""
LAYERS, WIDTH = 8, 512
"""Eight layers of a transformer: 25.2 million parameters."""
TOKENS = 4
"""One sequence of so many a step: a small batch, so that the gradients are most of the work."""
FLOATS = 1024
"""Of a call: 4 KiB."""
CALLS = 100
"""Of each kind in a round."""

torch: Any = import_module("torch")
dist: Any = import_module("torch.distributed")


def main(rounds: int, folder: str) -> None:
    """One rank: calls first, then steps."""
    report(parameters=sum(parameter.numel() for parameter in _model().parameters()), tokens=TOKENS, bytes=4 * FLOATS)
    with groups(folder) as ways:
        gc.disable()  # as timeit does
        for way in ("ringfort", "tcp"):
            for name, pair in calls(ways[way]).items():
                through, own = beside(*pair, rounds)
                report(kind="calls", way=way, call=name, torch_us=through, context_us=own)
        tell_steps(steps(ways, rounds, LIMITS))


def steps_on(rounds: int, folder: str, device: str, width: int) -> None:
    """One rank: steps of a model on `device`."""
    model = _model(width).to(device)
    name = torch.cuda.get_device_name() if device == "cuda" else device
    report(device=name, torch=torch.__version__)
    with groups(folder) as ways:
        gc.disable()
        tell_steps(steps(ways, rounds, {}, model), parameters=sum(one.numel() for one in model.parameters()))


def tell_steps(taken: Mapping[str, Sequence[float]], **more: Any) -> None:
    """Report the percentiles of each way."""
    for way, seconds in taken.items():
        p10, p50, p90 = np.percentile(seconds, (10, 50, 90)) * 1e3
        report(kind="steps", way=way, median_ms=p50, p10_ms=p10, p90_ms=p90, **more)


@contextmanager
def groups(folder: str) -> Iterator[dict[str, Any]]:
    """A group for each way. The default is Gloo's, so that all of ours make connections of their own."""
    told = Environment.from_mapping()
    place = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=place, rank=told.rank, world_size=told.world_size)
    try:
        made: dict[str, Any] = {"gloo": dist.group.WORLD}
        for way, variables in WAYS.items():
            if way not in made:
                os.environ.update(variables)
                made[way] = dist.new_group(backend="ringfort")
                for name in variables:
                    del os.environ[name]
        yield {way: made[way] for way in WAYS}
    finally:
        dist.destroy_process_group()


def calls(group: Any) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """The same call through torch and on the context."""
    context = group.context
    small, array = torch.zeros(FLOATS), np.zeros(FLOATS, np.float32)
    parts = list(torch.zeros(context.world_size, FLOATS))
    return {
        "all_reduce": (lambda: dist.all_reduce(small, group=group), lambda: context.all_reduce(array)),
        "broadcast": (lambda: dist.broadcast(small, 0, group=group), lambda: context.broadcast(array, 0)),
        "all_gather": (lambda: dist.all_gather(parts, small, group=group), lambda: context.all_gather(array)),
        "barrier": (lambda: dist.barrier(group=group), context.barrier),
    }


def beside(one: Callable[[], object], other: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Microseconds of a call of each, which take turns. The first hundred warm up."""
    clock = time.perf_counter_ns
    taken: tuple[list[int], list[int]] = ([], [])
    for _ in range(CALLS * (rounds + 1)):
        for action, times in zip((one, other), taken, strict=True):
            start = clock()
            action()
            times.append(clock() - start)
    return statistics.median(taken[0][CALLS:]) / 1e3, statistics.median(taken[1][CALLS:]) / 1e3


def steps(
    ways: dict[str, Any], rounds: int, limits: Mapping[str, Callable[[Any], Any]], model: Any = None
) -> dict[str, list[float]]:
    """Seconds of each training step over each group. Each has its own copy of the model."""
    model = _model() if model is None else model
    random = torch.Generator().manual_seed(dist.get_rank())
    device, width = next(model.parameters()).device, model.layers[0].linear1.in_features
    actions = {way: _step(deepcopy(model), group) for way, group in ways.items()}
    actions |= {way: _step(deepcopy(model), ways["gloo"], hook) for way, hook in limits.items()}
    taken: dict[str, list[float]] = {way: [] for way in actions}
    for turn in range(rounds + 2):  # two to warm up: DDP arranges its buckets anew after the first
        x = torch.randn(1, TOKENS, width, generator=random).to(device)
        for way in list(actions)[:: 1 if turn % 2 == 0 else -1]:
            dist.barrier()
            start = time.perf_counter()
            actions[way](x)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn > 1:
                taken[way].append(time.perf_counter() - start)
    return taken


def _model(width: int = WIDTH) -> Any:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


def _nothing(bucket: Any) -> Any:
    """Sends no gradients."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _copy(bucket: Any) -> Any:
    """Copies the gradients out and in again, piece by piece, as whoever sums them through shared memory must."""
    for piece in bucket.buffer().split(PIECE):
        piece.copy_(_slot[: len(piece)].copy_(piece))
    return _nothing(bucket)


LIMITS: dict[str, Callable[[Any], Any]] = {"nothing": _nothing, "copy": _copy}
"""Steps over no group at all, by what is done with the gradients in place of summing them."""
PIECE = 512 * 1024
"""Floats: 2 MiB, which stay in the cache."""
_slot = torch.zeros(PIECE)


def _step(model: Any, group: Any, hook: Callable[[Any], Any] | None = None) -> Callable[[Any], None]:
    parallel: Any = import_module("torch.nn.parallel").DistributedDataParallel(model, process_group=group)
    if hook is not None:
        parallel.register_comm_hook(None, lambda _, bucket: hook(bucket))  # torch judges a hook by its annotations
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def run(x: Any) -> None:
        optimizer.zero_grad()
        parallel(x).square().mean().backward()
        optimizer.step()

    return run


if __name__ == "__main__":
    if len(sys.argv) > 3:
        steps_on(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main(int(sys.argv[1]), sys.argv[2])
