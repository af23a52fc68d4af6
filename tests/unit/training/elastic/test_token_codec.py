"""Tokens as arrays of one size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from ringfort.errors import ProtocolError
from ringfort.training.elastic.protocol import Token
from ringfort.training.elastic.token_codec import TokenCodec

ABOUT = ("a.b#1@1", 3, 7, 640, b"chain")


@given(
    st.integers(1, 4096).flatmap(lambda n: st.tuples(st.just(n), st.frozensets(st.integers(0, n - 1)))),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**62),
    st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
)
def test_everything_but_the_subject_survives(
    covered: tuple[int, frozenset[int]], digest: int, speed: int, flags: tuple[bool, bool, bool, bool]
) -> None:
    codec = TokenCodec(covered[0])
    token = Token(ABOUT, digest, covered[1], speed, *flags[:3], overhead=speed // 3, period=2 * speed, copy=digest ^ 1)
    token = replace(token, is_preparing=flags[3])
    packed = codec.pack(token)
    assert packed.dtype == np.uint8
    assert packed.size == codec.nbytes
    found = codec.unpack(packed)
    assert (found.digest, found.covered, found.speed, found.copy) == (digest, covered[1], speed, digest ^ 1)
    assert (found.overhead, found.period) == (speed // 3, min(2 * speed, 2**62))
    assert (found.wants_pause, found.wants_image, found.is_finite, found.is_preparing) == flags


def test_subjects_are_equal_only_if_they_were_equal() -> None:
    codec = TokenCodec(8)
    again, *others = [
        codec.unpack(codec.pack(Token(about))).about
        for about in (ABOUT, ABOUT[:-1], (*ABOUT[:4], b"other"), ("x", *ABOUT[1:]), (*ABOUT[:2], 8, *ABOUT[3:]))
    ]
    assert again == codec.unpack(codec.pack(Token(ABOUT))).about
    assert len({again, *others}) == 5


def test_a_token_that_was_damaged_on_its_way_is_not_read() -> None:
    codec = TokenCodec(8)
    for place in range(codec.nbytes):
        packed = codec.pack(Token(ABOUT, 5, frozenset({1}), 9)).copy()
        packed[place] ^= 1
        with pytest.raises(ProtocolError, match="damaged"):
            codec.unpack(packed)


def test_the_size_depends_on_the_number_of_micro_batches_alone() -> None:
    codec = TokenCodec(65)
    assert codec.pack(Token(ABOUT)).size == codec.pack(Token(ABOUT, 5, frozenset(range(65)), 9)).size
