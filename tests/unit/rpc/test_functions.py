"""What a function is called with is checked before it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ringfort.errors import InvalidArgumentError, InvalidMessageError
from ringfort.rpc.functions import Function

if TYPE_CHECKING:
    from decimal import Decimal


@dataclass
class Point:
    x: int
    y: int = 0


def move(point: Point, by: float = 1.0, *rest: int, scale: float | None = None, **more: str) -> Any:
    return point, by, rest, scale, more


def call(fn: Any, *args: Any, **kwargs: Any) -> Any:
    bound, named = Function("f", fn, raw=False).bind(args, kwargs)
    return fn(*bound, **named)


def test_arguments_become_what_the_annotations_say() -> None:
    assert call(move, {"x": 3}, 2, 5, 6, scale=1, why="so") == (Point(3), 2.0, (5, 6), 1.0, {"why": "so"})


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, "missing a required argument"),
        (({"x": "three"},), {}, "point"),
        (({},), {}, "point"),
        (({"x": 1}, "far"), {}, "by"),
        (({"x": 1}, 1.0, "rest"), {}, "rest"),
        (({"x": 1},), {"more": 1}, "more"),
        (({"x": 1},), {"by": 1.0, "scale": []}, "scale"),
    ],
)
def test_what_does_not_fit_is_named(args: tuple[Any, ...], kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidMessageError, match=words):
        call(move, *args, **kwargs)


def test_arrays_are_checked_and_not_copied() -> None:
    def total(x: np.ndarray[Any, Any], many: list[np.ndarray[Any, Any]] | None = None) -> Any:
        return x

    x = np.ones(3)
    assert call(total, x, [x]) is x
    with pytest.raises(InvalidMessageError, match="ndarray"):
        call(total, [1, 2])
    with pytest.raises(InvalidMessageError, match="many"):
        call(total, x, [1])


def test_without_annotations_everything_is_taken() -> None:
    assert call(lambda a, b=2: (a, b), [1, None]) == ([1, None], 2)


def test_methods_classes_and_callables_can_be_called() -> None:
    class Counter:
        def __call__(self, n: int) -> int:
            return n + 1

        def add(self, n: int) -> int:
            return n + 2

    assert call(Counter(), 1) == 2
    assert call(Counter().add, 1) == 3
    with pytest.raises(InvalidMessageError):
        call(Counter(), "1")


def test_raw_functions_take_one_bytes() -> None:
    raw = Function("raw", lambda data: data, raw=True)
    assert raw.bind((b"x",), {}) == ((b"x",), {})
    for args in ((), ("x",), (b"x", b"y")):
        with pytest.raises(InvalidMessageError, match="bytes"):
            raw.bind(args, {})
    with pytest.raises(TypeError, match="bytes"):
        raw.check_result("text")


def hidden(x: Decimal) -> None: ...


@pytest.mark.parametrize(("name", "fn"), [("", len), ("f", 3), ("f", hidden)])
def test_what_cannot_be_registered_is_refused(name: str, fn: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        Function(name, fn, raw=False)


def test_async_functions_are_known() -> None:
    async def later() -> None: ...

    assert Function("f", later, raw=False).is_async
    assert not Function("f", hidden.__class__, raw=False).is_async
