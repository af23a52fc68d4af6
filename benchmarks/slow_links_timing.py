"""What a step of each way to train takes on a slow link: the timing half of `slow_links`. Nothing is modelled.

Two hosts are network namespaces, joined by a wire of so many bits a second (`tbf`). A process on each trains the same
transformer as the learning half. The second machine has half the speed: after each of its steps it sleeps for as long
as the step took. What counts is the time from update to update, with everything that a rank waits for, divided by the
steps that the fast machine makes in it when nobody waits ("units"); and the bytes that the first host sends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ringfort  # noqa: E402
from benchmarks.namespaces import INTERFACE, two_hosts  # noqa: E402
from benchmarks.slow_links_learning import LEARNING_RATE, SPEEDS, Model, Scale, random_rows  # noqa: E402
from ringfort.training import average_gradients  # noqa: E402

BURST = 32 * 1024
"""Bytes that may leave at once after a pause."""
PATIENCE = 900.0


class Way(NamedTuple):
    """One way to train."""

    units: float
    """Steps of the fast machine from update to update, when nobody waits for the wire."""
    updates: int
    """How many of them are timed."""
    train: Callable[[Trainer, int], None]
    """Makes so many updates."""
    is_gloo: bool = False


class Trainer:
    """One machine: its model, its speed, and its group."""

    def __init__(self, scale: Scale, rank: int, speed: float) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.rank, self.scale = rank, scale
        self.slowdown = 1 / speed - 1
        self.model: Any = Model(scale)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.ctx: Any = None
        self.local: Any = None

    def compute(self, rows: int, *, steps: bool = True, model: Any = None) -> None:
        """Compute the gradients of a batch, at this machine's speed; and make a step."""
        begun = time.perf_counter()
        (model or self.model)(random_rows(self.scale, rows)).backward()
        if steps:
            self.step()
        time.sleep((time.perf_counter() - begun) * self.slowdown)

    def step(self) -> None:
        """Make a step of the optimizer."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def alone(trainer: Trainer, updates: int) -> None:
    for _ in range(updates if trainer.rank == 0 else 0):
        trainer.compute(trainer.scale.batch)


def ddp(hook: Callable[[Any], None] | None, accumulate: int, trainer: Trainer, updates: int) -> None:
    """torch's DistributedDataParallel over Gloo."""
    if not isinstance(trainer.model, DistributedDataParallel):
        trainer.model = DistributedDataParallel(trainer.model)
        if hook is not None:
            hook(trainer.model)
    for _ in range(updates):
        with trainer.model.no_sync():
            for _ in range(accumulate - 1):
                trainer.compute(trainer.scale.batch, steps=False)
        # The slow machine's sleep comes after the reduction here: it is moved before, where its computing would be.
        begun = time.perf_counter()
        loss = trainer.model(random_rows(trainer.scale, trainer.scale.batch))
        time.sleep(3 * (time.perf_counter() - begun) * trainer.slowdown)  # a backward pass takes twice the forward pass
        loss.backward()
        trainer.step()


def fp16_hook(model: Any) -> None:
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def power_sgd_hook(model: Any) -> None:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def post_local_sgd(every: int, trainer: Trainer, updates: int) -> None:
    """Equal steps, then the mean of the weights, over Gloo."""
    for _ in range(updates):
        for _ in range(every):
            trainer.compute(trainer.scale.batch)
        flat = torch.cat([p.detach().reshape(-1) for p in trainer.model.parameters()])
        dist.all_reduce(flat)


def every_step(compression: str | None, trainer: Trainer, updates: int) -> None:
    """Ours: gradients in every step, of batches in proportion to speed."""
    rows = max(1, int(trainer.scale.batch * SPEEDS[trainer.rank]))
    tree = dict(trainer.model.named_parameters())
    for _ in range(updates):
        trainer.compute(rows, steps=False)
        gradients = {name: parameter.grad for name, parameter in tree.items()}
        average_gradients(trainer.ctx, gradients, weight=rows, compression=compression)
        trainer.step()


