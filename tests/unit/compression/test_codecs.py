"""Every codec: within its bound, of the size it says, right on average where it claims to be, and deaf to bad bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ringfort.compression import encoded
from ringfort.compression.chunked import KEPT, ROW, ChunkedTopK
from ringfort.compression.codec import CHUNK
from ringfort.compression.quantize import codec_of
from ringfort.compression.sparse import BLOCK, drawn, largest
from ringfort.compression.strategy import CompressionStrategy, Method, QuantizationType
from ringfort.errors import InvalidArgumentError, ProtocolError

NAMES = (
    "none", "fp16", "bf16", "int8", "int4", "onebit", "topk(0.1)", "topk(0.1)+int4", "topk(0.1)+fp16", "randomk(0.2)",
    "randomk(0.2)+int8", "powersgd(2)", "sparse",
)  # fmt: skip
Array = Any


def parse(name: str) -> CompressionStrategy:
    return CompressionStrategy.parse(name)


def round_trip(strategy: CompressionStrategy, x: Array, seed: int = 0, *, keep: bool = True) -> tuple[Array, Array]:
    """What arrives, and what is kept."""
    work = x.reshape(-1).copy()
    data, _ = encoded.write(strategy, work, x.shape, None, seed, keep)
    return encoded.read(data), work


def bound(kind: QuantizationType, x: Array) -> Array:
    """How far each element may be from what arrives: what quantize.py's head promises."""
    block = {QuantizationType.INT8: 512, QuantizationType.INT4: 128, QuantizationType.ONE_BIT: 512}.get(kind)
    if block is None:
        share, least = {"FP32": (0, 0), "FP16": (2.0**-11, 2.0**-25), "BF16": (2.0**-8, 1e-40)}[kind.name]
        return np.abs(x).astype(np.float64) * share + least
    largest_near = np.empty(x.size)
    for start in range(0, x.size, CHUNK):  # blocks begin anew with each chunk
        for at in range(start, min(start + CHUNK, x.size), block):
            stop = min(at + block, start + CHUNK, x.size)
            largest_near[at:stop] = np.abs(x[at:stop]).max()
    steps = {"INT8": 127, "INT4": 7, "ONE_BIT": 1}[kind.name]
    return largest_near / steps * (1 + 1e-5) + 1e-36


values = st.floats(-(2.0**100), 2.0**100, width=32) | st.sampled_from([0.0, -0.0, 1e-40, -3e38, 3.4e38, 65520.0])


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(list(QuantizationType)), st.lists(values, max_size=600), st.integers(0, 2**63))
def test_what_arrives_is_within_the_bound(kind: QuantizationType, numbers: list[float], seed: int) -> None:
    x = np.array(numbers, np.float32)
    if kind is QuantizationType.FP16:
        x = np.clip(x, -65504, 65504)  # beyond, float16 has no number and the largest is sent
    got, kept = round_trip(CompressionStrategy.quantize(kind), x, seed)
    assert np.isfinite(got).all()
    assert (np.abs(got.astype(np.float64) - x) <= bound(kind, x)).all()
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(kept, x - got)


@pytest.mark.parametrize("kind", list(QuantizationType))
@pytest.mark.parametrize("count", [0, 1, 7, 127, 129, 512, 513, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 77])
def test_every_length_is_within_the_bound_and_of_the_size_it_says(kind: QuantizationType, count: int) -> None:
    x = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    data, _ = encoded.write(CompressionStrategy.quantize(kind), x.copy(), (count,), None, 3, False)
    assert data.size == encoded.SIZE + codec_of(kind).nbytes(count)
    assert (np.abs(encoded.read(data) - x) <= bound(kind, x)).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (5,), (40, 30), (6, 5, 4), (70_001,)])
