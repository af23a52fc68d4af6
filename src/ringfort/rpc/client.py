"""`Client`: the calls that this rank makes. Arguments out, responses in, and the wait between them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, cast

from ringfort.config import RpcConfig, check_timeout
from ringfort.errors import (
    InvalidMessageError,
    RpcError,
    RpcNoConnectionError,
    RpcPeerLostError,
    RpcTimeoutError,
    sentence,
)
from ringfort.rpc import values
from ringfort.rpc.calls import Calls, RpcFuture
from ringfort.rpc.network import Network
from ringfort.rpc.outbound import Outgoing
from ringfort.rpc.protocol import Head, Kind, Message, Reference, pack_cancel
from ringfort.rpc.references import References
from ringfort.rpc.requests import FETCH, Failure, Request
from ringfort.rpc.serving import Serving, current

_WATCH = 1.0
"""Seconds that a waiting caller sleeps at most before it looks again."""
_MOST_LATE = 10.0
"""Seconds after its deadline in which the agent's thread must have ended a call."""


@dataclass(eq=False)
class Client:
    """Makes calls, and ends them when their response comes, their time is over or their rank is lost."""

    network: Network
    references: References
    serving: Serving
    config: RpcConfig
    accepts: Sequence[int]
    """The `max_message_bytes` of each rank."""
    timeout: float
    """Seconds for calls that are given none."""

    def __post_init__(self) -> None:
        self.calls = Calls(self.config.max_in_flight, self._tell_cancelled)

    def seconds(self, timeout: float | None) -> float:
        """Return the timeout of a call that is given `timeout`."""
        if timeout is None:
            return self.timeout
        check_timeout(timeout)
        return timeout

    def check_open(self) -> None:
        """Raise `RpcNoConnectionError` if the agent is closed."""
        if self.network.closed is not None:
            raise RpcNoConnectionError(sentence(self.network.closed))

    def call(
        self, peer: int, name: str, args: Sequence[Any], kwargs: dict[str, Any], seconds: float, keep: int = 0
    ) -> RpcFuture:
        """Begin a call. With `keep` its result stays with `peer`, under that number."""
        self.check_open()
        link = self.network.peer_links[peer]
        if not link.is_open:
            raise RpcNoConnectionError(f"No connection to rank {peer}: {link.broken}", peer=peer)
        served = current.get()
        depth = 0
        if served is not None:
            # What a function calls ends with the call that it works on.
            served.check()
            depth, seconds = served.depth + 1, min(seconds, max(served.time_left, 0.001))
        encoded = values.Encoded(Request(name, seconds, depth, list(args), kwargs, keep), self.references.name_of)
        limit = min(self.accepts[peer], self.config.max_message_bytes)
        if encoded.size > limit:
            why = f"The arguments of {name} have {encoded.size} bytes; max_message_bytes is {limit}"
            raise InvalidMessageError(why, peer=peer)
        future = self.calls.open(peer, f"{name or 'fetch'} on rank {peer}", seconds)
        names = encoded.references
        outgoing = future.outgoing = Outgoing(Message(Kind.REQUEST, future.number, encoded.buffers, names))
        if names:
            self.references.give(names, peer)
            outgoing.done = lambda: None if outgoing.begun else self.references.give(names, peer, -1)
        if served is not None:
            served.children.add(future)
            future.add_done_callback(lambda done: served.children.discard(cast("RpcFuture", done)))
        link.post(outgoing)
        self.network.wake_by(future.deadline)
        if not link.is_open or self.network.closed is not None:  # it was lost before the call was in the table
            self.lost(peer)
        return future

    def wait(self, future: RpcFuture) -> Any:
        """Return the result of a call, when there is one."""
        try:
            if self.network.is_here:
                raise RpcError("A callback of a future cannot wait for a call: the agent would stop; use rpc_async")
            served = current.get()
            is_helping = served is not None and self.serving.pool.help_until(future, served.depth)
            if not is_helping and future.peer != self.references.rank:
                self.network.lead(self.network.links[future.peer], future)
            while not future.is_done_within(_WATCH):
                if time.monotonic() > future.deadline + _MOST_LATE:
                    raise RpcError("The agent has stopped ending calls after their timeout", peer=future.peer)
            return future.result()
        except BaseException:
            if not future.done():  # Ctrl-C: nobody will wait for it again
                future.cancel()
            raise
        finally:
            del future  # its exception knows this frame: a cycle would keep what the caller holds

    def fetch(self, name: Reference, timeout: float | None) -> Any:
        """Return the value of a reference."""
        seconds = self.seconds(timeout)
        if name.owner != self.references.rank:
            return self.wait(self.call(name.owner, FETCH, (name.creator, name.number), {}, seconds))
        outcome = self.references.owned.outcome(name, self.references.rank)
        try:
            value = outcome.result(seconds)
        except FutureTimeoutError as exc:
            raise RpcTimeoutError(f"waiting for reference {name}", seconds, peer=self.references.rank) from exc
        if isinstance(value, Failure):
            raise value.to_error(self.references.rank)
        return value

    # --- responses, in the agent's thread or that of a caller that leads ------------------------------------------

    def admit(self, peer: int, head: Head, references: list[object]) -> bool:
        """Return whether to keep a response that begins. One that is too large ends its call."""
        call, limit = self.calls.get(head.call, peer), self.config.max_message_bytes
        if call is None:
            return False  # it has ended meanwhile
        if head.size <= limit:
            call.references = references
            return True
        if self.calls.take(call):
            self._tell_cancelled(call)
            why = f"The result of {call.what} has {head.size} bytes; max_message_bytes is {limit}"
            call.set_exception(InvalidMessageError(why, peer=peer))
        return False

    def take(self, peer: int, message: Message) -> None:
        """End a call whose response is complete."""
        call = self.calls.get(message.call, peer)
        if call is None:
            return
        is_sent, references = call.is_sent, call.references
        try:
            if self.calls.take(call):
                if not is_sent:
                    self._tell_cancelled(call)  # it was refused at its first frame: the rest need not be sent
                self._end(call, message, references)
        except BaseException:  # Ctrl-C in a caller that leads: the call may be another thread's
            if not call.done():
                self.calls.take(call)
                call.set_exception(RpcPeerLostError(peer, "this rank was interrupted while reading"))
            raise

    @staticmethod
    def _end(call: RpcFuture, message: Message, references: list[object]) -> None:
        try:
            if message.kind is Kind.ERROR:
                failure: Failure = values.decode(message.buffers, references, kind=Failure)
                call.set_exception(failure.to_error(call.peer))
            else:
                call.set_result(values.decode(message.buffers, references))
        except InvalidMessageError as exc:
            call.set_exception(exc)

    # --- calls that end without a response ------------------------------------------------------------------------

    def lost(self, peer: int) -> None:
        """End the calls to a rank that is lost."""
        reason = self.network.closed or self.network.lost.get(peer)
        if reason is not None:
            self.calls.fail(peer, reason)

    def _tell_cancelled(self, call: RpcFuture) -> None:
        self.network.post(call.peer, pack_cancel(call.number))
