"""The job that all systems train: a small transformer over bytes, on the CPU, with one thread per member.

The model has one more parameter, `marks`, with one element per sample and the learning rate 0. The gradient of a mean
over samples is the same for each of them there, and zero for all others. So the gradient that a system has reduced says
which samples are in the update that it applies, and how often: nobody has to be believed.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from typing import Any

import torch
from torch import nn

from benchmarks.compared.model_options import LAYERS, WIDTH

SAMPLES = 16384
"""Sequences in the data set."""
LENGTH = 64
"""Bytes that the model sees."""
VOCABULARY = 256
HEADS = 4
RATE = 1e-3
SEED = 3
NOISE = 0.1
"""Share of the bytes that cannot be known."""

_printing = threading.Lock()


def say(**what: Any) -> None:
    """Print a line of JSON with the time on the clock that all processes of a machine share; any thread may."""
    with _printing:
        print(json.dumps({"at": time.monotonic(), **what}), flush=True)


class Sequences(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """Bytes that rise by a fixed number from place to place, some of them replaced by noise; the same everywhere."""

    def __init__(self) -> None:
        chance = torch.Generator().manual_seed(SEED)
        first = torch.randint(VOCABULARY, (SAMPLES, 1), generator=chance)
        rise = torch.randint(1, 9, (SAMPLES, 1), generator=chance)
        clean = (first + rise * torch.arange(LENGTH + 1)) % VOCABULARY
        noise = torch.randint(VOCABULARY, clean.shape, generator=chance)
        noisy = torch.rand(clean.shape, generator=chance) < NOISE
        self.codes = torch.where(noisy, noise, clean)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return int(index), self.codes[index]


class Model(nn.Module):
    """A decoder-only transformer; its result is the loss."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS, pause: float = 0.0) -> None:
        """`pause` is in seconds per sample."""
        super().__init__()
        self._pause = pause
        self.marks = nn.Parameter(torch.zeros(SAMPLES))
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(torch.zeros(LENGTH, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, HEADS, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, VOCABULARY)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, indices: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        if self._pause:
            time.sleep(self._pause * len(indices))
        hidden = self.embedding(codes[:, :-1]) + self.places
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        logits = self.output(self.norm(hidden))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), codes[:, 1:].flatten())
        marks = self.marks[indices]
        return loss + (marks - marks.detach()).mean()  # adds nothing to the loss


def make(given: argparse.Namespace | None = None) -> tuple[Model, torch.optim.Optimizer]:
    """Return the model and its optimizer, the same on every member. `given` has the options of `add_options`."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = Model() if given is None else Model(given.width, given.layers, given.pause / 1e3)
    rest = [parameter for name, parameter in model.named_parameters() if name != "marks"]
    groups = [{"params": rest}, {"params": [model.marks], "lr": 0.0}]
    return model, torch.optim.AdamW(groups, lr=RATE, weight_decay=0.0)


def digest(model: nn.Module) -> int:
    """Return a number that differs if any bit of the weights does, up to chance."""
    with torch.no_grad():
        parts = [parameter.view(torch.int32).sum(dtype=torch.int64) for parameter in model.parameters()]
    # Their order must matter: `marks` stays zero, the others are of different sizes.
    return hash(tuple(int(part) for part in parts)) & 0xFFFFFFFFFFFF


def samples_in(gradient: torch.Tensor, samples: int) -> list[int]:
    """Return the samples whose mean has this gradient of `marks`, one that is in it twice twice.

    Args:
        gradient: the gradient of `marks` after the reduction.
        samples: how many samples the mean is over.
    """
    found = gradient.nonzero().flatten()
    often = (gradient[found] * samples).round().to(torch.int64).clamp(min=1)
    return found.repeat_interleave(often).tolist()
