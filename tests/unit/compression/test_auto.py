"""What `auto` may choose, as docs/compression.md says it."""

from __future__ import annotations

import pytest

from ringfort.compression.auto import CANDIDATES, NOMINAL
from ringfort.compression.strategy import CompressionStrategy

EXACT = ["none", "fp16", "bf16", "int8"]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("auto(0.05)", EXACT),
        ("auto", [*EXACT, "int4"]),
        ("auto(1)", [*EXACT, "int4", "onebit", "topk(0.01)+int4", "powersgd(4)"]),
    ],
)
def test_an_error_allows_these_and_no_others(asked: str, expected: list[str]) -> None:
    limit = CompressionStrategy.parse(asked).max_error
    allowed = [one for one in CANDIDATES if one == CompressionStrategy.NONE or NOMINAL[one].error <= limit]
    assert [str(one) for one in allowed] == expected
