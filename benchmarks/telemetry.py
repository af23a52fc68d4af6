"""What telemetry costs: a step of 10 ms, and an all-reduce of 4 bytes.

    python -m benchmarks.telemetry [--rounds 20] [--calls] [--json FILE]

Three pairs of ranks exist all the time and take turns, in another order in every round: one without telemetry
(`RINGFORT_TELEMETRY=off`), one that writes its trace, and one that a viewer looks at meanwhile (`LiveSource`, four
views a second). Each pair is a cluster of its own, with a control process beside each rank. The viewer is an observer
of that cluster and cannot read the traces, so reports come over the control links, as from another machine. A step
sleeps for 9 ms, averages 64 KiB of gradients and logs a loss. Both ranks and the viewer are on this machine, so the
viewer's own processor time counts too where cores are scarce.

For each mode it prints the time of a step (mean and median of a turn), its processor time, and the time of an
all-reduce (of the fastest 50 of a turn): the median of all rounds, and of the ratios to the mode without telemetry in
the same round, with the middle half of them. `--calls` measures only all-reduces that nobody looks at, in rounds of a
second.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from ringfort.telemetry.watching import LEASE

MODES = ("off", "on", "viewed")
STEPS = 200
"""Of one turn: two seconds, in which a viewer gets two reports of each rank."""
CALLS = 5000
"""All-reduces of one turn."""
LIMIT = 60.0
"""Seconds for the ranks to meet."""
NAMES = {
    "step": "a step, mean of a turn",
    "median": "a step, median of a turn",
    "cpu": "processor time of a step",
    "call": "an all-reduce of 4 bytes",
}
FORGET = LEASE + 1.0
"""Seconds until a control process has forgotten a viewer, and reads no trace any more."""


class Child:
    """A process that does what a line tells it, and answers with a line of JSON."""

    def __init__(self, what: str, variables: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.telemetry_worker", what],
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
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


def place(folder: Path, home: str, traces: str) -> dict[str, str]:
    """The variables of a process: its cluster, which nobody else finds, and where it writes or looks for traces."""
    for name in (home, traces):
        (folder / name).mkdir(0o700, exist_ok=True)
    found = {"RINGFORT_HOME": str(folder / home), "XDG_RUNTIME_DIR": str(folder / traces)}
    return {**found, "RINGFORT_INTERFACES": "127.0.0.1"}


@contextmanager
def pair(folder: Path, mode: str) -> Iterator[list[Child]]:
    """Two ranks of one group."""
    with ExitStack() as stack:
        ranks: list[Child] = []
        for _ in range(2):
            variables = place(folder, mode, f"traces-{mode}")
            ranks.append(Child("rank", {**variables, "RINGFORT_TELEMETRY": "off" if mode == "off" else ""}))
            stack.callback(ranks[-1].close)
        for child in ranks:
            child.answer()
        yield ranks


def turn(ranks: Sequence[Child], viewer: Child | None, *, only_calls: bool) -> dict[str, float]:
    """Return the seconds of a step, of its processor time, and of an all-reduce, in one turn of a pair."""
    if viewer is not None:
        viewer.tell("look")
        viewer.answer()
    found: dict[str, float] = {}
    for what, count in [("step", STEPS), ("call", CALLS)][only_calls:]:
        for child in ranks:
            child.tell(f"{what} {count}")
        answers = [child.answer() for child in ranks]
        for name in answers[0]:
            found[name] = max(answer[name] for answer in answers)
    if viewer is not None:
        viewer.tell("rest")
        viewer.answer()
        time.sleep(FORGET)
    return found


def measure(rounds: int, *, only_calls: bool = False) -> dict[str, list[dict[str, float]]]:
    """Return what was measured in each round, by mode."""
    modes = [mode for mode in MODES if mode != "viewed" or not only_calls]
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pairs = {mode: stack.enter_context(pair(folder, mode)) for mode in modes}
        viewer = Child("viewer", place(folder, "viewed", "traces-viewer"))
        stack.callback(viewer.close)
        for number in range(-1, rounds):
            for mode in random.sample(modes, len(modes)):
                result = turn(pairs[mode], viewer if mode == "viewed" else None, only_calls=only_calls)
                if number >= 0:  # in the first round everything is made
                    found[mode].append(result)
            print(f"\rround {number + 1} of {rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.telemetry", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", action="store_true", help="only all-reduces that nobody looks at")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    given = parser.parse_args()
    began, before = time.monotonic(), os.getloadavg()[0]
    found = measure(given.rounds, only_calls=given.calls)
    print(f"{given.rounds} rounds in {time.monotonic() - began:.0f} s; load {before:.1f} at the start")
    print("                 ratio to `off` in the same round: median (middle half)")
    figures = [("step", "ms", 1e3), ("median", "ms", 1e3), ("cpu", "us", 1e6), ("call", "us", 1e6)]
    for name, unit, scale in figures[3 * given.calls :]:
        print(NAMES[name])
        for mode in found:
            ratios = [one[name] / base[name] for one, base in zip(found[mode], found["off"], strict=True)]
            low, middle, high = quantiles(ratios, n=4)
            value = median(one[name] for one in found[mode]) * scale
            print(f"  {mode:7} {value:7.2f} {unit}  {middle:.4f} ({low:.4f} to {high:.4f})")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
