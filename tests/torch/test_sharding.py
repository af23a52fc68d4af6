"""`ringfort.torch.shard`: what each strategy spreads over whom, and that a model learns as it does in one process."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from ringfort import ConfigError, InvalidArgumentError
from ringfort.torch import ShardingStrategy
from ringfort.torch.sharding import arrange
from tests.torch.zygote import Zygote

ROUNDING = 1e-5
LOOPBACK = {"RINGFORT_INTERFACES": "127.0.0.1"}


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (
            2,
            {"FULL_SHARD": ([[0, 1]], 1 / 2), "SHARD_GRAD_OP": ([[0, 1]], 1 / 2), "NO_SHARD": ([[0], [1]], 1.0)},
        ),
        (
            4,
            {
                "FULL_SHARD": ([[0, 1, 2, 3]], 1 / 4),
                "HYBRID_SHARD": ([[0, 1], [2, 3]], 1 / 2),
                "HYBRID_SHARD(1)": ([[0], [1], [2], [3]], 1.0),
            },
        ),
    ],
    ids=["two ranks", "four ranks on two hosts"],
)
def test_a_sharded_model_learns_as_one_process_with_all_data_does(
    zygote: Zygote, world_size: int, cases: dict[str, tuple[list[list[int]], float]]
) -> None:
    arguments = list(cases), 2 if world_size > 2 else 0
    for outcomes in zygote.run("torch.sharding_scenarios.trained", world_size, *arguments, **LOOPBACK):
        for (worst, local, rows), (copies, share) in zip(outcomes, cases.values(), strict=True):
            assert worst < ROUNDING
            # Of tensors that cannot be divided some ranks have a row more.
            assert local == pytest.approx(share, rel=0.02)
            assert rows == copies


def test_hosts_are_found_where_the_default_group_is_anothers(zygote: Zygote) -> None:
    assert zygote.run("torch.sharding_scenarios.over_gloo", 4) == [[[0, 1], [2, 3]]] * 4


def test_what_cannot_be_is_refused_in_words(zygote: Zygote) -> None:
    for said in zygote.run("torch.sharding_scenarios.refused", 3, **LOOPBACK):
        expected = [
            "no process group found",
            "must divide the number of ranks on every host (rank 0's host has 2, rank 2's host has 1); 1 does",
            "intra_node_size=2: must divide",
            "use one of: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD",
            "only HYBRID_SHARD has this setting, not FULL_SHARD",
            "has no module of these classes",
            "must have parameters to shard",
            "must be a torch.nn.Module",
            "prefetch=-1",
            "the strategy sets this option",
            "must be a whole number of at least 1",
        ]
        assert len(said) == len(expected)
        for words, part in zip(said, expected, strict=True):
            assert part in words


@pytest.mark.parametrize(
    ("hosts", "size", "copies"),
    [
        ((0, 0, 0, 0), None, [[0, 1, 2, 3]]),
        ((0, 0, 0, 0), 2, [[0, 1], [2, 3]]),
        ((0, 1, 0, 1), None, [[0, 2], [1, 3]]),
        ((0, 1, 2), None, [[0], [1], [2]]),
        ((0, 0, 2, 2, 2, 2), 2, [[0, 1], [2, 3], [4, 5]]),
        ((0, 0, 2, 2, 2, 2), None, [[0, 1], [2, 3], [4, 5]]),
    ],
)
def test_copies_are_made_inside_hosts(hosts: tuple[int, ...], size: int | None, copies: list[list[int]]) -> None:
    assert arrange(hosts, size) == copies


def test_hosts_that_cannot_be_divided_are_named() -> None:
    with pytest.raises(InvalidArgumentError, match=r"intra_node_size=4: must divide .* rank 4's host has 2.*; 2 does"):
        arrange((0, 0, 0, 0, 4, 4), None)


def test_a_strategy_can_be_written_as_text() -> None:
    for text in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD(4)"):
        assert str(ShardingStrategy.parse(text)) == text
    assert ShardingStrategy.parse("hybrid_shard(4)") == ShardingStrategy.hybrid_shard(4)
    with pytest.raises(ConfigError, match="unknown strategy; use one of"):
        ShardingStrategy.parse("HYBRID_SHARD(many)")
