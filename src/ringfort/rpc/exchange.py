"""`Exchange`: all that an agent has under way with the other ranks, and what it does when something comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, NamedTuple, cast

from ringfort.config import RpcConfig, check_timeout
from ringfort.errors import InvalidMessageError, RpcError, RpcNoConnectionError, RpcPeerLostError, RpcTimeoutError
from ringfort.rpc import values
from ringfort.rpc.calls import Call, Calls, RpcFuture
from ringfort.rpc.framing import FETCH, Failed, Failure, Request
from ringfort.rpc.inbound import Cancelled, Event, Head
from ringfort.rpc.link import Line, Link, Loop
from ringfort.rpc.outbound import Outgoing
from ringfort.rpc.poller import Poller
from ringfort.rpc.protocol import Count, Kind, Message, Reference, pack_cancel, pack_goodbye
from ringfort.rpc.references import References
from ringfort.rpc.serving import Serving, current
from ringfort.rpc.setup import Formed
from ringfort.transport import locks, tcp
from ringfort.transport.forks import FORKED, keep_from_children

_LAST_WORDS = 1.0
"""Seconds that closing gives what was said last to leave."""


_LETS_GO = 0.02
"""Seconds between two looks, while this rank holds references, for some that are gone."""
_WATCH = 1.0
"""Seconds that a waiting caller sleeps at most before it looks again."""
_MOST_LATE = 10.0
"""Seconds after its deadline in which a call must have been ended by the agent's thread."""


class RpcStats(NamedTuple):
    """What an agent has under way."""

    calls: int
    """From this rank, not ended."""
    serving: int
    """From other ranks, not answered: queued, running, or on the way back."""
    queued: int
    """Of those, waiting for a worker."""
    held_bytes: int
    """Of those, requests and responses."""
    references: int
    """Values that this rank keeps for `RRef`s."""
    arriving: int
    """Messages of which a part has come."""


