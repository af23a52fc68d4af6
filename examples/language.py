"""The model of the examples: a small transformer that learns to spell from the text of Python's help topics.

Nothing here is distributed, and nothing knows of Ringfort.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

CONTEXT = 32
"""Characters that the model sees at once."""
WIDTH = 64
HEADS = 4
LAYERS = 2


class Text(Dataset[tuple[Tensor, Tensor]]):
    """All pieces of `CONTEXT` characters, each with the piece that starts one character later."""

    def __init__(self) -> None:
        text = "\n\n".join(topics[name] for name in sorted(topics))
        self.characters = sorted(set(text))
        codes = {character: code for code, character in enumerate(self.characters)}
        self.codes = torch.tensor([codes[character] for character in text])

    def __len__(self) -> int:
        return len(self.codes) - CONTEXT

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        piece = self.codes[start : start + CONTEXT + 1]
        return piece[:-1], piece[1:]


class Embedding(nn.Embedding):
    """A vector per character plus a vector per position."""

    def __init__(self, characters: int) -> None:
        super().__init__(characters, WIDTH)
        self.places = nn.Parameter(torch.zeros(CONTEXT, WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + self.places


class Transformer(nn.Module):
    """Decoder-only, like GPT."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = Embedding(characters)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.output = nn.Sequential(nn.Flatten(0, 1), nn.Linear(WIDTH, characters))

    def forward(self, inputs: Tensor) -> Tensor:
        """The logits of the character that follows each of `inputs`, as rows."""
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=inputs.device)
        hidden = self.embedding(inputs)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.output(hidden)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy per character, in nats. A blind guess costs about 4.6."""
    return functional.cross_entropy(logits, targets.flatten())
