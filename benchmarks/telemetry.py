"""What telemetry costs: a step of 10 ms, and an all-reduce of 4 bytes.

    python -m benchmarks.telemetry [--rounds 20] [--json FILE]

Three pairs of ranks exist all the time and take turns, in another order in every round: one without telemetry
(`RINGFORT_TELEMETRY=off`), one that writes its trace, and one that a viewer looks at meanwhile (`LiveSource`, four
views a second). A step sleeps for 9 ms, averages 64 KiB of gradients and logs a loss. Both ranks and the viewer are on
this machine, so the viewer's own processor time counts too where cores are scarce.

For each mode it prints the median of a step and of an all-reduce over all rounds, the median of the ratios to the mode
without telemetry in the same round, and the processor time of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

MODES = ("off", "on", "viewed")
STEPS = 50
"""Of one turn: half a second."""
CALLS = 2000
"""All-reduces of one turn."""
LIMIT = 60.0
"""Seconds for the ranks to meet."""


class Child:
    """A process that does what a line tells it, and answers with a line of JSON."""

    def __init__(self, what: str, variables: Mapping[str, str], pass_fds: Sequence[int] = ()) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.telemetry_worker", what],
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=pass_fds,
        )

    def tell(self, line: str) -> None:
        """Send a line."""
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """Return the next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a process has ended with {self.process.wait()}; its error is above")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(LIMIT)


@contextmanager
def pair(mode: str) -> Iterator[list[Child]]:
    """Two ranks of one group."""
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as listener:
        ranks: list[Child] = []
        for rank in range(2):
            passed = [listener.fileno()] if rank == 0 else []
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "RINGFORT_MASTER": f"127.0.0.1:{listener.getsockname()[1]}",
                "RINGFORT_LISTEN_FD": "".join(map(str, passed)),
                "RINGFORT_TELEMETRY": "off" if mode == "off" else "",
            }
            ranks.append(Child("rank", variables, passed))
            stack.callback(ranks[-1].close)
        for child in ranks:
            child.answer()
        yield ranks


def turn(ranks: Sequence[Child], viewer: Child | None) -> dict[str, float]:
    """Return the seconds of a step, of its processor time, and of an all-reduce, in one turn of a pair."""
    if viewer is not None:
        viewer.tell("look")
        viewer.answer()
    found: dict[str, float] = {}
    for what, count in (("step", STEPS), ("call", CALLS)):
        for child in ranks:
            child.tell(f"{what} {count}")
        answers = [child.answer() for child in ranks]
        for name in answers[0]:
            found[name] = max(answer[name] for answer in answers)
    if viewer is not None:
        viewer.tell("rest")
        viewer.answer()
    return found


def measure(rounds: int) -> dict[str, list[dict[str, float]]]:
    """Return what was measured in each round, by mode."""
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ |= {"XDG_RUNTIME_DIR": str(folder), "RINGFORT_HOME": str(folder / "home")}
        pairs = {mode: stack.enter_context(pair(mode)) for mode in MODES}
        viewer = Child("viewer", {})
        stack.callback(viewer.close)
        for number in range(-1, rounds):
            for mode in random.sample(MODES, len(MODES)):
                result = turn(pairs[mode], viewer if mode == "viewed" else None)
                if number >= 0:  # in the first round everything is made
                    found[mode].append(result)
            print(f"\rround {number + 1} of {rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.telemetry", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    given = parser.parse_args()
    began, before = time.monotonic(), os.getloadavg()[0]
    found = measure(given.rounds)
    print(f"{given.rounds} rounds in {time.monotonic() - began:.0f} s; load {before:.1f} at the start")
    print("mode     step        ratio   processor  all-reduce  ratio")
    for mode in MODES:
        steps, cpu, calls = ([one[name] for one in found[mode]] for name in ("step", "cpu", "call"))
        ratios = [
            median(one[name] / base[name] for one, base in zip(found[mode], found["off"], strict=True))
            for name in ("step", "call")
        ]
        print(
            f"{mode:8} {median(steps) * 1e3:.3f} ms  {ratios[0]:.4f}  {median(cpu) * 1e6:6.0f} us  "
            f"{median(calls) * 1e6:7.2f} us  {ratios[1]:.3f}"
        )
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
