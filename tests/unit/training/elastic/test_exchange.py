"""What members send each other, over a group of one."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from ringfort.errors import ProtocolError
from ringfort.training.elastic.exchange import SUMS, Exchange, is_share_finite
from ringfort.training.elastic.local_sum import LocalSum
from ringfort.training.elastic.protocol import Mark, Report, Result, Token
from ringfort.training.elastic.state_tree import StateTree
from ringfort.training.elastic.token_codec import TokenCodec


class Alone:
    """A group of one rank that may receive something else from rank 0."""

    def __init__(self) -> None:
        self.wire = b""

    def all_gather_object(self, value: bytes) -> list[bytes]:
        return [value]

    def all_gather(self, x: Any) -> Any:
        return x[None]

    def all_reduce(self, x: Any) -> Any:
        return x

    def broadcast_object(self, value: bytes, root: int) -> bytes:
        self.wire = value or self.wire
        return self.wire

    def broadcast(self, x: Any, root: int) -> Any:
        return x


def exchange() -> tuple[Exchange, LocalSum]:
    local = LocalSum()
    local.add({"w": np.arange(3, dtype=np.float32)}, 2.0)
    return Exchange(local, TokenCodec(4)), local


ALONE = cast("Any", Alone())


def test_a_result_in_use_is_not_overwritten() -> None:
    found, local = exchange()
    results = list[dict[str, Any]]()
    for _ in range(5):
        results.append(found.reduce(ALONE, results[-2:]))
        assert not any(results[-1] is earlier for earlier in results[:-1][-2:])
        assert results[-1]["float32"] is not local.buffers["float32"]
    assert len({id(result) for result in results}) == 3
    np.testing.assert_array_equal(results[0]["float32"], [0, 2, 4])
    np.testing.assert_array_equal(results[0][SUMS], [2, 0])


def test_memory_that_was_in_use_for_a_while_is_not_kept_for_ever() -> None:
    found, _ = exchange()
    results = [found.reduce(ALONE, [])]
    for _ in range(9):
        results.append(found.reduce(ALONE, results))
    assert len({id(result) for result in results}) == 10
    last = results[-1]
    for _ in range(3):
        last = found.reduce(ALONE, [last])
    assert len(found._spare) == 2


def test_a_share_is_finite_if_all_its_elements_are() -> None:
    values = np.ones(10, np.float32)
    values[7] = np.nan
    result = Result("b", 1, 1, {"float32": values, SUMS: np.ones(2)})
    assert [is_share_finite(result, me, 5) for me in range(5)] == [True, True, True, False, True]
    values[7], result.payload[SUMS][1] = 1, np.inf
    assert [is_share_finite(result, me, 2) for me in range(2)] == [True, False]


def test_reports_and_tokens_go_round() -> None:
    found, _ = exchange()
    report = Report(Mark("b@1", 3), covered=frozenset({1}), speed=5)
    assert found.reports(ALONE, report) == [report]
    assert found.tokens(ALONE, Token(("b", 1, 2, 3), 9))[0].digest == 9
    assert found.flags(ALONE, False) == [False]
    found.agree(ALONE)


def test_a_result_or_state_of_another_size_is_refused_before_memory_is_taken() -> None:
    sender, receiver, group = exchange()[0], exchange()[0], cast("Any", Alone())
    own = StateTree({"w": np.zeros(3)}).manifest()
    good = Result("b", 1, 1, {"float32": np.ones(3, np.float32), SUMS: np.ones(2)})
    assert sender.share(group, 0, good, own) is good
    found = receiver.share(group, 0, None, own)
    assert (found, set(found.payload)) == (good, {"float32", SUMS})
    for bad in (
        Result("b", 1, 1, {"float32": np.ones(4, np.float32), SUMS: np.ones(2)}),
        Result("b", 1, 1, {"float64": np.ones(3), SUMS: np.ones(2)}),
        Result("b", 1, 1, StateTree({"w": np.zeros(4)}).image(), is_state=True),
    ):
        sender.share(group, 0, bad, own)
        with pytest.raises(ProtocolError):
            receiver.share(group, 0, None, own)
    group.wire = b"\xc1"
    with pytest.raises(ProtocolError, match="malformed"):
        receiver.share(group, 0, None, own)
