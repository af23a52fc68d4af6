"""What different states mean: given these words of the members, expect this verdict."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ringfort.training.elastic.state_check import UNKNOWN, Leaves, Verdict, Word, judge, leaves_of, own_class
from ringfort.training.elastic.state_tree import StateTree

PC, MAC = 1, 2
GOOD, BAD, OTHER = 10, 11, 12


def words(*given: tuple[int, int] | tuple[int, int, int]) -> list[Word]:
    """Words of (class, digest), or (class, digest, origin)."""
    return [Word(one[0], one[2] if len(one) == 3 else 0, one[1]) for one in given]


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        # All have the same state, whatever they are.
        (words((PC, GOOD)), Verdict(0)),
        (words((PC, GOOD), (MAC, GOOD), (PC, GOOD, UNKNOWN)), Verdict(0)),
        # Of one class, the minority is damaged.
        (words((PC, BAD), (PC, GOOD), (PC, GOOD)), Verdict(1, damaged=(0,))),
        (words((PC, GOOD), (PC, BAD), (PC, GOOD), (PC, OTHER), (PC, GOOD)), Verdict(0, damaged=(1, 3))),
        # Without a majority nobody knows who is.
        (words((PC, GOOD), (PC, BAD)), Verdict(0, damaged=(0, 1), has_majority=False)),
        (words((PC, GOOD), (PC, BAD), (MAC, OTHER)), Verdict(0, damaged=(0, 1), has_majority=False)),
        # Another class drifts, which is no damage. The larger class is the first; of two, that of the lower rank.
        (words((PC, GOOD), (MAC, OTHER)), Verdict(0, drifted=(1,))),
        (words((PC, GOOD), (MAC, OTHER), (MAC, OTHER)), Verdict(1, drifted=(0,))),
        (words((PC, GOOD), (PC, GOOD), (PC, BAD), (MAC, OTHER)), Verdict(0, damaged=(2,), drifted=(3,))),
        # Damage in another class is told from its drift, if that class has a majority.
        (
            words((PC, GOOD), (MAC, OTHER), (MAC, BAD), (MAC, OTHER), *[(PC, GOOD)] * 3),
            Verdict(0, damaged=(2,), drifted=(1, 3)),
        ),
        (words((PC, GOOD), (MAC, OTHER), (MAC, BAD), (PC, GOOD)), Verdict(0, drifted=(1, 2))),
        # A copy may come from any class: it decides nothing, unless there is nothing else.
        (words((PC, BAD, UNKNOWN), (PC, GOOD)), Verdict(1, drifted=(0,))),
        (words((PC, OTHER, UNKNOWN), (PC, OTHER, UNKNOWN), (PC, GOOD)), Verdict(2, drifted=(0, 1))),
        (words((PC, GOOD, UNKNOWN), (PC, BAD, UNKNOWN)), Verdict(0, drifted=(1,))),
        # A member that was away when the others took one state has another origin.
        (words((MAC, OTHER, 0), (MAC, GOOD, 100), (PC, GOOD, 100)), Verdict(1, drifted=(0,))),
    ],
)
def test_every_member_finds_the_same_verdict(given: list[Word], verdict: Verdict) -> None:
    assert judge(given) == verdict
    assert judge(given).is_same == (len({word.digest for word in given}) == 1)


def test_a_word_comes_back_from_its_array() -> None:
    for word in (Word(2**64 - 1, UNKNOWN, 7), Word(0, 2**40, 2**64 - 1)):
        assert word.packed().dtype == np.uint64
        assert Word.unpacked(word.packed()) == word


def state() -> dict[str, Any]:
    return {"w": np.arange(6.0).reshape(2, 3), "layers": [np.zeros(3, np.float32), 5], "name": "x", "lr": 0.1}


def leaves(tree: dict[str, Any], kind: str = "pc") -> Leaves:
    return leaves_of(kind, StateTree(tree))


def test_equal_states_have_one_word_whatever_the_order_of_their_keys() -> None:
    assert leaves(state()).word == leaves(dict(reversed(state().items()))).word
    assert leaves(state()).word[0] != leaves(state(), "mac").word[0]
    assert leaves(state()).word[1] == leaves(state(), "mac").word[1]


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda tree: tree["w"].view(np.uint8).__setitem__((1, 3), 1), "state['w']"),
        (lambda tree: tree["layers"][0].__setitem__(2, -0.0), "state['layers'][0]"),
        (lambda tree: tree["layers"].__setitem__(1, 6), "state['layers'][1]"),
        (lambda tree: tree.update(name="y"), "state['name']"),
        (lambda tree: tree.update(lr=np.nextafter(0.1, 1).item()), "state['lr']"),
    ],
)
def test_a_single_bit_changes_the_word_and_the_leaf_is_named(change: Any, path: str) -> None:
    changed = state()
    change(changed)
    assert leaves(changed).word[1] != leaves(state()).word[1]
    assert leaves(state()).differences(leaves(changed)) == path
    assert leaves(state()).differences(leaves(state())) == ""


def test_of_many_leaves_the_first_are_named() -> None:
    one, other = ({str(number): number * factor for number in range(1, 8)} for factor in (1, 2))
    told = leaves(one).differences(leaves(other))
    assert told == "state['1'], state['2'], state['3'] and 4 more"


def test_the_class_of_this_machine_says_processor_and_version() -> None:
    assert f"NumPy {np.__version__}" in own_class()
    assert own_class() == own_class()
