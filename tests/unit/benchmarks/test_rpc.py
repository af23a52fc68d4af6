"""The part of the page on calls says what the numbers say."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.rpc import ratios, rpc_part


def cell(small: float, large: float, p99_ms: float = 5.0) -> dict[str, Any]:
    return {"small": small, "large": large, "beside": {"seconds": 2.0, "calls": 100, "p50_ms": 1.0, "p99_ms": p99_ms}}


def test_what_is_claimed_is_judged_against_grpc() -> None:
    cells = {"ringfort": cell(3000, 0.03), "grpc": cell(1500, 0.15)}
    assert [ratio for *_, ratio in ratios(cells)] == [2.0, pytest.approx(5.0)]
    text = "\n".join(rpc_part({"cells": cells, "rounds": 3, "huge": 1 << 30, "missing": {}}))
    assert "| small calls per second, against gRPC in plaintext | 1.5 | 2.00 | yes |" in text
    assert "| 99th percentile of small calls beside 1 GiB, ms | at most 20 | 5.0 | yes |" in text


def test_a_claim_that_is_not_kept_is_said_so() -> None:
    cells = {"ringfort": cell(1000, 0.2, p99_ms=30.0), "grpc": cell(1500, 0.15)}
    text = "\n".join(rpc_part({"cells": cells, "rounds": 3, "huge": 1 << 30, "missing": {}}))
    assert text.count("**no**") == 3


def test_an_engine_that_is_not_there_is_named() -> None:
    result = {"cells": {"ringfort": cell(1, 1)}, "rounds": 1, "huge": 1 << 30, "missing": {"grpc": "pip install it"}}
    text = "\n".join(rpc_part(result))
    assert "`grpc` was not measured (pip install it)" in text
    assert "against gRPC" not in text
