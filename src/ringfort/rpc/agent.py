"""`RpcAgent`: call a function on another rank, by name.

agent.py       the public class; it connects the parts below
client.py      makes calls; calls.py is the table of those that have not ended
serving.py     runs functions for others; pool.py has the threads, functions.py checks the arguments
references.py  values that stay with their owner; owned.py counts who holds those of this rank
network.py     moves bytes over link.py, and that over protocol.py and outbound.py, which are pure
values.py, requests.py  what the bytes mean
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

from ringfort.backends.base import Backend
from ringfort.config import RpcConfig, check_timeout
from ringfort.context import DistributedContext
from ringfort.errors import InvalidArgumentError, InvalidRankError, did_you_mean
from ringfort.rpc import setup
from ringfort.rpc.calls import RpcFuture
from ringfort.rpc.client import Client
from ringfort.rpc.functions import Function
from ringfort.rpc.link import PeerLink
from ringfort.rpc.mapping import MapProgress, run_map
from ringfort.rpc.network import CLOSED, Network
from ringfort.rpc.protocol import Cancelled, Count, Event, Head, Kind, Lost, Message
from ringfort.rpc.references import References, RRef
from ringfort.rpc.serving import ServedCall, Serving, current

if TYPE_CHECKING:
    from typing_extensions import Self

F = TypeVar("F", bound=Callable[..., Any])

_LETS_GO = 0.02
"""Seconds between two looks for `RRef`s that are gone, while this rank holds any."""


class RpcStats(NamedTuple):
    """What an agent has under way."""

    calls: int
    """Calls from this rank that have not ended."""
    serving: int
    """Requests from other ranks that are arriving, queued, running or being answered."""
    queued: int
    """Requests that wait for a worker."""
    held_bytes: int
    """Bytes of requests and responses that are held for other ranks."""
    references: int
    """Values that this rank keeps for `RRef`s."""
    arriving: int
    """Messages that have arrived in part."""


class RpcAgent:
    """Calls functions of other ranks, and runs functions for them.

        agent = RpcAgent(ctx, name="server")

        @agent.rpc
        def add(a: float, b: float) -> float:
            return a + b

        agent.rpc_sync("server", "add", 1, 2)  # on any rank

    Every rank of the group creates an agent, at the same place among its collectives. The agent serves at once, over
    connections of its own that are authenticated and encrypted like the group's. Losing a rank ends the calls to that
    rank and nothing else. Use the agent as a context manager, or call `close`.
    """

    def __init__(
        self,
        context: DistributedContext | Backend,
        *,
        name: str | None = None,
        config: RpcConfig | None = None,
        timeout: float | None = None,
    ) -> None:
        """Connect to the agents of all other ranks; return when all are connected.

        Args:
            context: the group; a sub-group's context gives agents of that sub-group.
            name: another name for this rank, by which others may call it. `rankN` by default.
            config: limits, and the number of worker threads. Each rank may have its own.
            timeout: seconds that bound this constructor and every call without a timeout of its own. By default that
                of the group.

        Raises:
            RendezvousTimeoutError: some ranks did not connect; the error lists them.
            InvalidArgumentError: another rank has the same name.
        """
        if isinstance(context, Backend):
            context = DistributedContext(context)
        self.config = config or RpcConfig()
        self.rank, self.world_size = context.rank, context.world_size
        self.timeout = context.config.timeout if timeout is None else timeout
        check_timeout(self.timeout)
        self.name = f"rank{self.rank}" if name is None else name
        if not isinstance(self.name, str) or not self.name:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError("name", name, "must be a non-empty string")
        formed = setup.connect(context, self.name, self.config.max_message_bytes, self.timeout)
        self.names: tuple[str, ...] = tuple(formed.names)
        """The names of all ranks."""
        network = self._network = Network(
            self.rank,
            formed,
            admit=self._admit,
            on_event=self._on_event,
            on_lost=self._on_lost,
            expire=self._expire,
            is_running=lambda: self._serving.pool.is_running,
        )
        self._references = References(
            self.rank, network.post, network.wake, world_size=self.world_size, most=self.config.max_references
        )
        self._serving = Serving(f"ringfort-rpc-{self.rank}", self.config, self._references)
        self._client = Client(
            network, self._references, self._serving, self.config, formed.max_message_bytes, self.timeout
        )
        self._references.fetch = self._client.fetch
        network.start()

    # --- functions ------------------------------------------------------------------------------------------------

    def register(self, name: str, fn: Callable[..., Any], *, raw: bool = False) -> None:
        """Let other ranks call `fn` as `name`. Registering a name again replaces its function.

        `fn` may be plain or async. Arguments are checked against its annotations before it runs. With `raw` it takes
        one `bytes` and returns one, and nothing is checked.

        Raises `InvalidArgumentError` if `fn` cannot be called, or if its annotations cannot be checked.
        """
        self._serving.functions[name] = Function(name, fn, raw=raw)

    @overload
    def rpc(self, fn: F) -> F: ...
    @overload
    def rpc(self, fn: None = None, *, name: str | None = None, raw: bool = False) -> Callable[[F], F]: ...
    def rpc(self, fn: Callable[..., Any] | None = None, *, name: str | None = None, raw: bool = False) -> Any:
        """Register a function, as a decorator: `@agent.rpc` or `@agent.rpc(name="add")`. See `register`."""

        def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
            self.register(name or fn.__name__, fn, raw=raw)
            return fn

        return decorate if fn is None else decorate(fn)

    def handle_request(self, timeout: float | None = None) -> bool:
        """Run the next queued request in the calling thread. Return whether there was one.

        With `RpcConfig(workers=0)` this is how requests are run at all, and it waits up to `timeout` seconds for one
        (without a timeout, as long as it takes). With workers it does not wait.
        """
        if timeout is not None:
            check_timeout(timeout)
        self._client.check_open()
        return self._serving.pool.run_one(timeout)

    @staticmethod
    def current_call() -> ServedCall | None:
        """Return the call that the calling function was called by: who called, how much time is left, and whether the
        caller still waits. None outside a function that is being called."""
        return current.get()

    # --- calls ----------------------------------------------------------------------------------------------------

    def rpc_sync(self, dst: int | str, name: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Call the function `name` on the rank `dst`, a number or a name, and return its result.

        Arguments and results may be what msgpack has, dataclasses and msgspec structs (they arrive as the annotations
        say, or as dicts), arrays, CPU tensors and `RRef`s. Arrays must not be changed until the call has ended.

        Raises:
            RemoteError: the function raised.
            FunctionNotFoundError: `dst` has no function of that name.
            InvalidMessageError: the arguments or the result cannot be sent, are too large, or do not fit.
            RpcTimeoutError: the call did not end within `timeout` seconds, by default the agent's timeout.
            RpcOverloadedError: too much is under way, here or at `dst`; nothing was run.
            RpcPeerLostError: `dst` was lost during the call.
            RpcNoConnectionError: `dst` was lost before, or this agent is closed; nothing was sent.
        """
        return self._client.wait(self.rpc_async(dst, name, *args, timeout=timeout, **kwargs))

    def rpc_async(
        self, dst: int | str, name: str, /, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> RpcFuture:
        """Begin a call as `rpc_sync` does, and return a future at once. It may also be awaited or cancelled."""
        if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError("name", name, "must be the name of a registered function")
        return self._client.call(self._rank_of(dst), name, args, kwargs, self._client.seconds(timeout))

    def remote(self, dst: int | str, name: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> RRef:
        """Begin a call whose result stays on `dst`, and return a reference to the result at once."""
        peer = self._rank_of(dst)
        seconds = self._client.seconds(timeout)
        rref = self._references.new(peer)
        number = rref._name.number  # pyright: ignore[reportPrivateUsage]
        self._references.created(rref, self._client.call(peer, name, args, kwargs, seconds, number))
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
        """Call `name(item)` for each of `items` on the other ranks, and return the results in the order of `items`.

        Each worker gets its next item when it has finished one, so faster workers do more. Items of a worker that is
        lost go to the others, so an item may run twice.

        Args:
            name: the function, which every worker must have.
            items: one argument per call.
            workers: ranks or names to call, by default all other ranks.
            timeout: seconds per call.
            ahead: how many items each worker has at a time.
            progress: called after each item with a `MapProgress`.

        Raises what a call raised, and cancels the others; `RpcPeerLostError` if no worker is left.
        """
        if isinstance(workers, str):
            raise InvalidArgumentError("workers", workers, "must be a list of ranks or names")
        others = [peer for peer in range(self.world_size) if peer != self.rank] or [self.rank]
        chosen = others if workers is None else list(dict.fromkeys(self._rank_of(one) for one in workers))
        if not chosen or not isinstance(ahead, int) or ahead < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError("workers", chosen, "must have at least one worker, and ahead must be at least 1")
        seconds = self._client.seconds(timeout)

        def call(peer: int, item: Any) -> RpcFuture:
            return self._client.call(peer, name, (item,), {}, seconds)

        return run_map(call, list(items), [peer for peer in chosen if self.is_alive(peer)] or chosen, ahead, progress)

    def is_alive(self, dst: int | str) -> bool:
        """Return whether `dst` can be called: as far as is known it has neither died nor closed its agent."""
        return self._network.peer_links[self._rank_of(dst)].is_open and self._network.closed is None

    def _rank_of(self, dst: int | str) -> int:
        if isinstance(dst, str):
            if dst not in self.names:
                raise InvalidArgumentError("dst", dst, f"unknown name; {did_you_mean(dst, self.names)}")
            return self.names.index(dst)
        if not isinstance(dst, int) or isinstance(dst, bool) or not 0 <= dst < self.world_size:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidRankError(dst, self.world_size, name="dst")
        return dst

    # --- what arrives, in the agent's thread or that of a caller that leads ---------------------------------------

    def _admit(self, link: PeerLink, head: Head) -> bool:
        # From here on this rank holds the references, whether it takes the message or not.
        references: list[object] = [RRef(self._references, name, link.peer) for name in head.references]
        if head.kind is Kind.REQUEST:
            return self._serving.admit(link, head, references)
        return self._client.admit(link.peer, head, references)

    def _on_event(self, link: PeerLink, event: Event) -> None:
        if isinstance(event, Message):
            (self._serving if event.kind is Kind.REQUEST else self._client).take(link.peer, event)
        elif isinstance(event, Count | Lost):
            wrong = self._references.hear(event, link.peer)
            if wrong:
                link.mark_broken(wrong)
        elif isinstance(event, Cancelled):
            self._serving.cancel(link.peer, event.call)
        else:
            link.mark_broken("it closed its agent")

    def _on_lost(self, peer: int) -> None:
        making = self._serving.lost(peer)
        self._client.lost(peer)
        self._references.lost(peer, making)

    def _expire(self, now: float) -> float:
        due = self._client.calls.expire(now)
        return min(due, now + _LETS_GO) if self._references.work() else due

    # --- state ----------------------------------------------------------------------------------------------------

    def stats(self) -> RpcStats:
        """Return what is under way."""
        return RpcStats(
            len(self._client.calls),
            self._serving.calls,
            self._serving.pool.queued,
            self._serving.held,
            len(self._references.owned),
            sum(link.inbound.arriving for link in self._network.links.values() if link.is_open),
        )

    def join(self, timeout: float | None = None) -> bool:
        """Serve until every other rank has closed its agent or is lost: for a rank that only answers.

        Return False if `timeout` seconds pass first; without a timeout, wait as long as it takes.
        """
        if timeout is not None:
            check_timeout(timeout)
        return self._network.all_lost.wait(timeout)

    def close(self) -> None:
        """Stop serving and disconnect. Idempotent; never raises. Calls under way end with `RpcPeerLostError`, here and
        at the other ranks."""
        self._close(CLOSED, says_goodbye=True)

    def drop(self) -> None:
        """End without a goodbye, as a killed process does. For fault injection."""
        self._close("this agent was dropped on purpose", says_goodbye=False)

    def _close(self, reason: str, *, says_goodbye: bool) -> None:
        network = self._network
        with network.closing:
            if network.is_over:
                return
            network.closed = CLOSED
            if not says_goodbye:
                network.stop()
            self._client.calls.fail(None, reason)
            self._serving.close()
            self._references.close()
            if says_goodbye:
                network.leave()
            network.all_lost.set()
            network.is_over = True  # last: after an interrupt, closing begins again

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RpcAgent {self.name}, rank {self.rank} of {self.world_size}>"


__all__ = ["MapProgress", "RRef", "RpcAgent", "RpcFuture", "RpcStats", "ServedCall"]
