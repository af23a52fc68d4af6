"""How long a run on a GPU stands still when a member is killed: `python -m benchmarks.elastic_cuda`.

Two members share one GPU. In each round one is killed, and another started in its place: how long until the other one
seals the next step, until the new one takes part, and does the memory of the device grow? By default each survives one
round and is killed in the next, so every state was copied many times. With `--same` one member survives all rounds:
what it does not give back adds up.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from math import ceil
from statistics import median
from typing import Any

from ringfort.config import AutoDiscoveryConfig
from ringfort.identity.namespace import NetworkNamespace

LIMIT = 90.0
"""Seconds for any one thing."""
MB = 1e6


def member(given: argparse.Namespace) -> None:
    """Train, and print a line after each step."""
    import torch

    import ringfort.torch

    torch.manual_seed(0)
    device = torch.device(given.device)
    layers = [torch.nn.Linear(given.width, given.width) for _ in range(given.layers)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = torch.randn(64, given.width, device=device)

    def on_step(gradients: dict[str, Any], step: int) -> None:
        used = [0, 0, 0]
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            used = [torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free]
        line = {"at": time.monotonic(), "step": step, "members": len(run.members), "used": used, "loss": run.loss}
        print(json.dumps(line), flush=True)

    config = AutoDiscoveryConfig(interfaces=["127.0.0.1"])
    run = ringfort.torch.elastic(
        model, optimizer, batch=8, nodes="1:", name="cuda", config=config, on_step=on_step, clip_norm=1.0
    )  # fmt: skip
    for _ in run.loader(list(range(1 << 16)), microbatch=1, steps=1 << 20):
        run.backward(model(rows).square().mean())
        run.step()


class Member:
    """A process of a member, and the lines that it has printed."""

    def __init__(self, given: argparse.Namespace, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "benchmarks.elastic_cuda", "--member", "--device", given.device]
        command += ["--width", str(given.width), "--layers", str(given.layers)]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        self.lines: list[dict[str, Any]] = []
        self.started = time.monotonic()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))

    def first(self, after: float, members: int) -> dict[str, Any]:
        """Return the first line after a time of a step with so many members, once it is there."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            for line in self.lines[-5000:]:
                if line["at"] > after and line["members"] == members:
                    return line
            if self.process.poll() is not None:
                break
            time.sleep(0.01)
        raise SystemExit(f"no step with {members} members within {LIMIT:g} s (exit {self.process.poll()})")

    def kill(self) -> float:
        """Kill it. Return when."""
        at = time.monotonic()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        return at


def described(what: str, taken: list[float]) -> str:
    """Return the median, the 95th percentile and the worst of some times, in words."""
    ordered = sorted(taken)
    high = ordered[ceil(0.95 * len(ordered)) - 1]
    return f"{what}: median {median(ordered):.2f} s, 95% {high:.2f} s, worst {ordered[-1]:.2f} s of {len(ordered)}"


def measure(given: argparse.Namespace) -> None:
    """Kill one of two members, round after round: the older one, or with `--same` always the younger one."""
    with tempfile.TemporaryDirectory(prefix="ringfort-cuda-") as home:
        key = NetworkNamespace.generate("cuda").join_code()
        environment = {**os.environ, "RINGFORT_KEY": key, "RINGFORT_HOME": home, "RINGFORT_CLUSTER": ""}
        stays, goes = Member(given, environment), Member(given, environment)
        try:
            recoveries, joins, used = list[float](), list[float](), list[list[int]]()
            stays.first(goes.started, 2)
            for number in range(given.rounds):
                killed = goes.kill()
                recoveries.append(stays.first(killed, 1)["at"] - killed)
                goes = Member(given, environment)
                joined = stays.first(goes.started, 2)
                joins.append(joined["at"] - goes.started)
                used.append(joined["used"])
                goes.first(goes.started, 2)
                if not given.same:
                    stays, goes = goes, stays
                print(f"round {number + 1}: {recoveries[-1]:.2f} s, joined after {joins[-1]:.1f} s, {used[-1]} bytes")
        finally:
            for one in (stays, goes):
                one.kill()
    print(described("a member is killed, to the next sealed step", recoveries))
    print(described("a member is started, to its first step (imports included)", joins))
    for place, what in enumerate(("allocated by the survivor", "reserved by the survivor", "used by all processes")):
        tenth, last = used[min(9, len(used) - 1)][place], used[-1][place]
        print(f"device memory {what}: {tenth / MB:.1f} MB after round 10, {last / MB:.1f} MB at the end")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic_cuda", description=__doc__)
    parser.add_argument("--member", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try it [%(default)s]")
    parser.add_argument("--width", type=int, default=2040, help="width of a layer [%(default)s]")
    parser.add_argument("--layers", type=int, default=6, help="layers [%(default)s: 25 M parameters]")
    parser.add_argument("--rounds", type=int, default=50, help="kills [%(default)s]")
    parser.add_argument("--same", action="store_true", help="let one member survive all rounds")
    given = parser.parse_args()
    (member if given.member else measure)(given)


if __name__ == "__main__":
    main()
