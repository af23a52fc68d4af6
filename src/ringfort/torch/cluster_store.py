"""`ClusterStore`: torch's key-value store over the control links of a cluster, so that it is as secure as they are.

One peer, the first member of the epoch, owns the contents; the others send it requests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ringfort.cluster.core.events import ClusterEvent, Noted, PeerJoined, PeerLost
from ringfort.errors import ChannelClosedError, InvalidArgumentError, OperationTimeoutError, PeerLostError
from ringfort.torch.key_value import Answer, KeyValueStore, Request, Verb
from ringfort.torch.linked_store import LinkedStore
from ringfort.transport.finalisers import weakly

if TYPE_CHECKING:
    from ringfort.cluster.node import ClusterNode

_REQUEST: Final = "torch.store.ask"
_ANSWER: Final = "torch.store.tell"
_REPEAT: Final = 1.0
"""Seconds after which a request is repeated: it may get lost while the owner does not listen yet."""


class ClusterStore(LinkedStore):
    """The store of the peers that name the same `owner`. `label` tells the stores of one cluster apart.

    Lives until `close`, and no longer than its node.
    """

    def __init__(self, node: ClusterNode, owner: str, label: str = "") -> None:
        super().__init__()
        self._node = node
        self._owner = owner
        self._request_topic, self._answer_topic = _REQUEST + label, _ANSWER + label
        self._contents = KeyValueStore()
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Answer]] = {}
        self._lost: str | None = None
        """Why the owner cannot be reached."""
        self._unsubscribe = node.subscribe(weakly(self._on_event, None))

    def close(self) -> None:
        """Stop to send and answer requests."""
        self._unsubscribe()
        self._fail_pending(ChannelClosedError("This store is closed"))

    def _request(self, verb: Verb, keys: Sequence[str], *, seconds: float | None = None, **more: Any) -> Answer:
        seconds = self._seconds if seconds is None else seconds
        request = Request(next(self._numbers), verb, tuple(keys), **more)
        future: Future[Answer] = Future()
        with self._lock:
            if self._lost is not None:
                raise self._owner_lost(self._lost)
            self._pending[request.number] = future
        deadline = time.monotonic() + seconds
        try:
            while True:
                self._send_request(request)
                left = deadline - time.monotonic()
                try:
                    return future.result(max(0.0, min(left, _REPEAT)))
                except FutureTimeoutError:
                    if left <= _REPEAT:
                        raise OperationTimeoutError(f"{verb} of {', '.join(keys[:3])} at the store", seconds) from None
        finally:
            with self._lock:
                self._pending.pop(request.number, None)
            if not future.done() and verb in ("get", "wait"):
                with suppress(ChannelClosedError):
                    self._send_request(Request(0, "forget", amount=request.number))

    def _send_request(self, request: Request) -> None:
        if self._owner == self._node.peer_id:
            self._handle(self._owner, request)
            return
        try:
            self._node.tell(self._request_topic, msgspec.msgpack.encode(request), self._owner)
        except InvalidArgumentError as exc:
            raise InvalidArgumentError("value", f"{len(request.value)} bytes", "too large for a store") from exc

    def _handle(self, peer: str, request: Request) -> None:
        """Carry out a request, at the owner."""
        with self._lock:
            answers = self._contents.handle(peer, request)
        for one, answer in answers:
            if one == self._node.peer_id:
                self._on_answer(answer)
            else:
                with suppress(ChannelClosedError):
                    self._node.tell(self._answer_topic, msgspec.msgpack.encode(answer), one)

    def _on_answer(self, answer: Answer) -> None:
        with self._lock:
            future = self._pending.pop(answer.number, None)
        if future is not None:
            future.set_result(answer)

    def _on_event(self, event: ClusterEvent) -> None:
        """Handle an event of the cluster, in the node's thread."""
        if isinstance(event, Noted):
            with suppress(msgspec.MsgspecError, ValueError):  # of another version: its sender will time out
                if event.topic == self._request_topic:
                    self._handle(event.peer, msgspec.msgpack.decode(event.body, type=Request))
                elif event.topic == self._answer_topic and event.peer == self._owner:
                    self._on_answer(msgspec.msgpack.decode(event.body, type=Answer))
        elif isinstance(event, PeerLost):
            with self._lock:
                self._contents.drop_peer(event.peer)
            if event.peer == self._owner:
                self._lost = event.why
                self._fail_pending(self._owner_lost(event.why))
        elif isinstance(event, PeerJoined) and event.peer == self._owner:
            self._lost = None

    def _fail_pending(self, error: Exception) -> None:
        with self._lock:
            pending, self._pending = list(self._pending.values()), {}
        for future in pending:
            future.set_exception(error)

    def _owner_lost(self, why: str) -> PeerLostError:
        return PeerLostError(self._owner, f"{why}; it owned the key-value store")