def test_what_arrives_and_what_is_kept_make_up_what_was_sent(name: str, shape: tuple[int, ...]) -> None:
    x = np.asarray(np.random.default_rng(1).standard_normal(shape), np.float32)
    got, kept = round_trip(parse(name), x)
    np.testing.assert_allclose(got + kept, x.reshape(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros(name: str) -> None:
    got, kept = round_trip(parse(name), np.zeros((50, 40), np.float32))
    assert not got.any()
    assert not kept.any()


@pytest.mark.parametrize("name", [name for name in NAMES if parse(name).is_unbiased])
def test_those_that_claim_so_are_right_on_average(name: str) -> None:
    x = np.random.default_rng(5).standard_normal(3000).astype(np.float32)
    trials = [round_trip(parse(name), x, seed, keep=False)[0].astype(np.float64) for seed in range(400)]
    error = np.mean(trials, axis=0) - x
    deviation = np.std(trials, axis=0).max() / np.sqrt(len(trials))
    # Of 3,000 elements one would be five and a half deviations off once in ten thousand seeds.
    assert (np.abs(error) < 5.5 * deviation + 1e-5).all()
    assert abs(error.mean()) < 5.5 * deviation / np.sqrt(x.size) + 1e-5


def test_a_codec_that_rounds_down_would_fail_the_test_above() -> None:
    strategy = parse("int4")
    assert strategy.is_unbiased
    assert not parse("bf16").is_unbiased
    assert not parse("topk(0.5)").is_unbiased
    x = np.full(23 * 128, 0.3, np.float32)
    x[::100] = 1.0
    got = [round_trip(strategy, x, seed, keep=False)[0] for seed in range(50)]
    assert {round(float(v), 4) for v in np.unique(got)} == {round(2 / 7, 4), round(3 / 7, 4), 1.0}


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 300), st.data())
def test_top_k_finds_the_largest(n: int, data: st.DataObject) -> None:
    x = np.array(data.draw(st.lists(st.integers(-9, 9), min_size=n, max_size=n)), np.float32)
    k = data.draw(st.integers(1, n))
    places = largest(x, k)
    assert len(places) == k
    assert (np.diff(places) > 0).all()
    assert sorted(np.abs(x[places])) == sorted(np.abs(x))[n - k :]


@pytest.mark.parametrize("n", [40_000, 100_000])
@pytest.mark.parametrize("kind", ["noise", "zeros", "one", "equal", "spikes"])
def test_top_k_of_many_is_exact_whatever_they_are(n: int, kind: str) -> None:
    random = np.random.default_rng(n)
    x = {
        "noise": random.standard_normal(n),
        "zeros": np.zeros(n),
        "one": np.where(np.arange(n) == 77, 5.0, 0.0),
        "equal": np.full(n, -2.0),
        "spikes": np.where(random.random(n) < 0.001, 1e6, 1e-6) * random.standard_normal(n),
    }[kind].astype(np.float32)
    for k in (1, n // 100, n // 3):
        places = largest(x, k)
        assert len(np.unique(places)) == k
        np.testing.assert_array_equal(np.sort(np.abs(x[places])), np.sort(np.abs(x))[n - k :])


def test_top_k_refuses_none_and_more_than_there_are() -> None:
    x = np.ones(5, np.float32)
    for k in (0, -1, 6):
        with pytest.raises(InvalidArgumentError, match="from 1 to 5"):
            largest(x, k)
    assert parse("topk(1)").kept(5) == 5
    assert parse("topk(0.0001)").kept(5) == 1
    assert parse("topk(0.01)").kept(0) == 0


@given(st.integers(1, 500), st.data(), st.integers(0, 2**64 - 1))
def test_a_draw_is_of_different_places_and_the_same_for_a_seed(n: int, data: st.DataObject, seed: int) -> None:
    k = data.draw(st.integers(1, n))
    places, lengths = drawn(n, k, seed)
    assert len(np.unique(places)) == k
    assert 0 <= places.min() <= places.max() < n
    assert lengths.sum() == n
    np.testing.assert_array_equal(places, drawn(n, k, seed)[0])


def test_a_matrix_of_low_rank_arrives_whole() -> None:
    random = np.random.default_rng(2)
    x = (random.standard_normal((90, 3)) @ random.standard_normal((3, 60))).astype(np.float32)
    got, kept = round_trip(parse("powersgd(3)"), x)
    np.testing.assert_allclose(got.reshape(x.shape), x, atol=1e-4)
    assert np.abs(kept).max() < 1e-4


# --- bytes that are none ----------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        encoded.read(np.frombuffer(data, np.uint8))


def test_a_factor_with_an_infinity_is_decoded_silently() -> None:
    x = np.random.default_rng(3).standard_normal((40, 30)).astype(np.float32)
    message, _ = encoded.write(parse("powersgd(2)"), x.reshape(-1).copy(), x.shape, None, 0, False)
    numbers = message[encoded.SIZE :].view(np.float32)
    numbers[0], numbers[-1] = np.inf, 0.0
    got = encoded.read(message).reshape(x.shape)
    assert not np.isfinite(got[0]).any()
    assert np.isfinite(got[1:]).all()


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(NAMES), st.data())
def test_a_message_with_a_changed_byte_is_read_or_refused(name: str, data: st.DataObject) -> None:
    x = np.random.default_rng(3).standard_normal((40, 30)).astype(np.float32)
    message, _ = encoded.write(parse(name), x.reshape(-1).copy(), x.shape, None, 0, False)
    place = data.draw(st.integers(0, message.size - 1))
    message[place] ^= data.draw(st.integers(1, 255))
    try:
        got = encoded.read(message)
    except ProtocolError:
        return
    assert got.size == x.size or place < encoded.SIZE


