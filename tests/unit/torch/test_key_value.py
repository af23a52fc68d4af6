"""The contents of the store: given these requests, expect these answers."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, strategies as st

pytest.importorskip("torch", reason="the package that has the store imports torch: pip install torch")

from ringfort.torch.key_value import Answer, KeyValueStore, Request

VERBS = ["set", "get", "add", "delete", "wait", "check", "count", "swap"]


def test_what_was_set_can_be_got() -> None:
    store = KeyValueStore()
    assert store.handle("a", Request(1, "set", ("key",), b"value")) == [("a", Answer(1))]
    assert store.handle("b", Request(1, "get", ("key",))) == [("b", Answer(1, b"value"))]


def test_who_asks_for_a_key_that_is_not_there_is_answered_when_it_comes() -> None:
    store = KeyValueStore()
    assert store.handle("a", Request(1, "get", ("key",))) == []
    assert store.handle("b", Request(7, "wait", ("key", "other"))) == []
    assert store.handle("c", Request(1, "set", ("key",), b"x")) == [("c", Answer(1)), ("a", Answer(1, b"x"))]
    assert store.handle("c", Request(2, "add", ("other",), amount=3)) == [("c", Answer(2, amount=3)), ("b", Answer(7))]


def test_who_gives_up_or_has_gone_is_not_answered() -> None:
    store = KeyValueStore()
    for who in ("a", "b"):
        assert store.handle(who, Request(1, "get", ("key",))) == []
    assert store.handle("a", Request(0, "forget", amount=1)) == []
    store.drop_peer("b")
    assert store.handle("c", Request(1, "set", ("key",))) == [("c", Answer(1))]


def test_numbers_are_added_and_kept_as_text() -> None:
    store = KeyValueStore()
    assert store.handle("a", Request(1, "add", ("n",), amount=5)) == [("a", Answer(1, amount=5))]
    assert store.handle("a", Request(2, "add", ("n",), amount=-7)) == [("a", Answer(2, amount=-2))]
    assert store.handle("a", Request(3, "get", ("n",))) == [("a", Answer(3, b"-2"))]


def test_adding_to_what_is_no_number_is_refused_in_words_and_changes_nothing() -> None:
    store = KeyValueStore()
    store.handle("a", Request(1, "set", ("n",), b"seven"))
    assert store.handle("a", Request(2, "add", ("n",), amount=1)) == [
        ("a", Answer(2, refusal="there is no number to add to"))
    ]
    assert store.handle("a", Request(3, "get", ("n",))) == [("a", Answer(3, b"seven"))]


def test_a_swap_happens_only_where_the_expected_value_is() -> None:
    store = KeyValueStore()
    assert store.handle("a", Request(1, "swap", ("k",), b"old", b"new")) == [("a", Answer(1, b"old"))]  # there is none
    assert store.handle("a", Request(2, "swap", ("k",), b"", b"first")) == [("a", Answer(2, b"first"))]
    assert store.handle("a", Request(3, "swap", ("k",), b"wrong", b"x")) == [("a", Answer(3, b"first"))]
    assert store.handle("a", Request(4, "swap", ("k",), b"first", b"x")) == [("a", Answer(4, b"x"))]


def test_keys_are_looked_for_counted_and_deleted() -> None:
    store = KeyValueStore()
    store.handle("a", Request(1, "set", ("k",)))
    assert store.handle("a", Request(2, "check", ("k",))) == [("a", Answer(2, amount=1))]
    assert store.handle("a", Request(3, "check", ("k", "l"))) == [("a", Answer(3, amount=0))]
    assert store.handle("a", Request(4, "count")) == [("a", Answer(4, amount=1))]
    assert store.handle("a", Request(5, "delete", ("k",))) == [("a", Answer(5, amount=1))]
    assert store.handle("a", Request(6, "delete", ("k",))) == [("a", Answer(6, amount=0))]


@given(st.lists(st.tuples(st.sampled_from(VERBS), st.sampled_from("abc")), max_size=30))
def test_every_request_is_answered_once_at_most_and_those_for_a_key_that_is_there_at_once(
    requests: list[tuple[str, str]],
) -> None:
    store, answered, there = KeyValueStore(), set[int](), set[str]()
    for number, (verb, key) in enumerate(requests, start=1):
        value = b"1" if verb == "set" else b""
        for _, answer in store.handle("x", Request(number, verb, (key,), value, b"1", amount=1)):  # pyright: ignore[reportArgumentType]
            assert answer.number not in answered
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=Answer) == answer  # no bool for a number
            answered.add(answer.number)
        there = there | {key} if verb in ("set", "add", "swap") else there - {key} if verb == "delete" else there
        assert (number in answered) == (verb not in ("get", "wait") or key in there)


def test_a_request_that_is_repeated_is_answered_again_and_carried_out_once() -> None:
    store = KeyValueStore()
    for _ in range(2):
        assert store.handle("a", Request(1, "add", ("n",), amount=5)) == [("a", Answer(1, amount=5))]
        assert store.handle("b", Request(1, "get", ("late",))) == []
    assert store.handle("a", Request(2, "set", ("late",), b"x")) == [("a", Answer(2)), ("b", Answer(1, b"x"))]
    assert store.handle("b", Request(1, "get", ("late",))) == [("b", Answer(1, b"x"))]


def test_requests_survive_the_wire() -> None:
    request = Request(3, "swap", ("a", "b"), b"\0\xff", b"x", -5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request) == request
