"""Records: they open once, in order, as they were sealed, at the other side, and in no other way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from ringfort.errors import TamperedError
from ringfort.identity.noise import rekey
from ringfort.transport.records import (
    CIPHERS,
    LENGTH,
    MAX_PLAIN,
    MAX_RECORD,
    ROLL_OVER,
    AesGcm,
    Cipher,
    Opener,
    Sealer,
    preferred,
)

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
SEVERAL = [b"first", b"the second", b"", b"the fourth of them", b"fifth"]

bodies = st.lists(st.binary(max_size=200), min_size=1, max_size=12)
roll_overs = st.sampled_from([1, 2, 3, 5, ROLL_OVER])
HERE = [CIPHERS[number] for number in sorted(preferred())]


@pytest.fixture(params=HERE, ids=lambda cipher: cipher.name, scope="module", autouse=True)
def cipher(request: pytest.FixtureRequest) -> Iterator[type[Cipher]]:
    """Every test of this file holds for every cipher that this machine can do."""
    global in_use  # noqa: PLW0603  # hypothesis' tests cannot take it as an argument of each example's helpers
    in_use = request.param
    yield in_use
    in_use = AesGcm


in_use: type[Cipher] = AesGcm


def overhead() -> int:
    return LENGTH.size + in_use.tag_bytes


def seal(sealer: Sealer, data: bytes) -> bytes:
    out = bytearray(b"\xaa" * (len(data) + sealer.overhead + 7))
    end = sealer.seal(data, memoryview(out))
    assert end == len(data) + overhead() == len(data) + sealer.overhead
    assert out[end:] == b"\xaa" * 7, "it wrote beyond its record"
    return bytes(out[:end])


def unseal(opener: Opener, record: bytes) -> bytes:
    length = opener.body_length(record)
    into = bytearray(length - in_use.tag_bytes)
    opener.open(record, memoryview(into))
    return bytes(into)


def sealed_all(plain: list[bytes], key: bytes = KEY, **options: Any) -> list[bytes]:
    sealer = Sealer(key, in_use, **options)
    return [seal(sealer, data) for data in plain]


def read_until_caught(records: list[bytes], key: bytes = KEY, **options: Any) -> list[bytes]:
    """What opens of `records` before one does not; fails if all open."""
    opener, found = Opener(key, in_use, **options), list[bytes]()
    with pytest.raises(TamperedError):
        found.extend(unseal(opener, record) for record in records)
    return found


@given(bodies, roll_overs)
def test_what_was_sealed_opens_in_order_also_across_new_keys(plain: list[bytes], roll_over: int) -> None:
    opener = Opener(KEY, in_use, roll_over=roll_over)
    records = sealed_all(plain, roll_over=roll_over)
    assert [unseal(opener, record) for record in records] == plain
    assert [len(record) for record in records] == [len(data) + overhead() for data in plain]


@pytest.mark.parametrize("size", [0, 1, MAX_PLAIN - 1, MAX_PLAIN])
def test_every_size_up_to_the_limit_has_a_record(size: int) -> None:
    data = os.urandom(size)
    [record] = sealed_all([data])
    assert len(record) <= MAX_RECORD
    assert unseal(Opener(KEY, in_use), record) == data


def test_the_same_data_never_looks_the_same() -> None:
    data = b"the same words again and again, long enough not to meet by chance"
    records = sealed_all([data] * 50, roll_over=7) + sealed_all([data] * 50, OTHER_KEY, roll_over=7)
    bodies_seen = {record[LENGTH.size :][place : place + 8] for record in records for place in range(0, 64, 8)}
    assert len(bodies_seen) == 100 * 8


def test_a_new_key_comes_after_so_many_records_and_is_noises() -> None:
    records = sealed_all([b"same"] * 6, roll_over=2)
    # Two records a key, each key from the one before, each count from 0.
    assert records[2:4] == sealed_all([b"same"] * 2, rekey(KEY))
    assert records[4:] == sealed_all([b"same"] * 2, rekey(rekey(KEY)))


def test_sides_that_roll_over_at_other_times_do_not_understand_each_other() -> None:
    assert read_until_caught(sealed_all(SEVERAL, roll_over=2), roll_over=3) == SEVERAL[:2]


# --- what happens on the way ------------------------------------------------------------------------------------------


def test_any_flipped_bit_of_a_record_is_noticed() -> None:
    [record] = sealed_all([b"forty-two bytes of text, or a few more"])
    for place in range(len(record)):
        for bit in range(8):
            changed = bytearray(record)
            changed[place] ^= 1 << bit
            # The reader takes as many bytes as the length claims; a real one would wait for those of the next record.
            claimed = int.from_bytes(changed[:4], "little")
            padded = bytes(changed) + b"\0" * min(max(0, LENGTH.size + claimed - len(changed)), MAX_RECORD)
            assert read_until_caught([padded[: LENGTH.size + min(claimed, MAX_RECORD)]]) == []


def test_the_length_is_vouched_for_with_what_it_is_the_length_of() -> None:
    (record,) = sealed_all([b"hello"])
    for place in range(LENGTH.size):
        changed = bytearray(record)
        changed[place] ^= 1
        with pytest.raises(TamperedError, match="was changed"):
            Opener(KEY, in_use).open(changed, memoryview(bytearray(5)))


def test_what_does_not_open_leaves_nothing_of_it_behind() -> None:
    [record] = sealed_all([b"words that an attacker may have chosen"])
    into = bytearray(b"\x55" * (len(record) - overhead()))
    with pytest.raises(TamperedError):
        Opener(KEY, in_use).open(record[:-1] + bytes([record[-1] ^ 1]), memoryview(into))
    assert into == bytes(len(into))


@given(bodies, roll_overs, st.data())
def test_a_record_that_was_dropped_is_noticed(plain: list[bytes], roll_over: int, data: st.DataObject) -> None:
    plain.append(b"after")
    place = data.draw(st.integers(0, len(plain) - 2))
    records = sealed_all(plain, roll_over=roll_over)
    del records[place]
    assert read_until_caught(records, roll_over=roll_over) == plain[:place]


@given(bodies, roll_overs, st.data())
def test_a_record_that_comes_again_is_noticed(plain: list[bytes], roll_over: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(plain) - 1))
    again = data.draw(st.integers(first + 1, len(plain)))
    records = sealed_all(plain, roll_over=roll_over)
    records.insert(again, records[first])
    assert read_until_caught(records, roll_over=roll_over) == plain[:again]


@given(bodies, roll_overs, st.data())
def test_records_in_another_order_are_noticed(plain: list[bytes], roll_over: int, data: st.DataObject) -> None:
    plain.append(b"last")
    records = sealed_all(plain, roll_over=roll_over)
    shuffled = data.draw(st.permutations(records))
    if shuffled == records:
        shuffled = [records[1], records[0], *records[2:]]
    same = next(place for place, record in enumerate(records) if shuffled[place] != record)
    assert read_until_caught(shuffled, roll_over=roll_over) == plain[:same]


@given(bodies)
def test_a_record_that_is_sent_back_is_noticed(plain: list[bytes]) -> None:
    """The directions have different keys."""
    assert read_until_caught(sealed_all(plain, KEY), OTHER_KEY) == []


@given(st.binary(min_size=1, max_size=200), st.data())
def test_a_record_that_was_cut_and_mended_is_noticed(plain: bytes, data: st.DataObject) -> None:
    [record] = sealed_all([plain])
    cut = record[LENGTH.size : data.draw(st.integers(LENGTH.size, len(record) - 1))]
    assert read_until_caught([LENGTH.pack(len(cut)) + cut]) == []


@settings(max_examples=300)
@given(st.binary(min_size=40, max_size=300))
def test_random_bytes_are_no_record(noise: bytes) -> None:
    assert read_until_caught([LENGTH.pack(len(noise) - LENGTH.size) + noise[LENGTH.size :]]) == []
    assert read_until_caught([noise[:4] + noise[4:][: int.from_bytes(noise[:4], "little")]]) == []


def test_a_length_that_no_record_has_is_refused_before_anything_is_read() -> None:
    tag = in_use.tag_bytes
    for length in (0, 1, tag - 1, tag + MAX_PLAIN + 1, 1 << 31, 2**32 - 1):
        with pytest.raises(TamperedError, match=str(length)):
            Opener(KEY, in_use).body_length(LENGTH.pack(length))


def test_a_length_that_a_record_may_have_is_told() -> None:
    for length in (in_use.tag_bytes, in_use.tag_bytes + 1, in_use.tag_bytes + MAX_PLAIN):
        assert Opener(KEY, in_use).body_length(LENGTH.pack(length) + b"more") == length


def test_ciphers_do_not_understand_each_other() -> None:
    """Not even by chance: they have different keys."""
    for other in HERE:
        if other is not in_use:
            record = seal(Sealer(KEY, in_use), b"twenty bytes of text" * 3)
            into = bytearray(len(record) - Opener(KEY, other).overhead)
            with pytest.raises(TamperedError):
                Opener(KEY, other).open(record, memoryview(into))


def test_a_direction_takes_up_the_agreed_cipher_with_its_own_key() -> None:
    plain = Sealer(KEY, AesGcm, roll_over=2)
    assert plain.with_cipher(AesGcm) is plain
    assert seal(plain.with_cipher(in_use), b"same") == seal(Sealer(KEY, in_use), b"same")


@pytest.mark.parametrize("cipher", HERE)
def test_another_process_goes_on_with_the_records_of_a_connection(cipher: type[Cipher]) -> None:
    sealer, opener = Sealer(bytes(32), cipher, roll_over=ROLL_OVER), Opener(bytes(32), cipher)
    record, plain = memoryview(bytearray(5 + sealer.overhead)), memoryview(bytearray(5))
    for data in (b"first", b"other"):
        sealer.seal(data, record)
        opener.open(record, plain)
        assert bytes(plain) == data
        sealer, opener = Sealer.resume(sealer.state), Opener.resume(opener.state)
