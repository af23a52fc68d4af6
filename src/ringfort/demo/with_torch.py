"""The demo's model with torch: a small transformer, decoder-only like GPT.

Torch computes the gradients. The state of the run is NumPy arrays over the memory of its parameters.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ringfort.demo.learner import Learner, Weights
from ringfort.demo.settings import Settings
from ringfort.demo.text import Codes, Corpus
from ringfort.torch.names import torch

RATE = 3e-3
"""With more, or with a shorter warm-up, a difference in the last bit grows to 1e-4 of the loss in 240 steps."""
WARM_UP = 0.2
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


class TorchLearner(Learner):
    """See `Learner`."""

    context: ClassVar[int] = CONTEXT
    validation_samples: ClassVar[int] = 512

    def __init__(self, corpus: Corpus, settings: Settings) -> None:
        super().__init__(corpus, settings)
        torch.manual_seed(settings.seed)
        self._model: Any = Transformer(len(corpus.vocabulary))
        self._parameters: dict[str, Any] = dict(self._model.named_parameters())

    def weights(self) -> Weights:
        # NumPy arrays over the memory of the parameters: what is written into them is in the model.
        return {name: parameter.detach().numpy() for name, parameter in self._parameters.items()}

    def gradients(self, context: Codes, target: Codes) -> tuple[float, Weights]:
        self._model.zero_grad()
        loss = self._loss(context, target)
        loss.backward()
        return loss.item(), {name: parameter.grad.numpy() for name, parameter in self._parameters.items()}

    def loss(self, context: Codes, target: Codes) -> float:
        with torch.no_grad():
            return self._loss(context, target).item()

    def _loss(self, context: Codes, target: Codes) -> Any:
        targets = torch.from_numpy(np.hstack([context[:, 1:], target[:, None]]))
        logits = self._model(torch.from_numpy(context))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def rate(self, step: int) -> float:
        done = (step - 1) / self.settings.steps
        return RATE * min(step / (WARM_UP * self.settings.steps), 1 - 0.9 * done)

    def probabilities(self, codes: Codes) -> NDArray[Any]:
        with torch.no_grad():
            return torch.softmax(self._model(torch.from_numpy(codes[None]))[0, -1], dim=0).numpy()


learner = TorchLearner
