"""A small character-level transformer in torch, decoder-only like GPT, and text that it generates."""

from __future__ import annotations

from typing import Any

from ringfort.torch.names import torch

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


def generate(model: Any, prompt: Any, length: int, *, seed: int, temperature: float = 0.6) -> list[int]:
    """Sample `length` characters that follow `prompt`."""
    random = torch.Generator().manual_seed(seed)
    codes: list[int] = [int(code) for code in prompt]
    with torch.no_grad():
        for _ in range(length):
            logits = model(torch.tensor([codes[-CONTEXT:]]))[0, -1]
            odds = torch.softmax(logits / temperature, dim=0)
            codes.append(int(torch.multinomial(odds, 1, generator=random)))
    return codes[len(prompt) :]
