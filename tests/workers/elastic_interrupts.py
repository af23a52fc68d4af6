"""A program that is in an elastic run again and again, and is interrupted at a random instruction each time:
`python -m tests.workers.elastic_interrupts '{"rounds": 20, "seed": 1}'`.

It says for each round what became of it. Two members of `tests.workers.elastic_cases` stay in the run.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import random
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import psutil

import ringfort
from ringfort.config import AutoDiscoveryConfig
from tests.workers.elastic import DATA, fresh, gradient, update

KINDS = ("raise", "SIGINT", "SIGTERM", "SIGINT SIGINT", "SIGTERM SIGINT")
"""What comes: a `KeyboardInterrupt` at once, a signal, or two signals one shortly after the other."""
STUCK = 60.0
"""Seconds of a round after which it says where it is and ends."""
LONGEST_START, LONGEST_STEP = 2.0, 0.2
"""Seconds to the interrupt, from the start of a round or from its first step."""


class Alarm:
    """Interrupts this thread after a random time."""

    def __init__(self, kind: str) -> None:
        self._signals = [] if kind == "raise" else [signal.Signals[name] for name in kind.split()]
        self.fired_at: float | None = None

    def set(self, longest: float) -> None:
        """It may come before this has returned."""
        signal.signal(signal.SIGALRM, self._fire)
        signal.setitimer(signal.ITIMER_REAL, random.uniform(20e-6, longest))

    def _fire(self, number: int, frame: FrameType | None) -> None:
        self.fired_at = self.fired_at or time.monotonic()
        if not self._signals:
            raise KeyboardInterrupt
        name = self._signals.pop(0)
        if self._signals:
            signal.setitimer(signal.ITIMER_REAL, random.choice((1e-4, 3e-3, 3e-2)))
        os.kill(os.getpid(), name)


def one_round(alarm: Alarm, is_early: bool) -> dict[str, Any]:
    """Be in the run until the interrupt."""
    state, applied, begun = fresh(), 0, 0
    config = AutoDiscoveryConfig(interfaces=["127.0.0.1"])
    run, ended_by = None, ""
    try:
        if is_early:
            alarm.set(LONGEST_START)
        with ringfort.elastic(state, nodes="2:4", name="cases", patience=20, config=config) as run:
            for step in run.steps(
                10**6, samples=DATA.samples, batch=DATA.batch, microbatch=DATA.microbatch, seed=DATA.seed
            ):
                if not begun and not is_early:
                    alarm.set(LONGEST_STEP)
                begun = begun or step.number
                for part in step:
                    time.sleep(0.001)
                    step.add(gradient(part))
                update(state, step.mean())
                applied = step.number
        ended_by = "nothing"
    except (KeyboardInterrupt, SystemExit) as exc:
        ended_by = type(exc).__name__
    signal.setitimer(signal.ITIMER_REAL, 0)
    return {
        "ended_by": ended_by, "fired_at": alarm.fired_at, "begun": begun, "applied": applied,
        "is_whole": run is not None and applied == run.step > 0, "w": state["w"].tolist(),
    }  # fmt: skip


def left_behind() -> list[str]:
    """Return what is left of a run that was closed."""
    gc.collect()
    deadline = time.monotonic() + 10.0
    while True:
        left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        left += [f"process {child.pid}" for child in psutil.Process().children()]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)


def main(rounds: int, seed: int = 0, kinds: tuple[str, ...] = KINDS) -> None:
    random.seed(seed)
    for number in range(rounds):
        faulthandler.dump_traceback_later(STUCK, exit=True)
        kind = kinds[number % len(kinds)]
        said: dict[str, Any] = {}
        try:
            said = one_round(Alarm(kind), is_early=number // len(kinds) % 2 == 0)
        except (KeyboardInterrupt, SystemExit):  # the second signal came when the first had ended the round
            signal.setitimer(signal.ITIMER_REAL, 0)
        over_at = time.monotonic()
        said["closing"] = over_at - (said.get("fired_at") or over_at)
        print(json.dumps({"round": number, "kind": kind, **said, "left_behind": left_behind()}), flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
