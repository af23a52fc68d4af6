"""What requests and errors say, as msgpack; and errors as exceptions again. Pure."""

from __future__ import annotations

import traceback
from typing import Any, NamedTuple

import msgspec

from ringfort.errors import FunctionNotFoundError, InvalidMessageError, RemoteError, RpcError, RpcOverloadedError

_LONGEST = 64 * 1024
"""Characters of a traceback, and of a message, that are sent."""

FETCH = ""
"""The name that is no function's: the value of a reference is asked for."""


class Request(msgspec.Struct, array_like=True, frozen=True):
    """Run `name` with these arguments."""

    name: str
    timeout: float
    """Seconds that the caller waits."""
    depth: int
    """Calls that wait for this one: one that no other call is made from has 0."""
    args: Any
    """A list. At the receiver undecoded: a worker does that."""
    kwargs: Any
    keep: int = 0
    """Not 0: the result stays with the one called, as the reference with this number."""


class Arrived(Request, array_like=True, frozen=True):
    """A request as it arrives."""

    args: msgspec.Raw
    kwargs: msgspec.Raw


_arrived: msgspec.msgpack.Decoder[Arrived] = msgspec.msgpack.Decoder(Arrived)


def read_request(data: memoryview | bytes) -> Arrived:
    """The request in the first buffer of a message. Raises `InvalidMessageError`."""
    try:
        request = _arrived.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidMessageError(f"a request cannot be read: {exc}") from exc
    if not 0 < request.timeout < float("inf") or request.depth < 0 or request.keep < 0:
        raise InvalidMessageError("a request has a timeout, depth or reference that cannot be")
    return request


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """Why a call has no result."""

    code: str
    type_name: str = ""
    message: str = ""
    traceback: str = ""
    known: list[str] = []

    def to_error(self, peer: int) -> RpcError:
        """The exception that it is to the caller."""
        if self.code == "function":
            return FunctionNotFoundError(self.message, self.known, peer=peer)
        if self.code == "message":
            return InvalidMessageError(f"refused by rank {peer}: {self.message}", peer=peer)
        if self.code == "overloaded":
            return RpcOverloadedError(f"rank {peer}: {self.message}", peer=peer)
        error = RemoteError(self.type_name, self.message, self.traceback, peer=peer)
        error.__cause__ = _There(self.traceback)
        return error


class _There(Exception):  # noqa: N818  # no error of its own: it is shown as the cause of one
    """The traceback of another process, as text."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class Failed(NamedTuple):
    """In place of a result."""

    failure: Failure


def refusal(exc: InvalidMessageError | FunctionNotFoundError) -> Failed:
    """For a request that cannot be run, or a result that cannot be sent."""
    if isinstance(exc, FunctionNotFoundError):
        return Failed(Failure("function", message=exc.name, known=list(exc.known)))
    return Failed(Failure("message", message=str(exc)[:_LONGEST]))


def overloaded(why: str) -> Failed:
    """For a request that there is no room for."""
    return Failed(Failure("overloaded", message=f"{why}; nothing was run, call again later"))


def raised(exc: BaseException) -> Failed:
    """For what a function raised."""
    text = "".join(traceback.format_exception(exc))[-_LONGEST:]
    kind = type(exc)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return Failed(Failure("remote", name, str(exc)[:_LONGEST], text))
