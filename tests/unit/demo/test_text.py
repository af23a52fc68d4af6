"""The demo's corpus and how it is shared out."""

from __future__ import annotations

import numpy as np
import pytest

from ringfort.demo.learner import PROMPT
from ringfort.demo.text import global_batch, load_corpus, share, windows


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


def test_no_window_reaches_beyond_the_text() -> None:
    codes = np.arange(30)
    starts = np.concatenate([global_batch(codes, 24, 64, seed=0, step=step) for step in range(20)])
    _, target = windows(codes, 24, starts)
    assert target.max() == 29


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    codes = np.arange(10_000)
    first = global_batch(codes, 24, 64, seed=1, step=7).tolist()
    assert first == global_batch(codes, 24, 64, seed=1, step=7).tolist()
    assert first != global_batch(codes, 24, 64, seed=1, step=8).tolist()
    assert first != global_batch(codes, 24, 64, seed=2, step=7).tolist()


@pytest.mark.parametrize(("items", "ranks"), [(256, 3), (256, 1), (7, 4), (256, 256)])
def test_shares_make_up_the_whole_and_differ_by_at_most_one(items: int, ranks: int) -> None:
    whole = np.arange(items)
    shares = [share(whole, rank, ranks) for rank in range(ranks)]
    assert np.concatenate(shares).tolist() == whole.tolist()
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
