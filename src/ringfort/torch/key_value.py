"""`Shelf`: what is in a store of keys and values, and who waits for a key. Pure: requests in, answers out."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Annotated, Literal

import msgspec

MAX_KEYS = 1 << 16
"""Keys in a request: more than any group has ranks, and few enough for one note."""

Verb = Literal["set", "get", "add", "swap", "delete", "check", "wait", "count", "forget"]


class Request(msgspec.Struct, frozen=True, array_like=True):
    """What somebody wants of the shelf. `number` is theirs, and comes back with the answer."""

    number: int
    verb: Verb
    keys: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_KEYS)] = ()
    value: bytes = b""
    other: bytes = b""
    """For `swap`: `value` is what must be there, and this what takes its place."""
    amount: int = 0
    """For `add`; for `forget`, the number of the request that nobody waits for any more."""


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What became of a request."""

    number: int
    value: bytes = b""
    amount: int = 0
    refusal: str = ""
    """Why it was not done."""


class Shelf:
    """Who asks is told by something that can be a key of a dict, such as a peer's id."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[tuple[Hashable, int], Request] = {}

    def ask(self, who: Hashable, request: Request) -> list[tuple[Hashable, Answer]]:
        """The answers that are due now: to this request, unless it has to wait, and to those that waited for it."""
        if request.verb == "forget":
            self._waiting.pop((who, request.amount), None)
            return []
        if request.verb in ("get", "wait") and not self._has(request.keys):
            self._waiting[who, request.number] = request
            return []
        answers: list[tuple[Hashable, Answer]] = [(who, self._answer(request))]
        if request.verb in ("set", "add", "swap"):
            answers.extend(self._served())
        return answers

    def lost(self, who: Hashable) -> None:
        """Somebody has gone: nobody waits for their answers."""
        for key in [key for key in self._waiting if key[0] == who]:
            del self._waiting[key]

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def _served(self) -> Iterator[tuple[Hashable, Answer]]:
        for key, request in list(self._waiting.items()):
            if self._has(request.keys):
                del self._waiting[key]
                yield key[0], self._answer(request)

    def _answer(self, request: Request) -> Answer:
        values, number = self._values, request.number
        key = request.keys[0] if request.keys else ""
        match request.verb:
            case "set":
                values[key] = request.value
            case "get":
                return Answer(number, values[key])
            case "add":
                try:
                    total = int(values.get(key, b"0")) + request.amount
                except ValueError:
                    return Answer(number, refusal="there is no number to add to")
                values[key] = str(total).encode()
                return Answer(number, amount=total)
            case "swap":
                # As in torch's own stores: what is missing is set only where nothing was expected.
                if values.get(key, b"") == request.value:
                    values[key] = request.other
                return Answer(number, values.get(key, request.value))
            case "delete":
                return Answer(number, amount=int(values.pop(key, None) is not None))
            case "check":
                return Answer(number, amount=int(self._has(request.keys)))
            case "count":
                return Answer(number, amount=len(values))
            case _:
                pass
        return Answer(number)
