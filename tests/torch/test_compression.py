"""Compression under DDP and FSDP2: real processes."""

from __future__ import annotations

import pytest

from tests.torch.zygote import Zygote


@pytest.fixture(scope="module")
def plain(zygote: Zygote) -> tuple[list[float], int]:
    """The last loss of each rank without compression, and the bytes sent."""
    outcomes = zygote.run("torch.compression.ddp", 2, None, 20, RINGFORT_SHM="off")
    return [losses[-1] for losses, _, _ in outcomes], outcomes[0][2]


@pytest.mark.parametrize(
    ("compression", "fewer"),
    [("int8", 3.0), ("topk(0.05)+int4", 4.0), ("powersgd(2)", 3.0)],
)
def test_ddp_learns_with_fewer_bytes(
    zygote: Zygote, plain: tuple[list[float], int], compression: str, fewer: float
) -> None:
    outcomes = zygote.run("torch.compression.ddp", 2, compression, 20, RINGFORT_SHM="off")
    assert outcomes[0][1] == outcomes[1][1], "the ranks' weights differ"
    for (losses, _, sent), last in zip(outcomes, plain[0], strict=True):
        assert losses[-1] < 0.7 * losses[0]
        assert losses[-1] < 1.5 * last
        assert sent * fewer < plain[1]


def test_ddp_over_shared_memory_leaves_gradients_alone_with_auto(zygote: Zygote) -> None:
    auto = zygote.run("torch.compression.ddp", 2, "auto", 10)
    plain = zygote.run("torch.compression.ddp", 2, None, 10)
    assert [losses for losses, _, _ in auto] == [losses for losses, _, _ in plain]


@pytest.mark.parametrize("compression", ["int8", "onebit"])
def test_fsdp_learns_with_its_gradients_quantized(zygote: Zygote, compression: str) -> None:
    plain = zygote.run("torch.compression.fsdp", 2, None, 20)
    outcomes = zygote.run("torch.compression.fsdp", 2, compression, 20)
    for (losses, names), (exact, _) in zip(outcomes, plain, strict=True):
        assert sorted(names) == ["0", "2", "3"]
        assert losses[-1] < 1.5 * exact[-1]
        assert losses != exact


def test_training_goes_on_with_the_same_bits_from_a_checkpoint(zygote: Zygote) -> None:
    assert zygote.run("torch.compression.checkpoint", 2) == [True, True]


def test_what_cannot_be_compressed_is_refused_in_words(zygote: Zygote) -> None:
    for words in zygote.run("torch.compression.refused", 2):
        assert "NonFiniteError" in words[0]
        assert "at rank 1" in words[0]
        assert "unknown strategy; use one of" in words[1]
        assert "fully_shard" in words[2]
        assert "can only quantize" in words[3]
        assert 'init_process_group("ringfort")' in words[4]


@pytest.mark.parametrize("backend", ["ringfort", "gloo"])
def test_the_weighted_hook_gives_the_mean_of_one_large_batch(zygote: Zygote, backend: str) -> None:
    for found, wanted, misuse in zygote.run("torch.compression.weighted", 2, backend):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)
        assert all("number of samples" in words for words in misuse[:4])
        assert "call hook.begin" in misuse[4]


def test_local_steps_count_the_steps_of_an_optimizer(zygote: Zygote) -> None:
    one, other = zygote.run("torch.compression.local_steps", 2)
    assert one[1] == other[1], "the ranks' weights differ after a round"
    assert len(one[1]) == 12
    assert (one[3], other[3]) == (0, 1), "the scaler left out one step, at one rank"
    assert len(other[0]) == len(one[0]) + 1
    for losses, _, misuse, _ in (one, other):
        assert losses[-1] < 0.8 * losses[0]
        assert "averages gradients" in misuse[0]
        assert "register_step_post_hook" in misuse[1]
        assert "at least one array" in misuse[2]
        assert "array of floats" in misuse[3]
        assert "init_process_group" in misuse[4]