@pytest.mark.parametrize("name", NAMES)
def test_a_message_cut_short_or_too_long_is_refused(name: str) -> None:
    x = np.ones((40, 30), np.float32)
    message, _ = encoded.write(parse(name), x.reshape(-1).copy(), x.shape, None, 0, False)
    for wrong in (message[:-1], message[: encoded.SIZE], message[: encoded.SIZE - 1], np.append(message, message[:1])):
        with pytest.raises(ProtocolError):
            encoded.read(wrong)


def test_a_place_outside_the_array_is_refused() -> None:
    x = np.arange(100, dtype=np.float32)
    message, _ = encoded.write(parse("topk(0.02)"), x, (100,), None, 0, False)
    places = message[encoded.SIZE + 4 : encoded.SIZE + 8].view(np.uint16)
    np.testing.assert_array_equal(places, [98, 99])
    places[1] = BLOCK - 1
    with pytest.raises(ProtocolError, match="index 65535 is out of range for 100"):
        encoded.read(message)


def test_a_claim_of_very_many_elements_takes_no_memory() -> None:
    message, _ = encoded.write(parse("randomk(0.2)"), np.ones(100, np.float32), (100,), None, 0, False)
    message[8:16].view(np.uint64)[...] = 1 << 40
    with pytest.raises(ProtocolError, match="claim to be 1099511627776 elements"):
        encoded.read(message)
    with pytest.raises(ProtocolError, match="but 100 were expected"):
        encoded.read(message, 100)


def test_another_version_is_named() -> None:
    message, _ = encoded.write(parse("int8"), np.ones(3, np.float32), (3,), None, 0, False)
    message[0] = 9
    with pytest.raises(ProtocolError, match="version 9"):
        encoded.read(message)


# --- strategies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NAMES, "auto", "auto(0.05)", "topk(0.001)+onebit"])
def test_a_name_is_read_back(name: str) -> None:
    assert str(parse(name)) == name
    assert parse(str(parse(name))) == parse(name)


@pytest.mark.parametrize(
    "bad",
    ["", "int9", "topk(0)", "topk(1.5)", "topk(x)", "topk(-1)", "topk(nan)", "int8(3)", "int8+int4", "powersgd(0)",
     "powersgd(1.5)", "powersgd(4)+int4", "powersgd(9999)", "auto(0)", "randomk(2)", "topk(0.1)+int9", None, 3],
)  # fmt: skip
def test_a_bad_name_is_refused_with_what_there_is(bad: object) -> None:
    with pytest.raises(InvalidArgumentError):
        parse(bad)  # pyright: ignore[reportArgumentType]


def test_other_spellings() -> None:
    assert parse(" TopK(0.5)+INT8 ") == CompressionStrategy.top_k(0.5, QuantizationType.INT8)
    assert parse("one_bit") == CompressionStrategy.ONE_BIT
    assert parse("random(0.3)").method is Method.RANDOM_K
    assert parse("topk") == CompressionStrategy.top_k()
    assert parse(CompressionStrategy.INT4) is CompressionStrategy.INT4


