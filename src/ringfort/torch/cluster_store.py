"""`ClusterStore`: torch's store of keys and values over the control links of a cluster, so that it is as safe as they
are. The first member of the epoch keeps it; the others ask."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ringfort.cluster.core.events import ClusterEvent, Noted, PeerJoined, PeerLost
from ringfort.errors import ChannelClosedError, InvalidArgumentError, OperationTimeoutError, PeerLostError
from ringfort.torch.key_value import Answer, Request, Shelf
from ringfort.torch.names import dist
from ringfort.transport.finalisers import weakly

if TYPE_CHECKING:
    from ringfort.cluster.node import ClusterNode

_ASK: Final = "torch.store.ask"
_TELL: Final = "torch.store.tell"
_REPEAT: Final = 1.0
"""Seconds after which a question is asked again: a note may be lost while the other side is not listening yet."""
DEFAULT_TIMEOUT: Final = 300.0
"""Seconds that a key is waited for unless told otherwise: what torch's own stores wait."""


class ClusterStore(dist.Store):
    """The store of the peers that name the same `keeper`. `label` keeps stores of one cluster apart.

    Lives until `close`, and no longer than its node.
    """

    def __init__(self, node: ClusterNode, keeper: str, label: str = "") -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]  # torch's
        self._node = node
        self._keeper = keeper
        self._label = label
        self._shelf = Shelf()
        self._seconds = DEFAULT_TIMEOUT
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._asked: dict[int, Future[Answer]] = {}
        self._seen: dict[str, dict[int, Answer | None]] = {}
        self._lost: str | None = None
        """Why the keeper cannot be asked."""
        self._end: Callable[[], None] = node.subscribe(weakly(self._on_event))

    # --- what torch calls -----------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Puts `value` under `key`."""
        self._ask("set", [key], value=_bytes(value))

    def get(self, key: str) -> bytes:
        """The value of `key`, which is waited for."""
        return self._ask("get", [key]).value

    def add(self, key: str, amount: int) -> int:
        """Adds to the number under `key`, which is 0 before; returns the sum."""
        answer = self._ask("add", [key], amount=amount)
        if answer.refusal:
            raise InvalidArgumentError("key", key, answer.refusal)
        return answer.amount

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Puts `desired` under `key` if `expected` is there; returns what is there then."""
        return self._ask("swap", [key], value=_bytes(expected), other=_bytes(desired)).value

    def delete_key(self, key: str) -> bool:
        """Whether `key` was there."""
        return bool(self._ask("delete", [key]).amount)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all `keys` are there."""
        return bool(self._ask("check", keys).amount)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Returns when all `keys` are there."""
        self._ask("wait", keys, seconds=None if timeout is None else timeout.total_seconds())

    def num_keys(self) -> int:
        """How many keys there are."""
        return self._ask("count", []).amount

    getNumKeys = num_keys  # noqa: N815  # the name by which C++ asks

    def set_timeout(self, timeout: timedelta) -> None:
        """How long keys are waited for."""
        self._seconds = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """How long keys are waited for."""
        return timedelta(seconds=self._seconds)

    def clone(self) -> ClusterStore:
        """The store itself: it may be used from any thread."""
        return self

    # --- asking and answering ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Answers nobody any more."""
        self._end()
        with self._lock:
            asked = list(self._asked.values())
            self._asked.clear()
        for future in asked:
            future.set_exception(ChannelClosedError("the store was closed"))

    def _ask(self, verb: Any, keys: Sequence[str], *, seconds: float | None = None, **said: Any) -> Answer:
        seconds = self._seconds if seconds is None else seconds
        request = Request(next(self._numbers), verb, tuple(keys), **said)
        future: Future[Answer] = Future()
        with self._lock:
            if self._lost is not None:
                raise self._lost_keeper(self._lost)
            self._asked[request.number] = future
        deadline = time.monotonic() + seconds
        try:
            while True:
                self._put(request)
                left = deadline - time.monotonic()
                try:
                    return future.result(max(0.0, min(left, _REPEAT)))
                except FutureTimeoutError:
                    if left <= _REPEAT:
                        what = f"store: {verb} of {', '.join(keys[:3])}"
                        raise OperationTimeoutError(what, seconds) from None
        finally:
            with self._lock:
                self._asked.pop(request.number, None)
            if not future.done() and verb in ("get", "wait"):
                with suppress(ChannelClosedError):
                    self._put(Request(0, "forget", amount=request.number))

    def _put(self, request: Request) -> None:
        if self._keeper == self._node.peer_id:
            self._serve(self._keeper, request)
        else:
            body = msgspec.msgpack.encode(request)
            try:
                self._node.tell(_ASK + self._label, body, self._keeper)
            except InvalidArgumentError as exc:
                raise InvalidArgumentError("value", f"{len(request.value)} bytes", "is too large for a store") from exc

    def _serve(self, who: str, request: Request) -> None:
        with self._lock:
            # A question that was asked again is answered again and carried out once: adding is no joke.
            seen = self._seen.setdefault(who, {})
            if request.number and request.number in seen:
                known = seen[request.number]
                answers = [] if known is None else [(who, known)]
            else:
                if request.number:
                    seen[request.number] = None
                for old in [number for number in seen if number < request.number - MEMORY]:
                    del seen[old]
                answers = [(str(one), answer) for one, answer in self._shelf.ask(who, request)]
                for one, answer in answers:
                    self._seen.setdefault(one, {})[answer.number] = answer
        for one, answer in answers:
            if one == self._node.peer_id:
                self._answered(answer)
            else:
                with suppress(ChannelClosedError):
                    self._node.tell(_TELL + self._label, msgspec.msgpack.encode(answer), one)

    def _answered(self, answer: Answer) -> None:
        with self._lock:
            future = self._asked.pop(answer.number, None)
        if future is not None:
            future.set_result(answer)

    def _on_event(self, event: ClusterEvent) -> None:
        """In the node's thread of events."""
        if isinstance(event, Noted) and event.topic in (_ASK + self._label, _TELL + self._label):
            kind = Request if event.topic == _ASK + self._label else Answer
            with suppress(msgspec.MsgspecError, ValueError):  # of another version: nobody answers, and they give up
                said = msgspec.msgpack.decode(event.body, type=kind)
                if isinstance(said, Request):
                    self._serve(event.peer, said)
                elif event.peer == self._keeper:
                    self._answered(said)
        elif isinstance(event, PeerLost):
            asked: list[Future[Answer]] = []
            with self._lock:
                self._shelf.lost(event.peer)
                if event.peer == self._keeper:
                    self._lost = event.why
                    asked, self._asked = list(self._asked.values()), {}
            for future in asked:
                future.set_exception(self._lost_keeper(event.why))
        elif isinstance(event, PeerJoined) and event.peer == self._keeper:
            self._lost = None

    def _lost_keeper(self, why: str) -> PeerLostError:
        return PeerLostError(self._keeper, f"it kept the store: {why}")


MEMORY: Final = 4096
"""Answers that are kept for each peer, in case one is lost: more than it asks in the second before it asks again."""


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
