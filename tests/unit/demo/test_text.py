"""The demo's corpus and its samples."""

from __future__ import annotations

import numpy as np
import pytest

from ringfort.demo.learner import PROMPT, spread
from ringfort.demo.text import load_corpus, windows


def test_the_corpus_is_english_and_decodes_to_what_was_encoded() -> None:
    corpus = load_corpus()
    assert len(corpus.train) > 300_000
    assert " the " in corpus.decode(corpus.train[:5000])
    assert corpus.decode(corpus.encode(PROMPT)) == PROMPT


def test_training_and_validation_are_the_first_nine_tenths_and_the_last() -> None:
    corpus = load_corpus()
    total = len(corpus.train) + len(corpus.validation)
    assert len(corpus.validation) == pytest.approx(total / 10, abs=2)


def test_a_window_is_the_context_and_the_character_after_it() -> None:
    context, target = windows(np.arange(100), 4, np.array([0, 95]))
    assert context.tolist() == [[0, 1, 2, 3], [95, 96, 97, 98]]
    assert target.tolist() == [4, 99]


@pytest.mark.parametrize(("length", "count"), [(30, 7), (7, 30), (5, 5), (1, 1)])
def test_places_are_spread_evenly_and_end_before_the_length(length: int, count: int) -> None:
    places = spread(length, count)
    assert len(places) == count
    assert places[0] == 0
    assert places[-1] == length * (count - 1) // count < length
    assert set(np.diff(places)) <= {length // count, length // count + 1}
