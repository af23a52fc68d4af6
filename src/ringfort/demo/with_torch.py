"""The demo with torch: a transformer under DistributedDataParallel. All is torch's own but one word, "ringfort"."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np

from ringfort.context import DistributedContext
from ringfort.demo.learner import PROMPT
from ringfort.demo.model import digest
from ringfort.demo.settings import Settings
from ringfort.demo.text import Codes, Corpus, global_batch, share, windows
from ringfort.demo.transformer import CONTEXT, Transformer, generate
from ringfort.torch.names import dist, torch

VALIDATION_SAMPLES = 512
"""Of `CONTEXT` characters each."""
RATE = 4e-3
WARM_UP = 0.1
"""Share of the steps in which the rate rises from nothing; then it falls linearly to a tenth."""


@contextmanager
def meet(peers: int) -> Generator[DistributedContext]:
    """The group of `peers` processes that find each other; over encrypted connections (the parent says so)."""
    # Torch loads a part of itself, for a second or more, with the first optimizer. Not when the others already count on
    # this process: on a busy machine they would take its silence for a loss.
    torch.optim.AdamW([torch.zeros(1)])
    if peers > 1:
        dist.init_process_group("ringfort", init_method=f"ringfort://?world_size={peers}")
    else:
        dist.init_process_group("ringfort", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD.context
    finally:
        dist.destroy_process_group()


class TorchLearner:
    """See `Learner`."""

    def __init__(self, ctx: DistributedContext, corpus: Corpus, settings: Settings) -> None:
        self._ctx, self._corpus, self._settings = ctx, corpus, settings
        torch.manual_seed(settings.seed)
        parallel: Any = import_module("torch.nn.parallel")
        self._model: Any = Transformer(len(corpus.vocabulary))
        self._ddp: Any = parallel.DistributedDataParallel(self._model)
        self._optimizer: Any = torch.optim.AdamW(self._ddp.parameters(), lr=RATE)
        self._rate: Any = torch.optim.lr_scheduler.LambdaLR(self._optimizer, self._rate_at)

    def _rate_at(self, step: int) -> float:
        done = step / self._settings.steps
        return min((step + 1) / (WARM_UP * self._settings.steps), 1 - 0.9 * done)

    def step(self, step: int) -> float:
        """One step."""
        codes, settings = self._corpus.train, self._settings
        starts = global_batch(codes, CONTEXT, settings.batch, seed=settings.seed, step=step)
        self._optimizer.zero_grad()
        # DDP averages over the ranks as if their shares were even: so each rank's part counts by its size.
        loss = self._loss(self._ddp, codes, starts) * self._ctx.world_size
        try:
            loss.backward()
        except RuntimeError:
            self._ctx.barrier()  # DDP's C++ knows no error of ours; of the group one gets the one that it failed with
            raise
        self._optimizer.step()
        self._rate.step()
        return self._total(loss.detach()) / self._ctx.world_size

    def validate(self) -> float:
        """The loss on text that is never trained on."""
        codes = self._corpus.validation
        starts = np.linspace(0, len(codes) - CONTEXT - 1, VALIDATION_SAMPLES).astype(np.int64)
        with torch.no_grad():
            return self._total(self._loss(self._model, codes, starts))

    def _loss(self, model: Any, codes: Codes, starts: Codes) -> Any:
        """This rank's part of the mean loss over all samples at `starts`: the parts add up to it."""
        mine = share(starts, self._ctx.rank, self._ctx.world_size)
        context, last = windows(codes, CONTEXT, mine)
        targets = torch.from_numpy(np.hstack([context[:, 1:], last[:, None]]))
        logits = model(torch.from_numpy(context))
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return total / (len(starts) * CONTEXT)

    def _total(self, part: Any) -> float:
        dist.all_reduce(part)
        return float(part)

    def digest(self) -> str:
        """Of all weights."""
        return digest({name: weight.numpy() for name, weight in self._model.state_dict().items()})

    def write(self, length: int) -> str:
        """Text."""
        codes = generate(self._model, self._corpus.encode(PROMPT), length, seed=self._settings.seed)
        return self._corpus.decode(np.array(codes))
