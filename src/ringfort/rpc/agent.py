"""`RpcAgent`: call a function on another rank, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ringfort.backends.base import Backend
from ringfort.config import RpcConfig, check_timeout
from ringfort.context import DistributedContext
from ringfort.errors import InvalidArgumentError, InvalidRankError
from ringfort.rpc import setup
from ringfort.rpc.calls import RpcFuture
from ringfort.rpc.exchange import Exchange, RpcStats
from ringfort.rpc.functions import Function
from ringfort.rpc.mapping import MapProgress, run_map
from ringfort.rpc.references import RRef
from ringfort.rpc.serving import ServedCall, current

if TYPE_CHECKING:
    from typing_extensions import Self

F = TypeVar("F", bound=Callable[..., Any])


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
        formed = setup.connect(context, self.name, self.config.max_message_bytes, self.timeout)
        self.names: tuple[str, ...] = tuple(formed.names)
        """The names of all ranks."""
        self._exchange = Exchange(self.rank, self.config, formed, self.timeout)

    # --- functions ------------------------------------------------------------------------------------------------

    def register(self, name: str, fn: Callable[..., Any], *, raw: bool = False) -> None:
        """Lets others call `fn` as `name`. It may be plain or async; its annotations are checked before it runs. With
        `raw` it takes one `bytes` and returns one, and nothing is checked. A name may be registered anew.

        Raises `InvalidArgumentError` for what cannot be called or has annotations that cannot be checked.
        """
        self._exchange.serving.functions[name] = Function(name, fn, raw=raw)

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
        self._exchange.check_open()
        return self._exchange.serving.run_one(timeout)

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
        return self._exchange.wait(self.rpc_async(dst, name, *args, timeout=timeout, **kwargs))

    def rpc_async(
        self, dst: int | str, name: str, /, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> RpcFuture:
        """As `rpc_sync`, but returns a future at once, which may also be awaited or cancelled."""
        if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError("name", name, "must be the name of a function")
        return self._exchange.call(self._rank_of(dst), name, args, kwargs, self._exchange.seconds(timeout))

    def remote(self, dst: int | str, name: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> RRef:
        """As `rpc_async`, but the result stays with `dst`: returns a reference to it at once."""
        peer = self._rank_of(dst)
        seconds = self._exchange.seconds(timeout)
        rref = self._exchange.references.new(peer)
        keep = rref._name.number  # pyright: ignore[reportPrivateUsage]
        self._exchange.references.created(rref, self._exchange.call(peer, name, args, kwargs, seconds, keep))
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
        seconds = self._exchange.seconds(timeout)
        call: Callable[[int, Any], RpcFuture] = lambda peer, item: self._exchange.call(  # noqa: E731
            peer, name, (item,), {}, seconds
        )
        return run_map(call, list(items), [peer for peer in chosen if self.is_alive(peer)] or chosen, ahead, progress)

    def is_alive(self, dst: int | str) -> bool:
        """Whether `dst` can be called: it has neither died nor closed its agent, as far as is known."""
        return self._exchange.is_alive(self._rank_of(dst))

    def _rank_of(self, dst: int | str) -> int:
        if isinstance(dst, str):
            if dst not in self.names:
                raise InvalidArgumentError("dst", dst, f"is no name of a rank; they are {', '.join(self.names)}")
            return self.names.index(dst)
        if not isinstance(dst, int) or isinstance(dst, bool) or not 0 <= dst < self.world_size:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidRankError(dst, self.world_size, name="dst")
        return dst

    # --- life -----------------------------------------------------------------------------------------------------

    def stats(self) -> RpcStats:
        """What is under way."""
        return self._exchange.stats()

    def join(self, timeout: float | None = None) -> bool:
        """Serves until every other rank has closed its agent or is lost: for a rank that only answers. False if
        `timeout` seconds pass first; without one it waits as long as it takes."""
        if timeout is not None:
            check_timeout(timeout)
        return self._exchange.all_gone.wait(timeout)

    def close(self) -> None:
        """Stops serving and leaves. Calls under way end: here and at the others with `RpcPeerLostError`. May be called
        twice; never raises."""
        self._exchange.close()

    def drop(self) -> None:
        """Ends without a word, as a killed process does. For fault injection."""
        self._exchange.drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RpcAgent {self.name}, rank {self.rank} of {self.world_size}>"


__all__ = ["MapProgress", "RRef", "RpcAgent", "RpcFuture", "RpcStats", "ServedCall"]
