"""How well do two uneven machines learn together? Real training, in one process: the learning half of `slow_links`.

A byte-level transformer learns Python's own source; 5% of it is held back. There are a fast machine and one of half its
speed. Time is counted in units, the steps of the fast machine: the members of an arm compute one after the other, and
what each would do at the same time counts once. Codecs, error feedback and outer optimizer are the real ones (those of
`ringfort.LocalSteps`). What a unit takes with its communication is measured on real links by `slow_links_timing`.

The learning rate of every arm is searched on one small grid, with a seed of its own; then the arm is run with the other
seeds. Arms that differ only in codec, fragments or length share one search. The rate rises for 5% of the samples, and
falls as a cosine.
"""

from __future__ import annotations

import json
import sysconfig
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from math import cos, pi
from multiprocessing import get_context
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ringfort import GradientCompressor
from ringfort.collectives.algorithms import split
from ringfort.compression import encoded
from ringfort.training.local_steps.outer import OuterOptimizer, OuterSettings
from ringfort.training.local_steps.pace import shares

SPEEDS = (1.0, 0.5)
RATES = (1e-3, 2e-3, 4e-3, 8e-3)
"""The grid of learning rates. The search begins in the middle and ends at the best one whose neighbours are worse."""
FIRST_RATES = (2e-3, 4e-3)
LEARNING_RATE = 2e-3
"""Where only time is measured."""
TUNING_SEED = 99
WARM_UP = 0.05
LOOKS = 8


@dataclass(frozen=True)
class Scale:
    """How large an experiment is."""

    units: int = 2400
    width: int = 64
    layers: int = 2
    context: int = 64
    batch: int = 4


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    name: str
    kind: str
    """alone, sync (an update from all machines' gradients), or local."""
    longer: float = 1.0
    """Times the units."""
    is_even: bool = False
    """All machines make the same steps, at the pace of the slowest, as DDP does."""
    accumulate: int = 1
    every: int = 5
    """Local steps of the fast machine in a round."""
    codec: str = "none"
    fragments: int = 1
    weighting: Any = "samples"
    outer: tuple[float, float] = (1.0, 0.0)
    speeds: tuple[float, ...] = SPEEDS
    """Of the machines."""
    tuned_as: str = ""
    """The arm whose learning rate this one gets."""


def _local(every: int, codec: str = "none", fragments: int = 1, **other: Any) -> Arm:
    name, first = f"local, {every}, {codec}, {fragments}", f"local, {every}, none, 1"
    return Arm(name, "local", every=every, codec=codec, fragments=fragments, tuned_as=first, **other)


def _more(name: str, speeds: tuple[float, ...]) -> Arm:
    return replace(_local(6, "int4", 3), name=name, speeds=speeds)


ALONE = "alone"
LENGTHS = (1.25, 1.5)
TWO_FAST, FOUR = "two fast machines", "two fast ones and two of half speed"
CORE = (
    Arm(ALONE, "alone", speeds=(1.0,)),
    _local(6),
    *(
        Arm(f"alone, {longer} times as long", "alone", longer=longer, speeds=(1.0,), tuned_as=ALONE)
        for longer in LENGTHS
    ),
    Arm("every step", "sync"),
    Arm("DDP", "sync", is_even=True),
    _local(6, "int8"),
    _local(6, "int4", 3),
    _local(6, "sparse", 3),
    _local(10),
)
"""What is run first."""
OTHERS = (
    replace(_local(20), tuned_as="local, 10, none, 1"),
    Arm("DDP, accumulation 4", "sync", is_even=True, accumulate=4),
    Arm("DDP, accumulation 16", "sync", is_even=True, accumulate=16),
    Arm("DDP, accumulation 64", "sync", is_even=True, accumulate=64, tuned_as="DDP, accumulation 16"),
    Arm("PostLocalSGD, 16", "local", is_even=True, every=16, weighting="uniform"),
    _more(TWO_FAST, (1.0, 1.0)),
    _more(FOUR, (1.0, 1.0, 0.5, 0.5)),
    replace(_more(f"{TWO_FAST}, 1.25 times as long", (1.0, 1.0)), longer=1.25),
    replace(_local(6), name="local, 6, outer rate 1.2", outer=(1.2, 0.0)),
    Arm("local, 10, weighting uniform", "local", every=10, weighting="uniform", tuned_as="local, 10, none, 1"),
    Arm("local, 10, weighting normalized", "local", every=10, weighting="normalized", tuned_as="local, 10, none, 1"),
    Arm("local, 20, Nesterov 0.6, 0.9", "local", every=20, outer=(0.6, 0.9)),
    _local(10, "int4", 4),
    _local(10, "sparse", 4),
)
ARMS = (*CORE, *OTHERS)


class Model(nn.Module):
    """A byte-level transformer with tied embeddings."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        width = scale.width
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Parameter(torch.randn(scale.context, width) * 0.02)
        nn.init.normal_(self.bytes.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width) for _ in range(scale.layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over the bytes after the first."""
        hidden = self.bytes(x[:, :-1]) + self.places[: x.shape[1] - 1]
        for block in self.blocks:
            hidden = block(hidden)
        scores = functional.linear(self.norm(hidden), self.bytes.weight)
        return functional.cross_entropy(scores.flatten(0, 1), x[:, 1:].flatten())


