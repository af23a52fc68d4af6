"""Train a model while members are killed and others join, and compare it with a run without faults.

    python -m benchmarks.elastic_training --model transformer --steps 500 --kills 10
    python -m benchmarks.elastic_training --model resnet --steps 500 --kills 10

All members are processes of this machine, on loopback. Beside them one process trains alone from the same seed: its
losses differ by rounding only, because order, dropout and micro-batches are the same whoever computes them. The program
fails unless the losses of every tenth step are within 1%, each sample was counted once in each pass, and all members
end with the same state. elastic_training_member.py is what a member runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.elastic_training_models import MODELS, STEPS_PER_PASS

EVERY = 10
"""Steps between two comparisons of losses."""
MOST = 0.01
"""The largest relative difference of two losses."""
SILENCE = 120.0
"""Seconds without a step after which the benchmark gives up."""


class Member:
    """A process and what it said."""

    def __init__(self, home: Path, log: Path, given: argparse.Namespace, nodes: str, *, waits: bool) -> None:
        self.losses: dict[int, float] = {}
        self.members = 0
        """Members of its last step; 0 before the first."""
        self.parameters = 0
        self.end: dict[str, Any] | None = None
        self.log = log
        variables = {name: value for name, value in os.environ.items() if not name.startswith("RINGFORT_")}
        command = [sys.executable, "-m", "benchmarks.elastic_training_member", "--model", given.model]
        command += ["--steps", str(given.steps), "--nodes", nodes, "--threads", str(given.threads)]
        variables |= {"RINGFORT_HOME": str(home), "OMP_NUM_THREADS": str(given.threads)}
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                command + ["--waits"] * waits, env=variables, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
            )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("}\n"):
                found = json.loads(line)
                self.parameters = found.get("parameters", self.parameters)
                if "loss" in found:
                    self.losses[found["step"]], self.members = found["loss"], found["members"]
                elif "done" in found:
                    self.end = found

    @property
    def step(self) -> int:
        """The last step that it has told of."""
        return max(self.losses, default=0)

    def go(self) -> None:
        """Let it begin, if it waits."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def check(self) -> None:
        """Raise an error if it has ended badly."""
        code = self.process.poll()
        if code not in (None, 0):
            raise SystemExit(f"A member has failed with {code}; the end of its log:\n{self.log.read_text()[-3000:]}")

    def close(self) -> None:
        """Kill it, if it runs, and wait for its end."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Training:
    """The run with faults, and the one without."""

    def __init__(self, folder: Path, given: argparse.Namespace) -> None:
        self._given, self._folder = given, folder
        self._random = random.Random(given.seed)
        self._started = 0
        self.killed: list[int] = []
        """The steps at which a member was killed."""
        self.joined: list[int] = []
        """The steps at which its successor was there."""
        self._all: list[Member] = []
        self.alone = self._start("alone", "1", waits=False)
        self.members = [self._start("run", "2:", waits=False) for _ in range(given.members)]
        self._spares = [self._start("run", "2:", waits=True) for _ in range(min(2, given.kills))]

    def _start(self, home: str, nodes: str, *, waits: bool) -> Member:
        place = self._folder / home
        place.mkdir(0o700, exist_ok=True)
        self._started += 1
        made = Member(place, self._folder / f"{self._started:02}-{home}.txt", self._given, nodes, waits=waits)
        self._all.append(made)
        return made

    @property
    def losses(self) -> dict[int, float]:
        """The losses of the run with faults. Members agree on them."""
        return {step: loss for member in self._all if member is not self.alone for step, loss in member.losses.items()}

    @property
    def step(self) -> int:
        """The last step of the run with faults."""
        return max(member.step for member in self.members)

    def drive(self) -> None:
        """Kill members, and start others in their places, until both runs have ended."""
        given, newcomer = self._given, None
        gap, heard, before = given.steps / (given.kills + 1), time.monotonic(), (0, 0)
        while any(member.end is None for member in (*self.members, self.alone)):
            time.sleep(0.01)
            for member in (*self.members, self.alone):
                member.check()
            now = (self.step, self.alone.step)
            if now != before or any(member.end is not None for member in self.members):
                heard, before = time.monotonic(), now
            if time.monotonic() > heard + SILENCE:
                raise SystemExit(f"No step for {SILENCE:g} s after step {self.step}; logs: {self._folder}")
            if newcomer is not None and newcomer.members:
                self.joined.append(newcomer.step)
                newcomer = None
            is_whole = max(member.members for member in self.members) == given.members
            is_due = len(self.killed) < given.kills and self.step >= gap * (len(self.killed) + 1)
            if newcomer is None and is_whole and is_due:
                newcomer = self._replace()

    def _replace(self) -> Member:
        victim = self._random.choice(self.members)
        self.killed.append(self.step)
        victim.close()
        self.members.remove(victim)
        newcomer = self._spares.pop(0)
        newcomer.go()
        if len(self.killed) + len(self._spares) < self._given.kills:
            self._spares.append(self._start("run", "2:", waits=True))
        self.members.append(newcomer)
        return newcomer

    def close(self) -> None:
        """End all processes."""
        for member in self._all:
            member.close()


@contextmanager
def training(folder: Path, given: argparse.Namespace) -> Iterator[Training]:
    made = Training(folder, given)
    try:
        yield made
    finally:
        made.close()


def compare(run: Training, given: argparse.Namespace) -> list[str]:
    """Print the comparison. Return what is wrong."""
    wrong, largest = list[str](), 0.0
    print(f"{'step':>6} {'alone':>10} {'with faults':>12} {'difference':>11}")
    losses = run.losses
    for step in range(EVERY, given.steps + 1, EVERY):
        alone, found = run.alone.losses[step], losses.get(step)
        if found is None:
            wrong.append(f"nobody has told the loss of step {step}")
            continue
        difference = abs(found - alone) / abs(alone)
        largest = max(largest, difference)
        if step % (given.steps // EVERY or 1) == 0 or difference > MOST:
            print(f"{step:>6} {alone:>10.5f} {found:>12.5f} {difference:>11.2e}")
        if difference > MOST:
            wrong.append(f"the losses of step {step} differ by {difference:.2%}")
    if len(run.killed) < given.kills or len(run.joined) < given.kills:
        wrong.append(f"{len(run.killed)} kills and {len(run.joined)} joins in {given.steps} steps; take more steps")
    ends = [member.end for member in run.members if member.end is not None]
    for end in (*ends, run.alone.end):
        assert end is not None
        for number, counts in end["passes"].items():
            if counts != [float(number)]:
                wrong.append(f"after pass {number}, samples were counted {counts} times")
    if len({end["state"] for end in ends}) != 1:
        wrong.append("the members have ended with different states")
    passes = given.steps // STEPS_PER_PASS
    print(
        f"{run.alone.parameters / 1e6:.2f} million parameters; killed at steps {run.killed}, replaced by steps "
        f"{run.joined}; losses differ by at most {largest:.2e}; {passes} passes, in each every sample counted once"
    )
    return wrong


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="transformer")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 5), help="per process")
    parser.add_argument("--seed", type=int, default=1, help="of the choice of victims")
    given = parser.parse_args()
    if given.members < 2 or given.kills > given.steps // 4:
        parser.error("needs at least 2 members, and 4 steps per kill")
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, training(Path(folder), given) as run:
        run.drive()
        wrong = compare(run, given)
    print(f"{time.monotonic() - start:.0f} s with {given.members} members of {given.threads} threads")
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
