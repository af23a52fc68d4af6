"""The models of `python -m benchmarks.elastic_training`, with data that can be learned and needs no files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import nn
from torch.nn import functional

STEPS_PER_PASS: Final = 20


class Task(torch.utils.data.Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """A data set whose samples are (index, input, target), and the model that is trained on it."""

    batch = 32
    microbatch = 4

    def __len__(self) -> int:
        return self.batch * STEPS_PER_PASS

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return (index, *self.sample(index, torch.Generator().manual_seed(index)))

    def sample(self, index: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return input and target."""
        raise NotImplementedError

    def model(self) -> nn.Module:
        """Return a new model."""
        raise NotImplementedError

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return its optimizer."""
        raise NotImplementedError

    def loss(self, found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Return the mean loss."""
        return functional.cross_entropy(found.reshape(-1, found.shape[-1]), wanted.reshape(-1))


class Transformer(nn.Module):
    """A causal language model with tied embeddings and dropout."""

    def __init__(self, words: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        block = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, words, bias=False)
        self.output.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.02)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.blocks(self.words(x) + self.places, mask=self.mask, is_causal=True)
        return self.output(self.norm(found))


class Language(Task):
    """Sequences that follow one of a few rules, with AdamW and weight decay for matrices alone."""

    words, length, width, layers = 256, 16, 320, 8

    def sample(self, index: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        factor, word = 3 + 2 * (index % 4), int(torch.randint(self.words, (1,), generator=random))
        text = [word]
        for _ in range(self.length):
            text.append((text[-1] * factor + 7) % self.words)
        return torch.tensor(text[:-1]), torch.tensor(text[1:])

    def model(self) -> nn.Module:
        return Transformer(self.words, self.length, self.width, self.layers)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        matrices = [one for one in model.parameters() if one.dim() > 1]
        others = [one for one in model.parameters() if one.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=3e-4)


class SmallLanguage(Language):
    """The same, for tests."""

    words, length, width, layers = 32, 8, 32, 1


class Block(nn.Module):
    """Two convolutions and a way past them. Not with ReLU: at its kink rounding decides, and grows. The losses of two
    plain loops that add up the same micro-batches in another order differed by 1% after 50 steps."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outer)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outer)
        self.past = nn.Identity() if inner == outer else nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = functional.gelu(self.first_norm(self.first(x)))
        return functional.gelu(self.second_norm(self.second(found)) + self.past(x))


class Images(Task):
    """Noisy pictures of ten kinds, of which some are told wrong, with SGD and momentum."""

    microbatch = 8
    widths, side = (32, 64, 128), 16

    def sample(self, index: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        kind = index % 10
        pattern = torch.randn(3, self.side, self.side, generator=torch.Generator().manual_seed(10_000 + kind))
        told = (kind + index // 10) % 10 if index % 3 == 0 else kind
        return pattern * 0.5 + torch.randn(3, self.side, self.side, generator=random), torch.tensor(told)

    def model(self) -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(3, self.widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(self.widths[0])]
        before = self.widths[0]
        for width in self.widths:
            layers += [Block(before, width, 1 if width == before else 2), Block(width, width, 1)]
            before = width
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(before, 10)]
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=5e-4)


class SmallImages(Images):
    """The same, for tests."""

    widths, side = (4, 8), 8


MODELS: Final[dict[str, Callable[[], Task]]] = {
    "transformer": Language, "resnet": Images, "small-transformer": SmallLanguage, "small-resnet": SmallImages,
}  # fmt: skip
