"""The demo with torch: a transformer under DistributedDataParallel. Only the word "ringfort" is not torch's own."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

from ringfort.context import DistributedContext
from ringfort.demo import transformer
from ringfort.demo.learner import PROMPT, Learner
from ringfort.demo.model import digest
from ringfort.demo.settings import Settings
from ringfort.demo.text import Codes, Corpus
from ringfort.torch.names import dist, torch

RATE = 4e-3
WARM_UP = 0.1
"""The share of the steps in which the learning rate rises from zero; then it falls linearly to a tenth."""


@contextmanager
def meet(peers: int) -> Generator[DistributedContext]:
    """The group of `peers` processes that find each other."""
    # Torch loads a part of itself, for a second or more, with the first optimizer. Do that before the others expect
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


class TorchLearner(Learner):
    """See `Learner`."""

    context: ClassVar[int] = transformer.CONTEXT
    validation_samples: ClassVar[int] = 512

    def __init__(self, ctx: DistributedContext, corpus: Corpus, settings: Settings) -> None:
        super().__init__(ctx, corpus, settings)
        torch.manual_seed(settings.seed)
        parallel: Any = import_module("torch.nn.parallel")
        self._model: Any = transformer.Transformer(len(corpus.vocabulary))
        self._ddp: Any = parallel.DistributedDataParallel(self._model)
        self._optimizer: Any = torch.optim.AdamW(self._ddp.parameters(), lr=RATE)
        self._rate: Any = torch.optim.lr_scheduler.LambdaLR(self._optimizer, self._rate_at)

    def _rate_at(self, step: int) -> float:
        done = step / self.settings.steps
        return min((step + 1) / (WARM_UP * self.settings.steps), 1 - 0.9 * done)

    def step(self, step: int) -> float:
        self._optimizer.zero_grad()
        # DDP averages over the ranks as if their shares were equal, so each rank's part is scaled by its size.
        loss = self._loss(self._ddp, self.batch(step), self.settings.batch) * self.ctx.world_size
        try:
            loss.backward()
        except RuntimeError:
            self.ctx.barrier()  # DDP's C++ hides our error; the group raises it again
            raise
        self._optimizer.step()
        self._rate.step()
        return self._total(loss.detach()) / self.ctx.world_size

    def validate(self) -> float:
        with torch.no_grad():
            return self._total(self._loss(self._model, self.validation_batch(), self.validation_samples))

    def _loss(self, model: Any, batch: tuple[Codes, Codes], samples: int) -> Any:
        """This rank's part of the mean loss over all `samples`: the parts of all ranks add up to it."""
        context, last = batch
        targets = torch.from_numpy(np.hstack([context[:, 1:], last[:, None]]))
        logits = model(torch.from_numpy(context))
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return total / (samples * self.context)

    def _total(self, part: Any) -> float:
        dist.all_reduce(part)
        return float(part)

    def digest(self) -> str:
        return digest({name: weight.numpy() for name, weight in self._model.state_dict().items()})

    def write(self, length: int) -> str:
        codes = transformer.generate(self._model, self.corpus.encode(PROMPT), length, seed=self.settings.seed)
        return self.corpus.decode(np.array(codes))


learner = TorchLearner
