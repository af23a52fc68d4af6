"""The content of requests and errors, as msgpack, and errors as exceptions again. Pure."""

from __future__ import annotations

import traceback
from typing import Any

import msgspec

from ringfort.errors import FunctionNotFoundError, InvalidMessageError, RemoteError, RpcError, RpcOverloadedError

_LONGEST = 64 * 1024
"""Characters of a traceback or a message that are sent at most."""

FETCH = ""
"""The name in a request for the value of a reference. No function can have it."""


class Request(msgspec.Struct, array_like=True, frozen=True):
    """Run the function `name` with these arguments."""

    name: str
    timeout: float
    """Seconds that the caller waits."""
    depth: int
    """How many calls wait for this one: 0 unless a function that is being called makes it."""
    args: Any
    """A list. The receiver leaves it undecoded until a worker needs it."""
    kwargs: Any
    keep: int = 0
    """If not 0, the result stays with the rank that was called, as the reference with this number."""


class ReceivedRequest(Request, array_like=True, frozen=True):
    """A request whose arguments have not been decoded."""

    args: msgspec.Raw
    kwargs: msgspec.Raw


_decoder: msgspec.msgpack.Decoder[ReceivedRequest] = msgspec.msgpack.Decoder(ReceivedRequest)


def read_request(data: memoryview | bytes) -> ReceivedRequest:
    """Read the request in the first buffer of a message. Raises `InvalidMessageError`."""
    try:
        request = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidMessageError(f"Malformed request: {exc}") from exc
    if not 0 < request.timeout < float("inf") or request.depth < 0 or request.keep < 0:
        raise InvalidMessageError("Malformed request: invalid timeout, depth or reference")
    return request


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """Why a call has no result. It stands in the place of the result."""

    code: str
    type_name: str = ""
    message: str = ""
    traceback: str = ""
    known: list[str] = []

    def to_error(self, peer: int) -> RpcError:
        """Return the exception that the caller gets."""
        if self.code == "function":
            return FunctionNotFoundError(self.message, self.known, peer=peer)
        if self.code == "message":
            return InvalidMessageError(f"Refused by rank {peer}: {self.message}", peer=peer)
        if self.code == "overloaded":
            return RpcOverloadedError(f"Rank {peer} is overloaded: {self.message}", peer=peer)
        error = RemoteError(self.type_name, self.message, self.traceback, peer=peer)
        error.__cause__ = _RemoteTraceback(self.traceback)
        return error


class _RemoteTraceback(Exception):  # noqa: N818  # only shown as the cause of an error
    """The traceback of another process, as text."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def invalid(why: object) -> Failure:
    """Return the answer to a request that cannot be read, or whose result cannot be sent."""
    return Failure("message", message=str(why)[:_LONGEST])


def overloaded(why: str) -> Failure:
    """Return the answer to a request that there is no room for."""
    return Failure("overloaded", message=f"{why}; the function was not run, call again later")


def raised(exc: BaseException) -> Failure:
    """Return the answer if the function raised."""
    text = "".join(traceback.format_exception(exc))[-_LONGEST:]
    kind = type(exc)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return Failure("remote", name, str(exc)[:_LONGEST], text)
