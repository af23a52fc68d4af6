"""The latest results of a run: what follows a mark, and what is dropped."""

from __future__ import annotations

import numpy as np

from ringfort.training.elastic.protocol import Mark, Result
from ringfort.training.elastic.result_history import Kept, ResultHistory

MARK = Mark("a#1@3", 7, b"chain", 700)


def results(count: int, mark: Mark = MARK, size: int = 10) -> list[Kept]:
    found = list[Kept]()
    for _ in range(count):
        payload = {"float32": np.full(size, mark.step, np.float32)}
        result = Result(mark.branch, mark.step + 1, mark.cursor + 1, payload)
        found.append(Kept(mark, result, mark.step, mark.after(result, mark.step)))
        mark = found[-1].after
    return found


def history(kept: list[Kept]) -> ResultHistory:
    found = ResultHistory()
    for one in kept:
        found.add(one)
    return found


def test_what_follows_a_mark_and_how_many_there_are_beyond_it() -> None:
    kept = results(4)
    found = history(kept)
    for place, one in enumerate(kept):
        following = found.following(one.before)
        assert following is not None
        assert (following[0].after, following[1]) == (one.after, 3 - place)
        assert found.nbytes_after(one.before) == (4 - place) * 40
    assert found.following(kept[-1].after) is None
    assert found.following(Mark(MARK.branch, 6)) is None
    assert found.nbytes_after(kept[-1].after) == 0


def test_a_mark_of_the_same_step_and_another_chain_is_followed_by_nothing() -> None:
    assert history(results(3)).following(Mark(MARK.branch, 8, b"another")) is None


def test_the_oldest_are_dropped_to_stay_within_bytes_and_number() -> None:
    kept = results(10)
    found = history(kept)
    found.trim(5 * 40 + 39, 100)
    assert (len(found), found.nbytes) == (5, 200)
    found.trim(1000, 2)
    assert (len(found), found.nbytes) == (2, 80)
    assert found.following(kept[8].before) is not None
    assert found.following(kept[7].before) is None


def test_a_result_that_does_not_follow_the_last_begins_anew() -> None:
    kept = results(5)
    found = history([*kept[:2], kept[3], kept[4]])
    assert len(found) == 2
    assert found.following(kept[0].before) is None
    assert found.following(kept[3].before) is not None