# --- the codec of SparseLoCo ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 130, ROW - 1, ROW, ROW + 1, CHUNK, CHUNK + ROW + 3, 3 * CHUNK - 7])
def test_sparse_sends_the_largest_of_each_chunk_in_the_bytes_that_it_says(count: int) -> None:
    x = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    got, kept = round_trip(CompressionStrategy.SPARSE, x)
    np.testing.assert_array_equal(kept, x - got)
    size = 0
    for begin in range(0, count, ROW):
        chunk, there = x[begin : begin + ROW], got[begin : begin + ROW]
        k = KEPT if chunk.size == ROW else -(-chunk.size * KEPT // ROW)
        size += 4 + 3 * -(-k // 2) + -(-k // 4)
        sent = np.flatnonzero(there)
        assert len(sent) == k
        assert np.abs(chunk[sent]).min() >= np.sort(np.abs(chunk))[-k]
        assert (np.sign(there[sent]) == np.sign(chunk[sent])).all()
        assert len(np.unique(np.abs(there[sent]))) <= 2
    assert ChunkedTopK().nbytes(count) == size
    assert round_trip(CompressionStrategy.SPARSE, x, 5)[0].tobytes() == got.tobytes()  # nothing in it is random


def test_sparse_takes_116_bytes_for_16384() -> None:
    assert ChunkedTopK().nbytes(ROW) == 116
    assert ChunkedTopK().nbytes(1_200_000) < 4 * 1_200_000 / 140


@settings(deadline=None, max_examples=50)
@given(st.lists(values, min_size=1, max_size=300))
def test_sparse_levels_are_within_the_range_of_what_they_stand_for(numbers: list[float]) -> None:
    x = np.array(numbers, np.float32)
    got, _ = round_trip(CompressionStrategy.SPARSE, x)
    assert np.isfinite(got).all()
    assert np.abs(got.astype(np.float64)).max() <= np.abs(x.astype(np.float64)).max() * (1 + 2.0**-8) + 1e-40


def damaged(change: Any) -> Array:
    """An encoded chunk of 4096 elements, changed."""
    x = np.random.default_rng(0).standard_normal(ROW).astype(np.float32)
    data, _ = encoded.write(CompressionStrategy.SPARSE, x, x.shape, None, 0, False)
    change(data[encoded.SIZE :])
    return data


def test_sparse_data_of_a_stranger_is_refused_or_decoded_within_its_bounds() -> None:
    def infinite(body: Array) -> None:
        body[:2] = (0x80, 0x7F)

    def equal_indices(body: Array) -> None:
        body[4:100] = 0

    for change in (infinite, equal_indices):
        with pytest.raises(ProtocolError):
            encoded.read(damaged(change))
    x = np.ones(100, np.float32)
    data, _ = encoded.write(CompressionStrategy.SPARSE, x, x.shape, None, 0, False)
    data[encoded.SIZE + 4 : encoded.SIZE + 7] = 255  # index 4095 of 100
    with pytest.raises(ProtocolError, match="ascend"):
        encoded.read(data)


@settings(deadline=None, max_examples=80)
@given(st.binary(min_size=116, max_size=116))
def test_any_bytes_are_sparse_data_or_a_protocol_error(body: bytes) -> None:
    def put(into: Array) -> None:
        into[...] = np.frombuffer(body, np.uint8)

    try:
        got = encoded.read(damaged(put))
    except ProtocolError:
        return
    assert np.isfinite(got).all()


def test_sparse_error_feedback_decays() -> None:
    from ringfort import GradientCompressor

    compressor = GradientCompressor("sparse")
    x = np.zeros(ROW, np.float32)
    x[:KEPT], x[KEPT] = 10, 1
    compressor.compress(x, "x")
    assert compressor.residual("x")[KEPT] == 1  # type: ignore[index]
    for step in range(1, 4):
        x[KEPT] = 0
        compressor.compress(x, "x")
        assert compressor.residual("x")[KEPT] == pytest.approx(0.95**step)  # type: ignore[index]
    other = GradientCompressor("topk(0.01)")
    assert other.strategy.decay == 1