def local_steps(every: int, codec: str, fragments: int, trainer: Trainer, updates: int) -> None:
    """Ours: rounds of local steps. The first rounds, in which the ranks learn their speeds, are made before."""
    if trainer.local is None:
        trainer.local = ringfort.torch.local_steps(
            trainer.model, trainer.optimizer, ctx=trainer.ctx, every=every, codec=codec, fragments=fragments
        )
        updates += 2
    last = trainer.local.number + updates
    while trainer.local.number < last:
        trainer.compute(trainer.scale.batch)


def ways(quick: bool) -> dict[str, Way]:
    """Return every way, by its name."""
    more = 2 if quick else 8
    found = {
        "alone": Way(1, 10 * more, alone),
        "DDP": Way(2, more, partial(ddp, None, 1), is_gloo=True),
        "DDP, fp16 hook": Way(2, more, partial(ddp, fp16_hook, 1), is_gloo=True),
        "DDP, PowerSGD hook": Way(2, 2 * more, partial(ddp, power_sgd_hook, 1), is_gloo=True),
        "every step": Way(1, more, partial(every_step, None)),
        "every step, int8": Way(1, more, partial(every_step, "int8")),
    }
    for count in (4, 16, 64):
        found[f"DDP, accumulation {count}"] = Way(2 * count, 2, partial(ddp, None, count), is_gloo=True)
    found["PostLocalSGD, 16"] = Way(32, 2, partial(post_local_sgd, 16), is_gloo=True)
    for every in (5, 10, 20):
        for codec in ("none", "int8", "int4", "sparse"):
            for fragments in (1, 4):
                name = f"local, {every}, {codec}, {fragments}"
                found[name] = Way(every, 3 if quick else 5, partial(local_steps, every, codec, fragments))
    return found


def rank(number: int, address: str, folder: Path, names: list[str], quick: bool) -> None:
    """Be one machine: time every way, and write down what it took."""
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    os.environ |= {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": "29812"}
    sent = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
    store = dist.TCPStore(address, 29811, 2, is_master=number == 0, timeout=timedelta(seconds=60))
    found: dict[str, Any] = {}
    known = ways(quick)
    with ringfort.init() as ctx:
        for name in names:
            way = known[name]
            trainer = Trainer(Scale(), number, SPEEDS[number])
            trainer.ctx = ctx
            if way.is_gloo:
                place = dist.PrefixStore(name, store)
                dist.init_process_group("gloo", store=place, rank=number, world_size=2, timeout=timedelta(seconds=300))
            way.train(trainer, 2)
            ctx.barrier()
            nbytes, begun = int(sent.read_text()), time.perf_counter()
            way.train(trainer, way.updates)
            took = time.perf_counter() - begun
            ctx.barrier()
            units = way.units * way.updates
            found[name] = {"seconds": took / units, "bytes": (int(sent.read_text()) - nbytes) / units}
            if trainer.local is not None:
                trainer.local.end_round()
                trainer.local.remove_hook()
            if way.is_gloo:
                dist.destroy_process_group()
            ctx.barrier()
    (folder / f"{number}.json").write_text(json.dumps(found))


def measured(rate: int, names: list[str], *, quick: bool) -> dict[str, dict[str, float]]:
    """Return seconds and bytes per unit of each way on a wire of so many bits a second."""
    with tempfile.TemporaryDirectory() as folder, two_hosts(rate, BURST) as hosts:
        options = ["--quick"] if quick else []
        ranks = [
            subprocess.Popen(
                [
                    *host.prefix, sys.executable, "-m", "benchmarks.slow_links_timing", str(number),
                    hosts[0].address, folder, json.dumps(names), *options,
                ]
            )
            for number, host in enumerate(hosts)
        ]  # fmt: skip
        try:
            codes = [one.wait(PATIENCE) for one in ranks]
        finally:
            for one in ranks:
                one.kill()
                one.wait()
        if any(codes):
            raise SystemExit(f"the ranks ended with {codes}")
        both = [json.loads(Path(folder, f"{number}.json").read_text()) for number in range(2)]
    return {
        name: {"seconds": max(one[name]["seconds"] for one in both), "bytes": both[0][name]["bytes"]} for name in names
    }


if __name__ == "__main__":
    rank(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4]), "--quick" in sys.argv)
