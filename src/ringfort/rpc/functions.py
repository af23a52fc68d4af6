"""Functions that other ranks may call, and the check of their arguments against the annotations."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ringfort.errors import InvalidArgumentError, InvalidMessageError


class Function:
    """A registered function."""

    def __init__(self, name: str, fn: Callable[..., Any], *, raw: bool) -> None:
        """Raises `InvalidArgumentError` if `fn` cannot be called or its annotations cannot be checked."""
        if not name or not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError("name", name, "must be a non-empty string")
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
            why = f"invalid annotations ({exc}); import their types outside of TYPE_CHECKING"
            raise InvalidArgumentError("fn", name, why) from exc
        self._types = {
            name: _whole(hints[name], parameter)
            for name, parameter in self._signature.parameters.items()
            if name in hints and hints[name] is not Any
        }
        for parameter, kind in self._types.items():
            try:
                msgspec.inspect.type_info(kind)
            except TypeError as exc:
                why = f"{parameter}: the type {kind} cannot be checked ({exc}); remove the annotation"
                raise InvalidArgumentError("fn", name, why) from exc

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments to call the function with. Raises `InvalidMessageError` if they do not fit."""
        if self.raw:
            if len(args) != 1 or kwargs or not isinstance(args[0], bytes):
                raise InvalidMessageError(f"{self.name} is registered as raw and takes exactly one bytes argument")
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
                bound.arguments[parameter] = msgspec.convert(value, kind, dec_hook=_check_instance)
            except (msgspec.ValidationError, TypeError, ValueError) as exc:
                raise InvalidMessageError(f"{self.name}: {parameter}: {exc}") from exc
        return bound.args, bound.kwargs

    def check_result(self, result: Any) -> Any:
        """Return `result`, if it can be sent. Raises `TypeError`."""
        if self.raw and not isinstance(result, (bytes, bytearray, memoryview)):
            raise TypeError(f"{self.name} is registered as raw and returned {type(result).__name__}, not bytes")
        return result  # pyright: ignore[reportUnknownVariableType]  # memoryview is generic for the checker alone


def _whole(kind: Any, parameter: inspect.Parameter) -> Any:
    """Return the type of the whole parameter: an annotation of `*args` or `**kwargs` is that of one item."""
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return tuple[kind, ...]
    return dict[str, kind] if parameter.kind is inspect.Parameter.VAR_KEYWORD else kind


def _check_instance(kind: Any, value: Any) -> Any:
    """Check a type that msgspec does not know, such as an array."""
    wanted = typing.get_origin(kind) or kind
    if not isinstance(value, wanted):
        raise ValueError(f"expected {getattr(wanted, '__name__', wanted)}, got {type(value).__name__}")
    return value