class Exchange:
    """Calls out, calls in, references, and the links that they go over."""

    def __init__(self, rank: int, config: RpcConfig, formed: Formed, timeout: float) -> None:
        self.rank = rank
        self._timeout = timeout
        self.all_gone = locks.Event()
        """Every other rank has closed its agent or is lost."""
        self._config = config
        self._accepts = formed.max_message_bytes
        self._patience, self._look_at = formed.patience, 0.0
        label = f"ringfort-rpc-{rank}"
        self._poller = Poller(label, self._on_event, self._on_lost, self._expire, lambda: self.serving.is_running)
        self.references = References(
            rank,
            lambda peer: self._lines[peer],
            self._poller.soon,
            world_size=len(formed.names),
            most=config.max_references,
        )
        self.references.remote_fetch = self._fetch
        self.serving = Serving(label, config, self.references)
        self._calls = Calls(config.max_in_flight, self._tell_cancelled)
        self._given: dict[tuple[int, bool, int], list[object]] = {}
        self._gone: dict[int, str] = {}
        self._is_closed = False
        self._is_over = False
        self._why_closed = "this agent is closed"
        self._closing = threading.RLock()
        links = {
            peer: Link(
                peer, connection.sock, connection.stream(), self._admitter(peer), self._poller.stuck, self._poller.pause
            )
            for peer, connection in formed.connections.items()
        }
        itself = Loop(rank, self._admitter(rank), lambda event: self._on_event(itself, event))
        self._lines: dict[int, Line] = {rank: itself, **links}
        self._links = links
        if not links:
            self.all_gone.set()
        keep_from_children(self)
        self._poller.start(list(links.values()))

    def abandon(self) -> None:
        """In a forked child: the connections and the threads are the parent's."""
        self._why_closed = FORKED
        self._is_closed = self._is_over = True
        self._closing = threading.RLock()
        self.all_gone = locks.Event()
        self.all_gone.set()
        self.references.abandon()
        self._poller.abandon()

    def is_alive(self, peer: int) -> bool:
        """Whether `peer` can be called, as far as is known."""
        return not self._is_closed and self._lines[peer].is_open

    def check_open(self) -> None:
        """Raises `RpcNoConnectionError` if the agent is closed."""
        if self._is_closed:
            raise RpcNoConnectionError(self._why_closed)

    # --- calls ----------------------------------------------------------------------------------------------------

    def call(
        self, peer: int, name: str, args: Sequence[Any], kwargs: dict[str, Any], seconds: float, keep: int = 0
    ) -> RpcFuture:
        """Begins a call. With `keep` its result stays there, under that number."""
        self.check_open()
        line = self._lines[peer]
        if not line.is_open:
            raise RpcNoConnectionError(f"rank {peer} is gone: {line.broken}", peer=peer)
        served = current.get()
        depth = 0
        if served is not None:
            # What was made for a call ends with it.
            served.check()
            depth, seconds = served.depth + 1, min(seconds, max(served.time_left, 0.001))
        giver = self.references.giver(peer)
        try:
            encoded = values.Encoded(Request(name, seconds, depth, list(args), kwargs, keep), giver)
            limit = min(self._accepts[peer], self._config.max_message_bytes)
            if encoded.size > limit:
                raise InvalidMessageError(
                    f"the arguments of {name} have {encoded.size} bytes, where max_message_bytes is {limit}", peer=peer
                )
            call = self._calls.open(peer, f"{name or 'fetch'} on rank {peer}", seconds)
        except RpcError:
            giver.undo()
            raise
        future = call.future
        outgoing = future.outgoing = Outgoing(Message(Kind.REQUEST, call.number, encoded.buffers, encoded.references))
        if encoded.references:
            outgoing.done = lambda: None if outgoing.begun else giver.undo()
        if served is not None:
            served.children.add(future)
            future.add_done_callback(lambda done: served.children.discard(cast("RpcFuture", done)))
        line.post(outgoing)
        self._poller.wake_by(call.deadline)
        if not line.is_open or self._is_closed:  # it was lost before it was in the table
            self._fail(peer)
        return future

    def wait(self, future: RpcFuture) -> Any:
        """The result of a call, when it has one."""
        try:
            if self._poller.is_here:
                raise RpcError("a callback of a future cannot wait for a call: the agent would stop; use rpc_async")
            if not self.serving.help_until(future) and future.peer != self.rank:
                self._poller.lead(self._links[future.peer], future)
            while not future.is_done_within(_WATCH):
                if time.monotonic() > future.deadline + _MOST_LATE:
                    raise RpcError("the agent has stopped ending calls whose time is over", peer=future.peer)
            return future.result()
        except BaseException:
            if not future.done():  # Ctrl-C: nobody will wait for it again
                future.cancel()
            raise
        finally:
            del future  # its exception knows this frame: a cycle would keep what the caller holds

    def seconds(self, timeout: float | None) -> float:
        """What a call has that is given `timeout`."""
        if timeout is None:
            return self._timeout
        check_timeout(timeout)
        return timeout

    def _fetch(self, name: Reference, timeout: float | None) -> Any:
        seconds = self.seconds(timeout)
        if name.owner != self.rank:
            return self.wait(self.call(name.owner, FETCH, (name.creator, name.number), {}, seconds))
        outcome = self.references.outcome(name, self.rank)
        try:
            value = outcome.result(seconds)
        except FutureTimeoutError as exc:
            raise RpcTimeoutError(f"waiting for reference {name}", seconds, peer=self.rank) from exc
        if isinstance(value, Failed):
            raise value.failure.to_error(self.rank)
        return value

    # --- what arrives, in the agent's thread ----------------------------------------------------------------------

    def _admitter(self, peer: int) -> Callable[[Head], bool]:
        def admit(head: Head) -> bool:
            if head.references:
                # From here on they are this rank's, whatever becomes of the message.
                key = (peer, head.kind is Kind.REQUEST, head.call)
                self._given[key] = [self.references.taken(name) for name in head.references]
            if head.kind is Kind.REQUEST:
                taken = self.serving.admit(self._lines[peer], head)
            else:
                taken = self._admit_response(peer, head)
            if not taken:
                self._given.pop((peer, head.kind is Kind.REQUEST, head.call), None)
            return taken

        return admit

    def _admit_response(self, peer: int, head: Head) -> bool:
        call = self._calls.get(head.call)
        if call is None or call.peer != peer:
            return False  # it has ended meanwhile
        if head.size <= self._config.max_message_bytes:
            return True
        if self._calls.take(head.call, peer) is not None:
            why = f"the result of {call.what} has {head.size} bytes"
            self._tell_cancelled(call)
            call.future.set_exception(
                InvalidMessageError(f"{why}, where max_message_bytes is {self._config.max_message_bytes}", peer=peer)
            )
        return False

    def _on_event(self, line: Line, event: Event) -> None:
        if isinstance(event, Message):
            self._on_message(line, event)
        elif isinstance(event, Count):
            wrong = self.references.count(event, line.peer)
            if wrong and isinstance(line, Link):
                line.broken = line.broken or wrong
        elif isinstance(event, Cancelled):
            self._given.pop((line.peer, True, event.call), None)
            self.serving.release(line.peer, event.dropped)
            self.serving.cancel(line.peer, event.call)
        elif isinstance(line, Link):
            line.broken = line.broken or "it closed its agent"

    def _on_message(self, line: Line, message: Message) -> None:
        is_request = message.kind is Kind.REQUEST
        references = self._given.pop((line.peer, is_request, message.call), [])
        if is_request:
            self.serving.take(line, message, references)
            return
        found = self._calls.get(message.call)
        try:
            call = self._calls.take(message.call, line.peer)
            if call is not None:
                self._end_call(call, line, message, references)
        except BaseException:  # Ctrl-C in a caller that leads: the call may be another thread's
            if found is not None and found.peer == line.peer and not found.future.done():
                self._calls.take(message.call, line.peer)
                found.future.set_exception(RpcPeerLostError(line.peer, "this rank was interrupted while it read"))
            raise

    def _end_call(self, call: Call, line: Line, message: Message, references: list[object]) -> None:
        if call.outgoing is not None and not call.outgoing.is_over:
            self._tell_cancelled(call)  # it was refused at its first frame: the rest need not be sent
        try:
            if message.kind is Kind.ERROR:
                failure: Failure = values.decode(message.buffers, references, kind=Failure)
                call.future.set_exception(failure.to_error(line.peer))
            else:
                call.future.set_result(values.decode(message.buffers, references))
        except InvalidMessageError as exc:
            call.future.set_exception(exc)

    def _on_lost(self, link: Link, reason: str) -> None:
        self._gone[link.peer] = reason
        self.serving.release(link.peer, link.inbound.drop())
        self.serving.lost(link.peer)
        for key in [key for key in self._given if key[0] == link.peer]:
            del self._given[key]
        self._fail(link.peer)
        self.references.lost(link.peer)
        if len(self._gone) == len(self._links):
            self.all_gone.set()

    def _fail(self, peer: int) -> None:
        reason = "this agent was closed" if self._is_closed else self._gone.get(peer)
        if reason is not None:
            self._calls.fail(peer, lambda call: RpcPeerLostError(call.peer, f"{reason} ({call.what} had not ended)"))

    def _tell_cancelled(self, call: Call) -> None:
        if call.outgoing is not None:
            call.outgoing.withdrawn = True
        line = self._lines[call.peer]
        if line.is_open:
            line.control(pack_cancel(call.number))

    def _expire(self, now: float) -> float:
        due = self._calls.expire(now)
        self._look_for_silence(now)
        look_at = min(self._look_at, now + _LETS_GO) if self.references.let_go() else self._look_at
        return look_at if due is None else min(due, look_at)

    def _look_for_silence(self, now: float) -> None:
        """A machine without power closes no connection: only its silence tells."""
        if now < self._look_at:
            return
        self._look_at = now + self._patience / tcp.LOOKS
        for link in self._links.values():
            seconds = link.silence() if link.is_open else 0.0
            if seconds >= self._patience:
                link.broken = link.broken or f"its machine has not answered for {seconds:.1f} s"
                self._poller.stuck(link)

    # --- life ----------------------------------------------------------------------------------------------------

    def stats(self) -> RpcStats:
        """What is under way."""
        return RpcStats(
            len(self._calls),
            self.serving.calls,
            self.serving.queued,
            self.serving.held(),
            len(self.references),
            sum(link.inbound.arriving for link in self._links.values() if link.is_open),
        )

    def close(self) -> None:
        """Stops serving and leaves. Calls under way end: here and at the others with `RpcPeerLostError`. May be called
        twice; never raises."""
        with self._closing:  # again, if it was interrupted
            if not self._is_over:
                self._is_closed = True
                self._close()
                self._is_over = True

    def _close(self) -> None:
        self._calls.fail(None, lambda call: RpcPeerLostError(call.peer, f"this agent was closed ({call.what})"))
        self.serving.close()
        self.references.close()
        links = [link for link in self._links.values() if link.is_open]
        for link in links:
            link.control(pack_goodbye())
        until = time.monotonic() + _LAST_WORDS
        _wait_for(lambda: all(link.is_flushed or not link.is_open for link in links), until)
        # A socket that is closed while something unread is in it takes back what it has sent last. So the others close
        # theirs first, as they do when they are told goodbye.
        for link in links:
            link.finish()
        _wait_for(lambda: not any(link.is_open for link in links), until)
        self._poller.stop()
        self._given.clear()
        self.all_gone.set()

    def drop(self) -> None:
        """Ends without a word, as a killed process does. For fault injection."""
        with self._closing:
            if self._is_over:
                return
            self._is_closed = True
            self._poller.stop()
            self._calls.fail(None, lambda call: RpcPeerLostError(call.peer, "this agent was killed on purpose"))
            self.serving.close()
            self.references.close()
            self.all_gone.set()
            self._is_over = True


def _wait_for(is_so: Callable[[], bool], until: float) -> None:
    while not is_so() and time.monotonic() < until:
        time.sleep(0.001)
