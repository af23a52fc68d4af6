"""Error feedback: nothing is lost, whatever happens to tensors and steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ringfort import GradientCompressor, InvalidArgumentError, NonFiniteError, ProtocolError
from ringfort.collectives.arrays import as_view
from ringfort.compression.compressor import Piece

NAMES = ("fp16", "bf16", "int8", "int4", "onebit", "topk(0.1)", "topk(0.1)+int4", "randomk(0.2)", "powersgd(2)")
Array = Any


def noise(seed: int, shape: tuple[int, ...]) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_sent_and_what_is_kept_make_up_what_was_given_over_a_thousand_steps(name: str) -> None:
    compressor, shape = GradientCompressor(name), (20, 15)
    given, sent = np.zeros(300), np.zeros(300)
    drift = noise(0, shape)
    for step in range(1000):
        x = noise(step, shape) + drift
        given += x.reshape(-1)
        sent += compressor.decompress(compressor.compress(x, "w"))
    residual = compressor.residual("w")
    assert residual is not None
    np.testing.assert_allclose(sent + residual, given, rtol=1e-4, atol=2e-2)
    # Bounded too: what is kept does not grow with the steps, or it would not come late but never.
    assert np.abs(residual).max() < 300


@pytest.mark.parametrize("name", ["topk(0.1)", "onebit", "powersgd(1)"])
def test_without_feedback_much_of_it_never_arrives(name: str) -> None:
    """So that the test above can fail."""
    compressor = GradientCompressor(name, error_feedback=False)
    given, sent = np.zeros(300), np.zeros(300)
    drift = noise(0, (20, 15))
    for step in range(200):
        x = noise(step, (20, 15)) + drift
        given += x.reshape(-1)
        sent += compressor.decompress(compressor.compress(x, "w"))
    assert compressor.residual("w") is None
    assert np.abs(sent - given).max() > 20


def test_names_are_kept_apart() -> None:
    compressor = GradientCompressor("topk(0.1)")
    compressor.compress(np.arange(10, dtype=np.float32), "a")
    compressor.compress(np.ones(10, np.float32), "b")
    assert compressor.names == ["a", "b"]
    a, b = compressor.residual("a"), compressor.residual("b")
    assert a is not None
    assert b is not None
    assert a[9] == 0
    assert a[8] == 8
    assert b.sum() == 9


def test_a_tensor_of_another_shape_starts_anew() -> None:
    compressor = GradientCompressor("topk(0.1)")
    compressor.compress(np.ones(10, np.float32), "a")
    got = compressor.decompress(compressor.compress(np.ones((5, 4), np.float32), "a"))
    assert got.sum() == 2
    residual = compressor.residual("a")
    assert residual is not None
    assert residual.size == 20
    compressor.forget("a")
    assert compressor.residual("a") is None
    compressor.forget("never there")
    compressor.compress(np.ones(3, np.float32), "b")
    compressor.forget()
    assert compressor.names == []


def test_a_step_that_failed_leaves_nothing_behind() -> None:
    compressor = GradientCompressor("onebit")
    compressor.compress(noise(1, (50,)), "a")
    before = compressor.residual("a")
    assert before is not None
    before = before.copy()
    draft = compressor.draft(as_view(noise(2, (50,))), Piece.row([("a", (50,))]))
    draft.work[:] = 7  # encoded, half sent, and then a peer was lost
    after = compressor.residual("a")
    np.testing.assert_array_equal(after, before)
    again = compressor.draft(as_view(noise(2, (50,))), Piece.row([("a", (50,))]))
    assert again.seed == draft.seed
    np.testing.assert_allclose(again.work, noise(2, (50,)) + before, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_restored_state_goes_on_with_the_same_bits(name: str) -> None:
    first, second = GradientCompressor(name, seed=4), GradientCompressor(name, seed=4)
    for step in range(5):
        first.compress(noise(step, (12, 10)), "w")
    second.load_state_dict(first.state_dict())
    for step in range(5, 8):
        x = noise(step, (12, 10))
        assert first.compress(x, "w") == second.compress(x, "w")


def test_a_state_of_another_strategy_is_sent_too() -> None:
    old, new = GradientCompressor("topk(0.1)"), GradientCompressor("int8")
    old.compress(np.arange(10, dtype=np.float32), "a")
    new.load_state_dict(old.state_dict())
    got = new.decompress(new.compress(np.zeros(10, np.float32), "a"))
    np.testing.assert_allclose(got, [0, 1, 2, 3, 4, 5, 6, 7, 8, 0], atol=0.1)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"version": 2, "tensors": {}},
        {"version": 1, "tensors": {"a": {"shape": [3], "step": 0, "residual": [1.0], "factor": None}}},
        {"version": 1, "tensors": {"a": {"shape": [1], "step": 0, "residual": [np.nan], "factor": None}}},
        {"version": 1, "tensors": {"a": {"shape": "x"}}},
        {"version": 1, "tensors": 3},
    ],
)
def test_what_is_no_state_is_refused_and_changes_nothing(state: dict[str, Any]) -> None:
    compressor = GradientCompressor("int8")
    compressor.compress(noise(1, (4,)), "a")
    with pytest.raises(InvalidArgumentError, match="state"):
        compressor.load_state_dict(state)
    assert compressor.names == ["a"]


# --- elements that are no numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", NAMES)
def test_infinities_and_nans_are_reported(name: str, bad: float) -> None:
    compressor = GradientCompressor(name)
    x = noise(1, (30, 30))
    compressor.compress(x, "w")
    kept = compressor.residual("w")
    assert kept is not None
    kept = kept.copy()
    x[3, 4] = bad
    with pytest.raises(NonFiniteError, match="Array 'w' contains infinite or NaN") as caught:
        compressor.compress(x, "w")
    assert caught.value.found == {0: 1}
    np.testing.assert_array_equal(compressor.residual("w"), kept)


def test_they_can_be_skipped_or_clipped() -> None:
    x = np.array([1, np.nan, np.inf, -np.inf, -3], np.float32)
    skipping, clipping = (GradientCompressor("none", on_nonfinite=how) for how in ("skip", "clip"))
    np.testing.assert_array_equal(skipping.decompress(skipping.compress(x, "a")), [1, 0, 0, 0, -3])
    np.testing.assert_array_equal(clipping.decompress(clipping.compress(x, "a")), [1, 0, 3, -3, -3])
    assert np.isnan(x[1]), "the caller's array was changed"


def test_very_large_ones_are_numbers() -> None:
    x = np.array([3e38, -3e38, 1e30], np.float32)
    compressor = GradientCompressor("bf16")
    np.testing.assert_allclose(compressor.decompress(compressor.compress(x, "a")), x, rtol=1e-2)


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "uint8"])
def test_only_floats_can_be_compressed(dtype: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"only float16, bfloat16, float32 and float64"):
        GradientCompressor("int8").compress(np.ones(3, dtype), "a")


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_floats_are_compressed_as_float32(dtype: str) -> None:
    compressor = GradientCompressor("int8")
    x = noise(1, (100,)).astype(dtype)
    np.testing.assert_allclose(compressor.decompress(compressor.compress(x, "a")), x, atol=0.05)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(InvalidArgumentError, match="on_nonfinite"):
        GradientCompressor("int8", on_nonfinite="ignore")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidArgumentError, match="unknown strategy; use one of"):
        GradientCompressor("zip")
    with pytest.raises(InvalidArgumentError, match="needs links"):
        GradientCompressor("auto").compress(np.ones(3, np.float32))
    with pytest.raises(ProtocolError):
        GradientCompressor("int8").decompress(b"nothing")
