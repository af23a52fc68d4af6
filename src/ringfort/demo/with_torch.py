"""The demo with torch: a small transformer, decoder-only like GPT, under DistributedDataParallel.

Only the word "ringfort" is not torch's own.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ringfort.context import DistributedContext
from ringfort.demo.learner import Learner
from ringfort.demo.settings import Settings
from ringfort.demo.text import Codes, Corpus
from ringfort.torch.names import dist, torch

RATE = 4e-3
WARM_UP = 0.1
"""The share of the steps in which the learning rate rises from zero; then it falls linearly to a tenth."""
CONTEXT = 32
"""Characters that the model sees: five or six words."""
WIDTH = 64
HEADS = 4
LAYERS = 2

nn: Any = torch.nn


class Transformer(nn.Module):
    """Maps characters to the logits of the character that follows each of them."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]  # torch's
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.places = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.layers = nn.ModuleList(
            # GELU: at the edge of ReLU a difference in the last bit grows a thousandfold in a few hundred steps.
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, bias=False
            )
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, vocabulary)
        nn.init.normal_(self.embedding.weight, std=0.02)  # as GPT-2
        # Near zero, so that the first guess is uniform and the first loss is ln(vocabulary).
        nn.init.normal_(self.output.weight, std=0.01)
        nn.init.zeros_(self.output.bias)

    def forward(self, codes: Any) -> Any:
        """Logits of shape (samples, characters, vocabulary)."""
        length = codes.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.embedding(codes) + self.places[:length]
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.output(self.norm(hidden))


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

    context: ClassVar[int] = CONTEXT
    validation_samples: ClassVar[int] = 512

    def __init__(self, ctx: DistributedContext, corpus: Corpus, settings: Settings) -> None:
        super().__init__(ctx, corpus, settings)
        torch.manual_seed(settings.seed)
        self._model: Any = Transformer(len(corpus.vocabulary))
        self._ddp: Any = nn.parallel.DistributedDataParallel(self._model)
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

    def weights(self) -> dict[str, NDArray[Any]]:
        return {name: weight.numpy() for name, weight in self._model.state_dict().items()}

    def probabilities(self, codes: Codes) -> NDArray[Any]:
        with torch.no_grad():
            return torch.softmax(self._model(torch.from_numpy(codes[None]))[0, -1], dim=0).numpy()


learner = TorchLearner
