"""What a step of each way to train takes on a slow link: the timing half of `slow_links`.

Two hosts are network namespaces, joined by a wire of so many bits a second (`tbf`). A process on each goes through the
steps of a transformer like that of the learning half, of 1.3 million parameters. Computing alone is modelled: what a
step takes is measured once, as processor time, and then each step sleeps for as long, twice as long on the second
machine. Both processes share the cores of one computer with whatever else runs on it, and two machines would not.
Messages, codecs, hooks and waiting are real. What counts is the time from update to update, with everything that a rank
waits for, divided by the steps that the fast machine makes in it when nobody waits ("units"); and the bytes that the
first host sends.
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

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ringfort  # noqa: E402
from benchmarks.namespaces import INTERFACE, two_hosts  # noqa: E402
from benchmarks.slow_links_learning import LEARNING_RATE, SPEEDS, Model, Scale, random_rows  # noqa: E402
from ringfort.training import average_gradients  # noqa: E402

TIMED = Scale(width=160, layers=4)
"""Ten times what is learned with: the steps of smaller models take no longer than a message of this Python library."""
BURST = 32 * 1024
"""Bytes that may leave at once after a pause."""
PATIENCE = 900.0


class Way(NamedTuple):
    """One way to train."""

    units: float
    """Steps of the fast machine from update to update, when nobody waits for the wire; 0 for a way that chooses them
    itself."""
    updates: int
    """How many of them are timed."""
    train: Callable[[Trainer, int], None]
    """Makes so many updates."""
    is_gloo: bool = False


class Trainer:
    """One machine: its model, its speed, and its group."""

    def __init__(self, scale: Scale, rank: int, seconds: float) -> None:
        torch.manual_seed(0)
        self.rank, self.scale = rank, scale
        self.seconds = seconds / SPEEDS[rank]
        """That a step takes."""
        self.model: Any = Model(scale)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        self.ctx: Any = None
        self.local: Any = None

    def compute(self, *, share: float = 1.0, steps: bool = True) -> None:
        """Have gradients of a share of a batch, at this machine's speed; and make a step."""
        begun = time.perf_counter()
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
        if steps:
            self.step()
        self.rest(begun, share)

    def rest(self, begun: float, steps: float = 1.0) -> None:
        """Wait until so many steps that have begun then would be made."""
        time.sleep(max(0.0, begun + steps * self.seconds - time.perf_counter()))

    def step(self) -> None:
        """Make a step of the optimizer."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def seconds_of_step(scale: Scale) -> float:
    """Return the processor time of a step: the least of some."""
    model = Model(scale)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    found: list[float] = []
    for _ in range(20):
        rows = random_rows(scale, scale.batch)
        begun = time.process_time()
        model(rows).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(time.process_time() - begun)
    return min(found)


def alone(trainer: Trainer, updates: int) -> None:
    for _ in range(updates if trainer.rank == 0 else 0):
        trainer.compute()


def ddp(hook: Callable[[Any], None] | None, accumulate: int, trainer: Trainer, updates: int) -> None:
    """torch's DistributedDataParallel over Gloo: real gradients, of a few bytes, so that its hooks run."""
    if not isinstance(trainer.model, DistributedDataParallel):
        # One bucket: with several, the collectives of PowerSGD over Gloo meet those of others at the other rank.
        trainer.model = DistributedDataParallel(trainer.model, bucket_cap_mb=64)
        if hook is not None:
            hook(trainer.model)
    few = trainer.scale.context - 8
    for _ in range(updates):
        begun = time.perf_counter()
        loss = trainer.model(random_rows(trainer.scale, 1)[:, few:])
        trainer.rest(begun, accumulate)
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
            trainer.compute()
        flat = torch.cat([p.detach().reshape(-1) for p in trainer.model.parameters()])
        dist.all_reduce(flat)


def every_step(compression: str | None, trainer: Trainer, updates: int) -> None:
    """Ours: gradients in every step, of batches in proportion to speed."""
    share = SPEEDS[trainer.rank]
    tree = dict(trainer.model.named_parameters())
    for _ in range(updates):
        trainer.compute(share=share, steps=False)
        gradients = {name: parameter.grad for name, parameter in tree.items()}
        average_gradients(trainer.ctx, gradients, weight=share, compression=compression)
        trainer.step()


def local_steps(every: Any, codec: Any, fragments: int, trainer: Trainer, updates: int) -> None:
    """Ours: rounds of local steps. The first rounds, in which the ranks learn their speeds, are made before."""
    if trainer.local is None:
        trainer.local = ringfort.torch.local_steps(
            trainer.model, trainer.optimizer, ctx=trainer.ctx, every=every, codec=codec, fragments=fragments
        )
        updates += 2
    last = trainer.local.number + updates
    while trainer.local.number < last:
        trainer.compute()


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
    found["auto"] = Way(0, 3 if quick else 5, partial(local_steps, "auto", "auto", 3))
    for every in (6, 10, 20):
        for codec in ("none", "int8", "int4", "sparse"):
            for fragments in (1, 3 if every == 6 else 4):
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
    torch.set_num_threads(1)
    with ringfort.init() as ctx:
        seconds = float(ctx.broadcast(np.array([seconds_of_step(TIMED)]))[0])
        for name in names:
            way = known[name]
            trainer = Trainer(TIMED, number, seconds)
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
            chosen = trainer.local.decision if way.units == 0 else None
            units = way.updates * (way.units if chosen is None else chosen.every)
            found[name] = {"seconds": took / units, "bytes": (int(sent.read_text()) - nbytes) / units}
            if chosen is not None:
                found[name] |= {"every": chosen.every, "codec": chosen.codec, "why": chosen.why}
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
    return {name: {**both[0][name], "seconds": max(one[name]["seconds"] for one in both)} for name in names}


if __name__ == "__main__":
    rank(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4]), "--quick" in sys.argv)
