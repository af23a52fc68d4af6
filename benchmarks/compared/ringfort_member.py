"""A member of `ringfort.torch.elastic`, encrypted, on loopback."""

from __future__ import annotations

import argparse
import logging
from typing import Any

import torch

from benchmarks.compared.job import SEED, Sequences, digest, make, samples_in, say
from benchmarks.compared.model_options import add_options
from ringfort.config import AutoDiscoveryConfig
from ringfort.torch import elastic

PASSES = 1_000_000
"""More than anybody waits for."""


class Log:
    """Prints a line for each step that is applied here."""

    def __init__(self, model: torch.nn.Module, batch: int) -> None:
        self._model, self._batch = model, batch
        self._step, self._weights = 0, digest(model)
        self.run: Any = None

    def on_step(self, gradients: dict[str, torch.Tensor], step: int) -> None:
        """Called after the optimizer, for replayed steps too."""
        before = self._weights if step == self._step + 1 else None  # a copy of the state came in between
        self._step, self._weights = step, digest(self._model)
        members = self.run._participant.members
        epoch = members.epoch
        say(
            step=step,
            applied=samples_in(gradients["marks"], self._batch),
            members=len(self.run.members),
            group=0 if epoch is None else epoch.number,
            loss=None if self.run.loss is None else float(self.run.loss),
            before=before,
            weights=self._weights,
            leads=epoch is not None and epoch.leader == members.node.peer_id,
        )


def main() -> None:
    """Train for ever, and print a line of JSON for what is drawn and applied."""
    say(ready=True)
    parser = argparse.ArgumentParser()
    parser.add_argument("--number", type=int)
    parser.add_argument("--members", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--microbatch", type=int)
    parser.add_argument("--folder")
    parser.add_argument("--patience", type=float)
    add_options(parser)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    model, optimizer = make(given)
    log = Log(model, given.batch)
    with elastic(
        model,
        optimizer,
        batch=given.batch,
        on_step=log.on_step,
        seed=SEED,
        nodes=f"1:{2 * given.members}",
        name="compared",
        patience=given.patience,
        config=AutoDiscoveryConfig(interfaces=["127.0.0.1"]),
    ) as run:
        log.run = run
        for indices, codes in run.loader(Sequences(), microbatch=given.microbatch, epochs=PASSES):
            say(drew=indices.tolist(), number=run.epoch)
            run.backward(model(indices, codes))
            run.step()


if __name__ == "__main__":
    main()
