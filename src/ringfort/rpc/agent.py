"""`RpcAgent`: call a function on another rank, by name."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast, overload

from ringfort.backends.base import Backend
from ringfort.config import RpcConfig, check_timeout
from ringfort.context import DistributedContext
from ringfort.errors import (
    InvalidArgumentError,
    InvalidMessageError,
    InvalidRankError,
    RpcError,
    RpcNoConnectionError,
    RpcPeerLostError,
    RpcTimeoutError,
)
from ringfort.rpc import forming, values
from ringfort.rpc.calls import Call, Calls, RpcFuture
from ringfort.rpc.functions import Function
from ringfort.rpc.inbound import Cancelled, Event, Head
from ringfort.rpc.link import Line, Link, Loop
from ringfort.rpc.mapping import MapProgress, run_map
from ringfort.rpc.messages import Count, Kind, Message, Reference, pack_cancel, pack_goodbye
from ringfort.rpc.outbound import Outgoing
from ringfort.rpc.poller import Poller
from ringfort.rpc.references import References, RRef
from ringfort.rpc.serving import ServedCall, Serving, current
from ringfort.rpc.wire import FETCH, Failed, Failure, Request

if TYPE_CHECKING:
    from typing_extensions import Self

F = TypeVar("F", bound=Callable[..., Any])

_LAST_WORDS = 1.0
"""Seconds that closing gives what was said last to leave."""


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


class RpcAgent:
    """One rank's functions for the others, and its calls of theirs.

        agent = RpcAgent(ctx, name="server")

        @agent.rpc
        def add(a: float, b: float) -> float:
            return a + b

        agent.rpc_sync("server", "add", 1, 2)  # on any rank

    Every rank of the group makes one, at the same place among its collectives. It serves at once, and has connections
    of its own: authenticated and encrypted like the group's. A rank that is lost ends the calls to it and nothing else.
    """

    def __init__(
        self,
        context: DistributedContext | Backend,
        *,
        name: str | None = None,
        config: RpcConfig | None = None,
        timeout: float | None = None,
    ) -> None:
        """Returns when all agents of the group are connected. `name` is another word for this rank, `rankN` by default.
        `timeout` bounds every call that is given none, and this; without it the group's does.

        Raises `RendezvousTimeoutError` with who did not come, `InvalidArgumentError` for a name that another rank has,
        and as collectives do.
        """
        if isinstance(context, Backend):
            context = DistributedContext(context)
        self.config = config or RpcConfig()
        self.rank, self.world_size = context.rank, context.world_size
        self.timeout = context.config.timeout if timeout is None else timeout
        check_timeout(self.timeout)
        self.name = f"rank{self.rank}" if name is None else name
        if not isinstance(self.name, str) or not self.name:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError("name", name, "must be a text")
        formed = forming.connect(context, self.name, self.config.max_message_bytes, self.timeout)
        self.names: tuple[str, ...] = tuple(formed.names)
        """The names of all ranks."""
        self._accepts = formed.max_message_bytes
        label = f"ringfort-rpc-{self.rank}"
        self._poller = Poller(label, self._on_event, self._on_lost, self._expire, lambda: self._serving.is_running)
        self._references = References(self.rank, lambda peer: self._lines[peer], self._poller.soon)
        self._references.remote_fetch = self._fetch
        self._serving = Serving(label, self.config, self._references)
        self._calls = Calls(self.config.max_in_flight, self._tell_cancelled)
        self._given: dict[tuple[int, bool, int], list[object]] = {}
        self._gone: dict[int, str] = {}
        self._all_gone = threading.Event()
        self._is_closed = False
        self._closing = threading.Lock()
        links = {
            peer: Link(
                peer, channel.sock, channel.stream(), self._admitter(peer), self._poller.stuck, self._poller.pause
            )
            for peer, channel in formed.channels.items()
        }
        itself = Loop(self.rank, self._admitter(self.rank), lambda event: self._on_event(itself, event))
        self._lines: dict[int, Line] = {self.rank: itself, **links}
        self._links = links
        if not links:
            self._all_gone.set()
        self._poller.start(list(links.values()))

    # --- functions ------------------------------------------------------------------------------------------------

    def register(self, name: str, fn: Callable[..., Any], *, raw: bool = False) -> None:
        """Lets others call `fn` as `name`. It may be plain or async; its annotations are checked before it runs. With
        `raw` it takes one `bytes` and returns one, and nothing is checked. A name may be registered anew.

        Raises `InvalidArgumentError` for what cannot be called or has annotations that cannot be checked.
        """
        self._serving.functions[name] = Function(name, fn, raw=raw)

    @overload
    def rpc(self, fn: F) -> F: ...
    @overload
    def rpc(self, fn: None = None, *, name: str | None = None, raw: bool = False) -> Callable[[F], F]: ...
    def rpc(self, fn: Callable[..., Any] | None = None, *, name: str | None = None, raw: bool = False) -> Any:
        """`register`, as a decorator: `@agent.rpc` or `@agent.rpc(name="add")`."""

        def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
            self.register(name or fn.__name__, fn, raw=raw)
            return fn

        return decorate if fn is None else decorate(fn)

    def handle_request(self, timeout: float | None = None) -> bool:
        """Runs the next request that waits for a worker, in this thread; with `RpcConfig(workers=0)`, waits up to
        `timeout` seconds for one. Whether there was one."""
        if timeout is not None:
            check_timeout(timeout)
        self._check_open()
        return self._serving.run_one(timeout)

    @staticmethod
    def current_call() -> ServedCall | None:
        """In a function that is being called: who called, how much time is left, whether anybody still waits."""
        return current.get()

    # --- calls ----------------------------------------------------------------------------------------------------

    def rpc_sync(self, dst: int | str, name: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Calls the function `name` of the rank `dst`, which is a number or a name, and returns what it returns.

        Values are what msgpack has, dataclasses and msgspec structs (which arrive as the annotations say, or as dicts),
        arrays, tensors on the CPU, and references. Arrays must not be changed until the call has ended.

        Raises `RemoteError` if the function raised, `FunctionNotFoundError`, `InvalidMessageError`, `RpcTimeoutError`,
        `RpcOverloadedError`, `RpcPeerLostError` if `dst` dies meanwhile, `RpcNoConnectionError` if it is gone.
        """
        return self._wait(self.rpc_async(dst, name, *args, timeout=timeout, **kwargs))

    def rpc_async(
        self, dst: int | str, name: str, /, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> RpcFuture:
        """As `rpc_sync`, but returns a future at once, which may also be awaited or cancelled."""
        if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError("name", name, "must be the name of a function")
        return self._call(self._rank_of(dst), name, args, kwargs, timeout)

    def remote(self, dst: int | str, name: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> RRef:
        """As `rpc_async`, but the result stays with `dst`: returns a reference to it at once."""
        peer = self._rank_of(dst)
        rref = self._references.new(peer)
        keep = rref._name.number  # pyright: ignore[reportPrivateUsage]
        rref.created = self._call(peer, name, args, kwargs, timeout, keep)
        return rref

    def map(
        self,
        name: str,
        items: Iterable[Any],
        *,
        workers: Sequence[int | str] | None = None,
        timeout: float | None = None,
        ahead: int = 2,
        progress: Callable[[MapProgress], object] | None = None,
    ) -> list[Any]:
        """Calls `name` with each of `items` on the other ranks (or on `workers`), and returns the results in order.

        A worker gets its next item when it has ended one, so faster ones get more; `ahead` is how many each has at a
        time. Items of a worker that is lost go to the others, so they may run twice. `progress` is told after each one.

        Raises what a call raised, the others being given up; `RpcPeerLostError` if no worker is left.
        """
        if isinstance(workers, str):
            raise InvalidArgumentError("workers", workers, "must be a list of ranks or names")
        everybody = [peer for peer in range(self.world_size) if peer != self.rank] or [self.rank]
        chosen = everybody if workers is None else list(dict.fromkeys(self._rank_of(one) for one in workers))
        if not chosen or not isinstance(ahead, int) or ahead < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError("workers", chosen, "there must be one, and ahead must be at least 1")
        seconds = self._seconds(timeout)
        call: Callable[[int, Any], RpcFuture] = lambda peer, item: self._call(peer, name, (item,), {}, seconds)  # noqa: E731
        return run_map(call, list(items), [peer for peer in chosen if self.is_alive(peer)] or chosen, ahead, progress)

    def is_alive(self, dst: int | str) -> bool:
        """Whether `dst` can be called: it has neither died nor closed its agent, as far as is known."""
        return not self._is_closed and self._lines[self._rank_of(dst)].is_open

    def _rank_of(self, dst: int | str) -> int:
        if isinstance(dst, str):
            if dst not in self.names:
                raise InvalidArgumentError("dst", dst, f"is no name of a rank; they are {', '.join(self.names)}")
            return self.names.index(dst)
        if not isinstance(dst, int) or isinstance(dst, bool) or not 0 <= dst < self.world_size:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidRankError(dst, self.world_size, name="dst")
        return dst

    def _seconds(self, timeout: float | None) -> float:
        if timeout is None:
            return self.timeout
        check_timeout(timeout)
        return timeout

    def _check_open(self) -> None:
        if self._is_closed:
            raise RpcNoConnectionError("this agent is closed")

    def _call(
        self,
        peer: int,
        name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        timeout: float | None,
        keep: int = 0,
    ) -> RpcFuture:
        seconds = self._seconds(timeout)
        self._check_open()
        line = self._lines[peer]
        if not line.is_open:
            raise RpcNoConnectionError(f"rank {peer} is gone: {self._gone.get(peer, 'its link broke')}", peer=peer)
        served = current.get()
        depth = 0
        if served is not None:
            # What was made for a call ends with it.
            served.check()
            depth, seconds = served.depth + 1, min(seconds, max(served.time_left, 0.001))
        giver = self._references.giver(peer)
        try:
            encoded = values.Encoded(Request(name, seconds, depth, list(args), kwargs, keep), giver)
            limit = min(self._accepts[peer], self.config.max_message_bytes)
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

    def _wait(self, future: RpcFuture) -> Any:
        try:
            if self._poller.is_here:
                raise RpcError("a callback of a future cannot wait for a call: the agent would stop; use rpc_async")
            if not self._serving.help_until(future) and future.peer != self.rank:
                self._poller.lead(self._links[future.peer], future)
            return future.result()
        except BaseException:
            if not future.done():  # Ctrl-C: nobody will wait for it again
                future.cancel()
            raise
        finally:
            del future  # its exception knows this frame: a cycle would keep what the caller holds

    def _fetch(self, name: Reference, timeout: float | None) -> Any:
        if name.owner != self.rank:
            return self._wait(self._call(name.owner, FETCH, (name.creator, name.number), {}, timeout))
        outcome, seconds = self._references.outcome(name), self._seconds(timeout)
        # A copy would be no use here: the owner may want to change it.
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
                self._given[key] = [self._references.taken(name) for name in head.references]
            if head.kind is Kind.REQUEST:
                taken = self._serving.admit(self._lines[peer], head)
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
        if head.size <= self.config.max_message_bytes:
            return True
        if self._calls.take(head.call, peer) is not None:
            why = f"the result of {call.what} has {head.size} bytes"
            self._tell_cancelled(call)
            call.future.set_exception(
                InvalidMessageError(f"{why}, where max_message_bytes is {self.config.max_message_bytes}", peer=peer)
            )
        return False

    def _on_event(self, line: Line, event: Event) -> None:
        if isinstance(event, Message):
            self._on_message(line, event)
        elif isinstance(event, Count):
            self._references.count(event)
        elif isinstance(event, Cancelled):
            self._given.pop((line.peer, True, event.call), None)
            self._serving.release(line.peer, event.dropped)
            self._serving.cancel(line.peer, event.call)
        elif isinstance(line, Link):
            line.broken = line.broken or "it closed its agent"

    def _on_message(self, line: Line, message: Message) -> None:
        is_request = message.kind is Kind.REQUEST
        references = self._given.pop((line.peer, is_request, message.call), [])
        if is_request:
            self._serving.take(line, message, references)
            return
        call = self._calls.take(message.call, line.peer)
        if call is None:
            return
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
        self._serving.release(link.peer, link.inbound.drop())
        self._serving.lost(link.peer)
        for key in [key for key in self._given if key[0] == link.peer]:
            del self._given[key]
        self._fail(link.peer)
        self._references.lost(link.peer)
        if len(self._gone) == len(self._links):
            self._all_gone.set()

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

    def _expire(self, now: float) -> float | None:
        return self._calls.expire(now)

    # --- life -----------------------------------------------------------------------------------------------------

    def stats(self) -> RpcStats:
        """What is under way."""
        return RpcStats(
            len(self._calls),
            self._serving.calls,
            self._serving.queued,
            self._serving.held(),
            len(self._references),
            sum(link.inbound.arriving for link in self._links.values() if link.is_open),
        )

    def join(self, timeout: float | None = None) -> bool:
        """Serves until every other rank has closed its agent or is lost: for a rank that only answers. False if
        `timeout` seconds pass first; without one it waits as long as it takes."""
        if timeout is not None:
            check_timeout(timeout)
        return self._all_gone.wait(timeout)

    def close(self) -> None:
        """Stops serving and leaves. Calls under way end: here and at the others with `RpcPeerLostError`. May be called
        twice; never raises."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        self._calls.fail(None, lambda call: RpcPeerLostError(call.peer, f"this agent was closed ({call.what})"))
        self._serving.close()
        self._references.close()
        for link in self._links.values():
            if link.is_open:
                link.control(pack_goodbye())
        until = time.monotonic() + _LAST_WORDS
        while time.monotonic() < until and not all(x.is_flushed or not x.is_open for x in self._links.values()):
            time.sleep(0.002)
        self._poller.stop()
        self._given.clear()
        self._all_gone.set()

    def drop(self) -> None:
        """Ends without a word, as a killed process does. For fault injection."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        self._poller.stop()
        self._calls.fail(None, lambda call: RpcPeerLostError(call.peer, "this agent was killed on purpose"))
        self._serving.close()
        self._references.close()
        self._all_gone.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RpcAgent {self.name}, rank {self.rank} of {self.world_size}>"


__all__ = ["MapProgress", "RRef", "RpcAgent", "RpcFuture", "RpcStats", "ServedCall"]