class Block(nn.Module):
    """Attention and two layers, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 32)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the next block gets."""
        b, t, c = x.shape
        parts = self.attend(self.norms[0](x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(b, t, c))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


@cache
def corpus() -> tuple[np.ndarray, np.ndarray]:
    """Return Python's own source as bytes: what is learned, and what is held back."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    data = np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8)
    edge = int(0.95 * data.size)
    return data[:edge], data[edge:]


def rows_at(data: np.ndarray, places: np.ndarray, scale: Scale) -> torch.Tensor:
    """Return the sequences that begin at `places`."""
    return torch.from_numpy(data[places[:, None] + np.arange(scale.context + 1)].astype(np.int64))


def random_rows(scale: Scale, count: int, random: np.random.Generator | None = None) -> torch.Tensor:
    """Return random sequences to learn from."""
    learned, _ = corpus()
    random = random or np.random.default_rng()
    return rows_at(learned, random.integers(0, learned.size - scale.context - 1, count), scale)


class Experiment:
    """One arm with one seed and one learning rate."""

    def __init__(self, arm: Arm, scale: Scale, seed: int, rate: float) -> None:
        torch.manual_seed(seed)
        self.arm, self.scale, self.rate = arm, scale, rate
        self.model = Model(scale)
        self.random = np.random.default_rng(seed)
        self.units = int(scale.units * arm.longer)
        self.steps = [1.0] * len(arm.speeds) if arm.is_even else list(arm.speeds)
        """Of each machine in the time of a turn."""
        self.turn = 1 / min(arm.speeds) if arm.is_even else 1.0
        self.total: float = self.units / self.turn * sum(self.steps)
        """Steps of all machines."""
        self.done = 0.0
        _, held = corpus()
        places = np.random.default_rng(7).integers(0, held.size - scale.context - 1, 192)
        self.validation = rows_at(held, places, scale)
        self.curve: list[tuple[float, float]] = []
        self.reductions = 0

    def batch(self) -> torch.Tensor:
        """Return the next samples."""
        return random_rows(self.scale, self.scale.batch, self.random)

    def rate_now(self) -> float:
        """Return the learning rate after the samples that all machines have seen."""
        done = self.done / self.total
        return self.rate * min(1.0, done / WARM_UP + 1e-3) * 0.5 * (1 + cos(pi * min(1.0, done)))

    def look(self, units: float) -> None:
        """Note the validation loss."""
        with torch.no_grad():
            self.curve.append((units, float(np.mean([self.model(part) for part in self.validation.split(64)]))))

    def optimizer(self) -> torch.optim.Optimizer:
        """Return a new optimizer."""
        return torch.optim.AdamW(self.model.parameters(), lr=self.rate, weight_decay=0.1, betas=(0.9, 0.95), fused=True)

    def run(self) -> dict[str, Any]:
        """Train, and return what came of it."""
        begun = time.perf_counter()
        self._local() if self.arm.kind == "local" else self._sync()
        return {
            **asdict(self.arm),
            "rate": self.rate,
            "loss": self.curve[-1][1],
            "curve": self.curve,
            "units": self.units,
            "reductions": self.reductions,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "seconds": time.perf_counter() - begun,
        }

    def _sync(self) -> None:
        """Each update is made of what all machines compute in a turn."""
        optimizer = self.optimizer()
        updates = int(self.units / self.turn / self.arm.accumulate)
        owed = 0.0
        for update in range(updates):
            owed += sum(self.steps) * self.arm.accumulate
            parts, owed = max(1, int(owed + 1e-9)), owed - max(1, int(owed + 1e-9))
            for _ in range(parts):
                (self.model(self.batch()) / parts).backward()
            self._step(optimizer)
            self.done += parts
            self.reductions += 1
            if (update + 1) % max(1, updates // LOOKS) == 0 or update == updates - 1:
                self.look((update + 1) * self.turn * self.arm.accumulate)

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self.rate_now()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def _local(self) -> None:
        """Each machine makes its steps of a round; then the global weights move by the mean difference. With fragments
        the parts take turns: a part is taken over a turn after its reduction began, as `LocalSteps` does."""
        arm, parameters = self.arm, list(self.model.parameters())

        def flat() -> np.ndarray:
            return np.concatenate([p.detach().numpy().reshape(-1) for p in parameters])

        def put(weights: np.ndarray) -> None:
            start = 0
            with torch.no_grad():
                for p in parameters:
                    p.copy_(torch.from_numpy(weights[start : start + p.numel()]).view_as(p))
                    start += p.numel()

        outer, settings = OuterOptimizer(flat()), OuterSettings(*arm.outer)
        machines = [flat() for _ in self.steps]
        optimizers = [self.optimizer() for _ in self.steps]
        codecs = [
            None if arm.codec == "none" else GradientCompressor(arm.codec, seed=m) for m in range(len(self.steps))
        ]
        every = arm.every
        counts = [max(1, int(every * share)) for share in self.steps]
        rounds = int(self.units / self.turn / every)
        self.total = rounds * sum(counts)
        factors = shares(arm.weighting, counts, [float(count) for count in counts])
        parts = [slice(*span) for span in split(outer.weights.size, arm.fragments)]
        pending: tuple[slice, np.ndarray] | None = None
        for turn in range(rounds * len(parts)):
            number, place = divmod(turn, len(parts))
            begun, made = self.done, 0
            for m, (optimizer, count) in enumerate(zip(optimizers, counts, strict=True)):
                steps = count * (place + 1) // len(parts) - count * place // len(parts)
                made += steps
                put(machines[m])
                self.done = begun
                for _ in range(steps):
                    self.model(self.batch()).backward()
                    self._step(optimizer)
                    self.done += sum(counts) / len(parts) / steps
                machines[m] = flat()
            self.done = begun + made
            if pending is not None:
                self._take_over(outer, settings, machines, *pending, kept=0.5)
            mean = np.zeros_like(outer.weights[parts[place]])
            for machine, factor, codec in zip(machines, factors, codecs, strict=True):
                difference = (outer.weights[parts[place]] - machine[parts[place]]) * np.float32(factor)
                name = f"part {place}"
                mean += difference if codec is None else encoded.read(_array(codec.compress(difference, name)))
            pending = parts[place], mean
            self.reductions += 1
            if len(parts) == 1:
                self._take_over(outer, settings, machines, *pending, kept=0.0)
                pending = None
            if place == len(parts) - 1 and ((number + 1) % max(1, rounds // LOOKS) == 0 or number == rounds - 1):
                put(outer.weights if number < rounds - 1 or len(parts) == 1 else self._ended(outer, machines, factors))
                self.look((number + 1) * self.turn * every)

    @staticmethod
    def _take_over(
        outer: OuterOptimizer,
        settings: OuterSettings,
        machines: list[np.ndarray],
        part: slice,
        mean: np.ndarray,
        *,
        kept: float,
    ) -> None:
        outer.step(mean, settings, part)
        for machine in machines:
            machine[part] = kept * machine[part] + (1 - kept) * outer.weights[part]

    @staticmethod
    def _ended(outer: OuterOptimizer, machines: list[np.ndarray], factors: list[float]) -> np.ndarray:
        """Return what `end_round` gives: one more reduction of everything, here without the outer optimizer."""
        return sum(machine * np.float32(factor) for machine, factor in zip(machines, factors, strict=True))  # type: ignore[return-value]


def _array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def learn(out: Path, scale: Scale, seeds: int, say: Callable[[str], None], processes: int = 1) -> dict[str, Any]:
    """Run what is missing in `out`: the search of the learning rates, and then every seed with the best. Return all
    runs."""
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"scale": asdict(scale), "runs": {}}
    if found["scale"] != asdict(scale):
        raise SystemExit(f"{out} has runs of another size; remove it, or pass another folder")
    runs = found["runs"]
    running: dict[str, Future[dict[str, Any]]] = {}
    lock = Lock()

    def run(arm: Arm, seed: int, rate: float) -> float:
        key = f"{arm.name} | {seed} | {rate:g}"
        with lock:
            if key in runs:
                return runs[key]["loss"]
            if key not in running:
                running[key] = pool.submit(_run, arm, scale, seed, rate)
        one = running[key].result()
        with lock:
            if key not in runs:
                runs[key] = one
                say(f"{key}: {one['loss']:.4f} in {one['seconds']:.0f} s")
                part = out.with_suffix(".part")
                part.write_text(json.dumps(found))
                part.replace(out)
        return one["loss"]

    def learned(arm: Arm, seed: int) -> None:
        tuned = next(one for one in ARMS if one.name == (arm.tuned_as or arm.name))
        run(arm, seed, best_rate(lambda rate: run(tuned, TUNING_SEED, rate)))

    with (
        ProcessPoolExecutor(processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool,
        ThreadPoolExecutor(processes) as waiting,
    ):
        for arms in (CORE, OTHERS):
            for seed in range(seeds):
                list(waiting.map(partial(learned, seed=seed), arms))
    return runs


def _run(arm: Arm, scale: Scale, seed: int, rate: float) -> dict[str, Any]:
    return {**Experiment(arm, scale, seed, rate).run(), "seed": seed}


def best_rate(loss_with: Callable[[float], float]) -> float:
    """Return the learning rate of the grid that is better than its neighbours."""
    tried = {rate: loss_with(rate) for rate in FIRST_RATES}
    while True:
        best = min(tried, key=tried.__getitem__)
        place = RATES.index(best)
        near = [rate for rate in RATES[max(0, place - 1) : place + 2] if rate not in tried]
        if not near:
            return best
        tried.update({rate: loss_with(rate) for rate in near})


def runs_of(runs: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of each arm, without those of the tuning seed."""
    found: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in ARMS}
    for one in runs.values():
        if one["seed"] != TUNING_SEED and one["name"] in found:
            found[one["name"]].append(one)
    return {name: ones for name, ones in found.items() if ones}
