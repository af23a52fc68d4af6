"""`KeyValueStore`: the contents of a store and the requests that wait for a key. Pure: requests in, answers out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec

MAX_KEYS: Final = 1 << 16
"""Keys in a request: more than any group has ranks, and few enough for one message."""
MEMORY: Final = 4096
"""Answers that are kept for each peer, in case one is lost: more than a peer asks for in the second after which it
repeats a request."""

Verb = Literal["set", "get", "add", "swap", "delete", "check", "wait", "count", "forget"]


class Request(msgspec.Struct, frozen=True, array_like=True):
    """What a peer asks of the store. `number` counts the peer's requests, and comes back with the answer."""

    number: int
    verb: Verb
    keys: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_KEYS)] = ()
    value: bytes = b""
    other: bytes = b""
    """For `swap`: the new value, where `value` is the expected one."""
    amount: int = 0
    """For `add`; for `forget`, the number of the request that nobody waits for any more."""


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The result of a request."""

    number: int
    value: bytes = b""
    amount: int = 0
    refusal: str = ""
    """Why the request was not carried out."""


class KeyValueStore:
    """Serves the requests of several peers. A request that is repeated is answered again but carried out once."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[tuple[str, int], Request] = {}
        self._answers: dict[str, dict[int, Answer | None]] = {}
        """Of each peer's last requests, by number; None while the request waits for a key."""

    def handle(self, peer: str, request: Request) -> list[tuple[str, Answer]]:
        """Return the answers that are due now: to this request, unless it has to wait, and to requests that it ends."""
        number = request.number
        if request.verb == "forget":
            self._waiting.pop((peer, request.amount), None)
            return []
        known = self._answers.setdefault(peer, {})
        if number in known:
            answer = known[number]
            return [] if answer is None else [(peer, answer)]
        known.pop(number - MEMORY, None)
        known[number] = None
        if request.verb in ("get", "wait") and not self._has(request.keys):
            self._waiting[peer, number] = request
            return []
        due = [(peer, self._answer(request))]
        if request.verb in ("set", "add", "swap"):
            for key, waiting in list(self._waiting.items()):
                if self._has(waiting.keys):
                    del self._waiting[key]
                    due.append((key[0], self._answer(waiting)))
        for one, answer in due:
            self._answers[one][answer.number] = answer
        return due

    def drop_peer(self, peer: str) -> None:
        """Forget the waiting requests of a peer that is lost."""
        for key in [key for key in self._waiting if key[0] == peer]:
            del self._waiting[key]

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

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
                # As in torch's own stores: a missing key is set only if no value is expected.
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
