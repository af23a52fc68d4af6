"""What elasticity costs where nothing fails: `python -m benchmarks.elastic_price`.

Two members of an elastic run and two ranks of a plain loop (`ringfort.init`, `all_reduce`) take turns on one machine,
through shared memory. Each computes for 50 ms a step, by sleeping, and updates its weights with the mean gradient. The
memory (RSS) is that of a training process, beside what the run says that it takes; its control process is told
apart. Then two members of unequal speed: how much of the sum of their speeds is sealed.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np
import psutil

import ringfort
from ringfort.config import AutoDiscoveryConfig
from ringfort.identity.namespace import NetworkNamespace
from ringfort.training.elastic.memory_needs import MemoryNeeds

FOREVER = 1_000_000
LIMIT = 120.0
"""Seconds for any one thing."""
SPEEDS = (0.010, 0.030)
"""Seconds of a micro-batch at the members of unequal speed."""


# --- one process ------------------------------------------------------------------------------------------------------


class Rounds:
    """Waits for the word of the parent before each round of steps, and tells it the seconds of each step after it, and
    the memory of this process."""

    def __init__(self) -> None:
        self.said = 0
        """Bytes that the run has said it takes."""
        self._left, self._begin = 0, 0.0
        self._times: list[float] = []
        self._wait()

    def step_ended(self) -> None:
        """The program has applied a step. After it, because a member that is dealt nothing is given a step only when
        that is sealed."""
        now = time.perf_counter()
        self._times.append(now - self._begin)
        self._begin = now
        self._left -= 1
        if self._left == 0:
            self._wait()

    def _wait(self) -> None:
        own = psutil.Process()
        children = sum(child.memory_info().rss for child in own.children())
        told = {"seconds": self._times, "rss": own.memory_info().rss, "children": children, "said": self.said}
        print(json.dumps(told), flush=True)
        word = sys.stdin.readline()
        if not word:
            os._exit(0)  # the parent has ended; neither loop would end by itself
        self._left, self._times, self._begin = int(word), [], time.perf_counter()


def plain(given: argparse.Namespace) -> None:
    """The loop without elasticity."""
    master = f"127.0.0.1:{given.port}"
    context, rounds = ringfort.init(rank=given.rank, world_size=2, master=master), Rounds()
    weights, gradient = np.zeros(given.size, np.float32), np.empty(given.size, np.float32)
    while True:
        time.sleep(given.seconds)
        gradient.fill(1.0)
        if given.size:
            context.all_reduce(gradient)
        np.divide(gradient, 2.0, out=gradient)
        weights += gradient
        rounds.step_ended()


def elastic(given: argparse.Namespace) -> None:
    """The same loop, as a run that survives."""
    state, gradient = {"w": np.zeros(given.size, np.float32)}, np.empty(given.size, np.float32)
    rounds, config = Rounds(), AutoDiscoveryConfig(interfaces=["127.0.0.1"])
    with ringfort.elastic(state, nodes="2:2", name="price", config=config) as run:
        for step in run.steps(FOREVER, samples=4096, batch=given.batch, microbatch=1):
            for _ in step:
                time.sleep(given.seconds)
                gradient.fill(1.0)
                step.add({"w": gradient})
            state["w"] += step.mean()["w"]
            if not rounds.said:
                local = run._participant.local
                assert local.layout is not None
                rounds.said = MemoryNeeds.of(local.layout, state["w"].nbytes, local.host_copies).always
            with run.aside():
                rounds.step_ended()


# --- all of them ------------------------------------------------------------------------------------------------------


class Pair:
    """Two processes that do the same."""

    def __init__(
        self,
        kind: str,
        size: int,
        seconds: tuple[float, float],
        batch: int = 2,
        *,
        module: str = "benchmarks.elastic_price",
        options: tuple[str, ...] = (),
    ) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="ringfort-price-")
        key = NetworkNamespace.generate("price").join_code()
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        environment = {**os.environ, "RINGFORT_KEY": key, "RINGFORT_HOME": self._home.name, "RINGFORT_CLUSTER": ""}
        command = [sys.executable, "-m", module, "--kind", kind, "--size", str(size)]
        command += ["--port", str(port), "--batch", str(batch), *options]
        self.processes = [
            subprocess.Popen(
                [*command, "--rank", str(rank), "--seconds", str(seconds[rank])],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        self.told: list[dict[str, Any]] = []
        """What each has told last."""
        self._hear()

    def _hear(self) -> list[list[float]]:
        self.told = [json.loads(process.stdout.readline()) for process in self.processes]
        return [one["seconds"] for one in self.told]

    def most(self, what: str) -> int:
        """Return the largest of a number that each has told."""
        return max(one[what] for one in self.told)

    def run(self, steps: int) -> list[float]:
        """Return the seconds of so many steps, those of the slower process of each."""
        for process in self.processes:
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        return [max(both) for both in zip(*self._hear(), strict=True)]

    def end(self) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait(LIMIT)
        self._home.cleanup()


@contextmanager
def pair(*arguments: Any, **options: Any) -> Iterator[Pair]:
    made = Pair(*arguments, **options)
    try:
        yield made
    finally:
        made.end()


def price(mib: float, rounds: int, steps: int, seconds: float) -> str:
    """Return the price of elasticity for so many MiB of gradients, in time and in memory."""
    size = int(mib * (1 << 18))
    with pair("plain", size, (seconds,) * 2) as without, pair("elastic", size, (seconds,) * 2) as with_it:
        times = compared(without, with_it, rounds, steps)
        more = with_it.most("rss") - without.most("rss")
        return (
            f"{times}; {more / 1e6:.1f} MB more memory, the run says up to {with_it.most('said') / 1e6:.1f} MB; "
            f"{with_it.most('children') / 1e6:.0f} MB for its control process"
        )


def compared(without: Pair, with_it: Pair, rounds: int, steps: int) -> str:
    """Have two pairs take turns. Return the medians of their steps, and what the second one costs more."""
    for one in (without, with_it):
        one.run(steps)  # the first step, and warm caches
    times: dict[Pair, list[float]] = {without: [], with_it: []}
    for turn in range(rounds):
        for one in (without, with_it)[:: 1 if turn % 2 else -1]:
            times[one] += one.run(steps)
    a, b = median(times[without]), median(times[with_it])
    return f"{a * 1e3:.2f} ms without, {b * 1e3:.2f} ms with it: {(b - a) * 1e6:.0f} us, {b / a - 1:.2%}"


def unequal(steps: int) -> str:
    """Return what members of 3:1 speed reach together."""
    batch = 64
    with pair("elastic", 1 << 18, SPEEDS, batch=batch) as both:
        both.run(steps)
        taken = sum(both.run(steps))
    alone = sum(1 / seconds for seconds in SPEEDS)
    return f"3:1 speeds: {steps * batch / taken / alone:.1%} of the sum of both"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic_price", description=__doc__)
    for hidden in ("--kind", "--port"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--rank", "--size", "--batch"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0.05, help="of computing in each step [%(default)s]")
    parser.add_argument("--mib", type=float, nargs="*", default=[1.0, 64.0], help="MiB of gradients [1 64]")
    parser.add_argument("--rounds", type=int, default=10, help="rounds [%(default)s]")
    parser.add_argument("--steps", type=int, default=20, help="steps of a round [%(default)s]")
    given = parser.parse_args()
    if given.kind:
        (plain if given.kind == "plain" else elastic)(given)
        return
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    alone = price(4 / (1 << 20), given.rounds, 50 * given.steps, 0.0)
    print(f"a gradient of one float (4 bytes), without computing: {alone}", flush=True)
    for mib in given.mib:
        print(f"{mib:g} MiB: {price(mib, given.rounds, given.steps, given.seconds)}", flush=True)
    print(unequal(5 * given.steps))


if __name__ == "__main__":
    main()
