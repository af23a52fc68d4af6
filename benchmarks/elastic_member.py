"""What each member of `python -m benchmarks.elastic` runs: a loop whose computing is a sleep and whose state is known.

The gradient of a sample is its number modulo 2, in every element. So each weight is the number of odd samples so far:
whole numbers, in which every order of adding gives the same bits, and which `known_weight` computes without a run.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import threading
import time
from functools import cache
from typing import Any

import numpy as np

from ringfort import elastic
from ringfort.config import AutoDiscoveryConfig
from ringfort.training.elastic import timeline
from ringfort.training.elastic.sample_order import sample_order

MIB = 1 << 20
MICROBATCH = 4
COMPUTE = 0.020
"""Seconds per micro-batch."""
RATE = MICROBATCH / COMPUTE
"""Samples per second of a member that only computes."""
STEPS_PER_PASS = 128
SEED = 3
FOREVER = 1_000_000
"""Steps."""
EVERY = 20
"""Steps between two checkpoints."""
EXACT = 1 << 24
"""float32 has every whole number up to here."""


@cache
def _odd_samples(batch: int, number: int) -> list[int]:
    """Return the number of odd samples in each step of a pass."""
    samples = batch * STEPS_PER_PASS
    odd = sample_order(SEED, number, samples, 0, samples) % 2
    return [int(count) for count in odd.reshape(STEPS_PER_PASS, batch).sum(axis=1)]


def known_weight(step: int, batch: int) -> int:
    """Return what every weight is after a step, in whichever order members have come and gone."""
    passes, more = divmod(step, STEPS_PER_PASS)
    weight = passes * (batch * STEPS_PER_PASS // 2) + sum(_odd_samples(batch, passes)[:more])
    if weight > EXACT:
        raise OverflowError(f"the weight after step {step} is not exact in float32; take a smaller batch")
    return weight


_printing = threading.Lock()


def say(**what: Any) -> None:
    """Print a line of JSON; any thread may."""
    with _printing:
        print(json.dumps(what), flush=True)


class _Printer(logging.Handler):
    """Prints the time line as JSON, for the other end to show."""

    def emit(self, record: logging.LogRecord) -> None:
        say(note=record.getMessage(), at=time.monotonic())


class _Clock(logging.Formatter):
    """Begins lines with the clock that all members of one machine share."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{time.monotonic():.3f} {record.name}: {super().format(record)}"


def _log_to_stderr() -> None:
    """So that somebody can say later what a member was doing in a gap."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Clock())
    handler.addFilter(lambda record: record.getMessage() != "Compute")  # once per micro-batch
    for name, level in (("ringfort", logging.INFO), (timeline.LOGGER, logging.DEBUG)):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.propagate = False
        logger.addHandler(handler)


def main() -> None:
    """Train, and print a line of JSON for each step."""
    say(ready=time.monotonic())
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", type=int)
    parser.add_argument("--folder")
    parser.add_argument("--mib", type=float)
    parser.add_argument("--state-mb", type=float)
    parser.add_argument("--patience", type=float)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--timeline", action="store_true")
    given = parser.parse_args()
    _log_to_stderr()
    if given.timeline:
        logging.getLogger(timeline.LOGGER).addHandler(_Printer())
    batch = given.batch
    size = int(given.mib * MIB) // 4
    state = {"w": np.zeros(size, np.float32), "more": np.zeros(int(given.state_mb * 1e6), np.uint8)}
    with elastic(
        state,
        nodes="1:8",
        name="benchmark",
        patience=given.patience,
        checkpoint=given.folder,
        checkpoint_every=EVERY,
        config=AutoDiscoveryConfig(interfaces=["127.0.0.1"] if given.loopback else None),
    ) as run:
        gradient, peer = np.empty(size, np.float32), ""
        samples = batch * STEPS_PER_PASS
        for step in run.steps(FOREVER, samples=samples, batch=batch, microbatch=MICROBATCH, seed=SEED):
            for part in step:
                end = time.monotonic() + COMPUTE
                gradient.fill((part % 2).sum() / len(part))  # filling is a part of the computing, not beside it
                time.sleep(max(0.0, end - time.monotonic()))
                step.add({"w": gradient})
            w = state["w"]
            w += step.mean()["w"] * batch
            members = run._participant.members
            if members.node.peer_id != peer:  # the logs of the others name it so
                peer = members.node.peer_id
                logging.getLogger("ringfort.benchmark").info("Member of host %d is peer %s", given.host, peer)
            epoch = members.epoch
            say(
                step=step.number,
                at=time.monotonic(),
                members=len(run.members),
                epoch=0 if epoch is None else epoch.number,
                leads=epoch is not None and epoch.leader == members.node.peer_id,
                branch=run._participant.replica.mark.branch,
                w=float(w[0]),
                same=bool((w == w[0]).all()),
            )


if __name__ == "__main__":
    sys.exit(main())
