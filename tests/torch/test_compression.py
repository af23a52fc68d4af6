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
