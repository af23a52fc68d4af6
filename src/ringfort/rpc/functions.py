"""Functions that others may call, and the check of what they are called with: before they run, against their
annotations."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ringfort.errors import InvalidArgumentError, InvalidMessageError


class Function:
    """One function under its name."""

    def __init__(self, name: str, fn: Callable[..., Any], *, raw: bool) -> None:
        """Raises `InvalidArgumentError` for what cannot be called or checked."""
        if not name or not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError("name", name, "must be a text")
        if not callable(fn):
            raise InvalidArgumentError("fn", fn, "must be a function, plain or async")
        self.name = name
        self.fn = fn
        self.raw = raw
        self.is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004
        try:
            self._signature = inspect.signature(fn)
            hints = typing.get_type_hints(fn if inspect.isroutine(fn) or inspect.isclass(fn) else fn.__call__)  # pyright: ignore[reportFunctionMemberAccess]
        except (TypeError, ValueError, NameError) as exc:
            raise InvalidArgumentError(
                "fn", name, f"its annotations cannot be read ({exc}); import what they name, and not for types only"
            ) from exc
        self._types = {
            name: _whole(hints[name], parameter)
            for name, parameter in self._signature.parameters.items()
            if name in hints and hints[name] is not Any
        }
        for parameter, kind in self._types.items():
            try:
                msgspec.inspect.type_info(kind)
            except TypeError as exc:
                raise InvalidArgumentError(
                    "fn", name, f"{parameter}: {kind} is no type that can be checked ({exc}); leave it out"
                ) from exc

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments to call it with. Raises `InvalidMessageError` if they are not what it asks for."""
        if self.raw:
            if len(args) != 1 or kwargs or not isinstance(args[0], bytes):
                raise InvalidMessageError(f"{self.name} takes exactly one bytes")
            return (args[0],), {}
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise InvalidMessageError(f"{self.name}{self._signature}: {exc}") from exc
        for parameter, kind in self._types.items():
            if parameter not in bound.arguments:
                continue
            try:
                value = bound.arguments[parameter]
                bound.arguments[parameter] = msgspec.convert(value, kind, dec_hook=_as_it_is)
            except (msgspec.ValidationError, TypeError, ValueError) as exc:
                raise InvalidMessageError(f"{self.name}: {parameter}: {exc}") from exc
        return bound.args, bound.kwargs

    def check_result(self, result: Any) -> Any:
        """What it returned, if that can be sent."""
        if self.raw and not isinstance(result, (bytes, bytearray, memoryview)):
            raise TypeError(f"{self.name} is registered as raw and returned {type(result).__name__}, not bytes")
        return result  # pyright: ignore[reportUnknownVariableType]  # memoryview is generic for the checker alone


def _whole(kind: Any, parameter: inspect.Parameter) -> Any:
    """The type of all that a parameter takes: an annotation of `*args` is that of each."""
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return tuple[kind, ...]
    return dict[str, kind] if parameter.kind is inspect.Parameter.VAR_KEYWORD else kind


def _as_it_is(kind: Any, value: Any) -> Any:
    """For types that msgspec does not know, such as arrays: the value must be one."""
    wanted = typing.get_origin(kind) or kind
    if not isinstance(value, wanted):
        raise ValueError(f"expected {getattr(wanted, '__name__', wanted)}, got {type(value).__name__}")
    return value
