"""The demo's corpus: the text of Python's own help topics, which every installation has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

VALIDATION_SHARE = 0.1
"""The last tenth of the text is never trained on."""

Codes = NDArray[np.int64]


@dataclass(frozen=True)
class Corpus:
    """A text as numbers, and the character of each number."""

    vocabulary: str
    train: Codes
    validation: Codes

    def encode(self, text: str) -> Codes:
        """The numbers of `text`, whose characters must all be in the vocabulary."""
        return np.array([self.vocabulary.index(character) for character in text], dtype=np.int64)

    def decode(self, codes: Codes) -> str:
        """The text of `codes`."""
        return "".join(self.vocabulary[code] for code in codes)


def load_corpus() -> Corpus:
    """The help topics in order of their names: the same text on every rank that runs the same Python."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    characters, codes = np.unique(np.frombuffer(text.encode("utf-32-le"), dtype="<u4"), return_inverse=True)
    split = int(len(codes) * (1 - VALIDATION_SHARE))
    return Corpus("".join(map(chr, characters)), codes[:split], codes[split:])


def windows(codes: Codes, context: int, starts: Codes) -> tuple[Codes, Codes]:
    """Per start: `context` characters, and the one that follows them."""
    return codes[starts[:, None] + np.arange(context)], codes[starts + context]
