"""What the benchmark can be asked for."""

from __future__ import annotations

import msgspec
import pytest

from ringfort.bench.options import DTYPES, OPS, Case, Options, parse_connections, parse_ranks, parse_size, parse_sizes
from ringfort.errors import ConfigError, InvalidArgumentError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4", 4), ("4K", 4096), ("64KiB", 65536), ("1m", 1 << 20), ("1.5K", 1536), ("256MB", 256 << 20), ("1G", 1 << 30)],
)
def test_sizes_are_bytes_with_binary_suffixes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "x", "-4", "0", "4T", "1.5", "4 4", "1e6", "65G", "K", "٤"])
def test_a_size_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="sizes="):
        parse_sizes(text)


@pytest.mark.parametrize("text", ["", "0", "-1", "two", "2.5", ","])
def test_ranks_that_cannot_be_are_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="ranks="):
        parse_ranks(text)


def test_connections_are_a_number_or_auto() -> None:
    assert [parse_connections(text) for text in ("1", " 4 ", "auto")] == [1, 4, "auto"]
    with pytest.raises(InvalidArgumentError, match="connections='-2'"):
        parse_connections("-2")


def test_lists_keep_their_order_and_drop_repeats() -> None:
    assert parse_ranks("4, 2,4") == (4, 2)
    assert parse_sizes("1M,4,") == (1 << 20, 4)


@pytest.mark.parametrize(
    "keywords",
    [
        {"op": "all_reduc"},
        {"dtype": "float128"},
        {"strategy": "star"},
        {"op": "all_gather", "strategy": "ring"},
        {"op": "broadcast", "strategy": "halving_doubling"},
        {"repeat": 0},
        {"min_time": 0.0},
        {"min_time": float("nan")},
        {"connections": 0},
        {"connections": "many"},
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused_by_name(keywords: dict[str, object]) -> None:
    name = list(keywords)[-1]
    with pytest.raises((InvalidArgumentError, ConfigError), match=f"{name}="):
        Options(**keywords)  # pyright: ignore[reportArgumentType]


def test_options_reach_a_rank_unchanged() -> None:
    options = Options(op="reduce", strategy="tree(3)", against=("gloo",), repeat=5, connections="auto")
    assert msgspec.json.decode(msgspec.json.encode(options), type=Options) == options


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_case_has_whole_elements_and_equal_parts_and_at_least_the_bytes(op: str, dtype: str) -> None:
    case = Case.of(op, 10, dtype, 3)
    assert case.nbytes >= 10
    assert case.nbytes % DTYPES[dtype] == 0
    if op not in ("all_reduce", "broadcast", "reduce"):
        assert case.part * 3 == case.count


def test_a_barrier_is_one_case_and_sizes_that_become_equal_are_one_too() -> None:
    assert len(Options(op="barrier").cases(4)) == 1
    assert len(Options(sizes=(1, 2, 4, 8)).cases(4)) == 2
