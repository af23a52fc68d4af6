"""`Serving`: what this rank does for others. Requests in, functions run, responses out."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from contextvars import ContextVar
from typing import Any

from ringfort.config import RpcConfig
from ringfort.errors import InvalidMessageError, ProtocolError
from ringfort.rpc import requests, values
from ringfort.rpc.calls import RpcFuture
from ringfort.rpc.functions import Function
from ringfort.rpc.link import PeerLink
from ringfort.rpc.outbound import Outgoing
from ringfort.rpc.pool import Pool
from ringfort.rpc.protocol import Head, Kind, Message, Reference, pack_cancel
from ringfort.rpc.references import References
from ringfort.transport.locks import Thread

current: ContextVar[ServedCall | None] = ContextVar("ringfort_rpc_call", default=None)
"""The call that the current thread or task works on."""
_PATIENCE = 2.0
"""Seconds that async functions have to end when the agent closes."""


class ServedCall:
    """A call that this rank works on, as the function that is called sees it. See `RpcAgent.current_call`."""

    def __init__(self, link: PeerLink, number: int, size: int, references: list[object]) -> None:
        self.link = link
        self.number = number
        self.size = size
        """Bytes held for it: those of the request, then those of the response."""
        self.references = references
        self.message: Message | None = None
        """The request, from when it is complete until the function runs."""
        self.request: requests.ReceivedRequest | None = None
        self.depth = 0
        self.deadline = float("inf")
        self.keep: Reference | None = None
        self.children: set[RpcFuture] = set()
        self.is_running = False
        self.stop: Callable[[], object] | None = None
        """Ends the task of an async function."""
        self.response: Outgoing | None = None
        self._is_cancelled = False

    @property
    def peer(self) -> int:
        """The rank that called."""
        return self.link.peer

    @property
    def time_left(self) -> float:
        """Seconds until the caller gives up."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for the result: the caller gave up, is lost, or its timeout has passed."""
        return self._is_cancelled or time.monotonic() >= self.deadline

    def check(self) -> None:
        """Raise `concurrent.futures.CancelledError` if nobody waits for the result. For long functions."""
        if self.is_cancelled:
            raise CancelledError("The caller has given up")

    def cancel(self) -> None:
        """Mark the call as given up, and give up the calls that were made for it."""
        self._is_cancelled = True
        if self.stop is not None:
            self.stop()
        for child in tuple(self.children):
            child.cancel()


class Serving:
    """Takes requests, runs them, and sends the results."""

    def __init__(self, name: str, config: RpcConfig, references: References) -> None:
        self.functions: dict[str, Function] = {}
        self._config = config
        self._references = references
        self.pool = Pool(f"{name}-worker", config.workers, config.max_queued, self._run)
        self._name = name
        self._calls: defaultdict[int, dict[int, ServedCall]] = defaultdict(dict)
        """By the rank that calls, then by the number of the call."""
        self._held: Counter[int] = Counter()
        """Bytes of requests and responses, by rank."""
        self._lock = threading.Lock()
        self._tasks: asyncio.AbstractEventLoop | None = None
        self._tasks_thread: threading.Thread | None = None
        self._is_over = False

    # --- requests in, in the agent's thread or that of a caller that leads ----------------------------------------

    def admit(self, link: PeerLink, head: Head, references: list[object]) -> bool:
        """Return whether there is room for a request that begins. If not, tell the caller why."""
        calls, held = self._calls[link.peer], self._held[link.peer]
        if head.call in calls:
            raise ProtocolError(f"Invalid frame: call {head.call} begins twice")
        refusal = self._refusal(head.size, held, len(calls))
        if refusal is not None:
            link.post(Outgoing(Message(Kind.ERROR, head.call, values.Encoded(refusal).buffers)))
            return False
        with self._lock:
            if not self._is_over:
                calls[head.call] = ServedCall(link, head.call, head.size, references)
                self._held[link.peer] += head.size
            return not self._is_over

    def _refusal(self, size: int, held: int, calls: int) -> requests.Failure | None:
        """Return why there is no room for a request of `size` bytes of a rank that has `calls` with `held` bytes."""
        if size > (most := self._config.max_message_bytes):
            return requests.invalid(f"a request of {size} bytes, where max_message_bytes is {most}")
        if held + size > (most := self._config.max_held_bytes):
            return requests.overloaded(f"it holds {held} bytes of calls from this rank, and max_held_bytes is {most}")
        if calls >= 2 * (most := self._config.max_in_flight):  # twice: the caller knows already that some have ended
            return requests.overloaded(f"it works on {calls} calls from this rank, and max_in_flight is {most}")
        return None

    def take(self, peer: int, message: Message) -> None:
        """Run a request that is complete."""
        call = self._calls[peer].get(message.call)
        if call is None:  # given up meanwhile
            return
        call.message = message
        try:
            request = call.request = requests.read_request(message.buffers[0])
        except InvalidMessageError as exc:
            self._end(call, requests.invalid(exc))
            return
        call.depth = request.depth
        call.deadline = time.monotonic() + request.timeout
        if request.keep:
            call.keep = Reference(self._references.rank, peer, request.keep)
            if self._references.owned.is_full_for(peer):
                why = f"it keeps max_references={self._references.owned.most} values for this rank"
                self._end(call, requests.overloaded(why))
                return
        if request.name == requests.FETCH:
            self._fetch(call, message, request)
        elif not self.pool.submit(call):
            why = f"max_queued={self.pool.queued} requests wait for {self._config.workers} workers"
            self._end(call, requests.overloaded(why))

    def cancel(self, peer: int, number: int) -> None:
        """The caller has given up."""
        call = self._calls[peer].get(number)
        if call is None:
            return
        call.cancel()
        if call.response is not None:
            call.response.withdrawn = True
            call.link.post(pack_cancel(number, of_response=True))
        elif not call.is_running and call.keep is None:
            self._forget(call)

    def lost(self, peer: int) -> set[Reference]:
        """Give up the calls of a rank that is lost. Return the values that are still being made."""
        calls = tuple(self._calls[peer].values())
        for call in calls:
            call.cancel()
            if call.keep is None:
                self._forget(call)
        return {call.keep for call in calls if call.keep is not None}

    # --- running --------------------------------------------------------------------------------------------------

    def _run(self, call: ServedCall) -> None:
        """In a worker."""
        message, request = call.message, call.request
        if message is None or request is None or (call.is_cancelled and call.keep is None):
            self._forget(call)
            return
        call.is_running = True
        call.message = call.request = None  # the function has its own hold on the arguments
        token = current.set(call)
        try:
            function = self.functions.get(request.name)
            if function is None:
                self._end(call, requests.Failure("function", message=request.name, known=sorted(self.functions)))
                return
            try:
                args, kwargs = function.bind(*self._arguments(call, message, request))
            except InvalidMessageError as exc:
                self._end(call, requests.invalid(exc))
                return
            finally:
                del message, request
            if function.is_async:
                self._spawn(call, function, function.fn(*args, **kwargs))
                return
            try:
                result = function.check_result(function.fn(*args, **kwargs))
            except BaseException as exc:  # whatever it is: the caller is told, the worker goes on
                result = requests.raised(exc)
            del args, kwargs
            self._end(call, result)
        finally:
            current.reset(token)

    @staticmethod
    def _arguments(
        call: ServedCall, message: Message, request: requests.ReceivedRequest
    ) -> tuple[list[Any], dict[str, Any]]:
        references, call.references = call.references, []
        args = values.decode(message.buffers, references, request.args, list[Any])
        return args, values.decode(message.buffers, references, request.kwargs, dict[str, Any])

    def _spawn(self, call: ServedCall, function: Function, coroutine: Coroutine[Any, Any, Any]) -> None:
        loop = self._task_loop()

        async def work() -> None:
            task = asyncio.current_task()
            assert task is not None
            call.stop = lambda: loop.call_soon_threadsafe(task.cancel)
            try:
                if call.is_cancelled:
                    coroutine.close()
                    raise asyncio.CancelledError
                result = function.check_result(await coroutine)
            except BaseException as exc:
                result = requests.raised(exc)
            self._end(call, result)

        asyncio.run_coroutine_threadsafe(work(), loop)  # with a copy of this context, and so with `current`

    def _task_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._tasks is None:
                loop = asyncio.new_event_loop()
                self._tasks_thread = Thread(loop.run_forever, name=f"{self._name}-tasks")
                self._tasks_thread.start()
                self._tasks = loop
            return self._tasks

    def _fetch(self, call: ServedCall, message: Message, request: requests.ReceivedRequest) -> None:
        """Answer with the value of a reference when there is one. No worker waits for it."""
        call.is_running, call.message = True, None
        try:
            creator, number = self._arguments(call, message, request)[0]
            if not isinstance(creator, int) or not isinstance(number, int):
                raise InvalidMessageError("Malformed request: a reference must be two numbers")
        except ValueError as exc:  # an `InvalidMessageError` is one
            self._end(call, requests.invalid(exc))
            return
        reference = Reference(self._references.rank, creator, number)
        outcome = self._references.owned.outcome(reference, call.peer)
        call.stop = lambda: self._references.owned.forget(reference)
        outcome.add_done_callback(lambda done: self._end(call, done.result()))

    # --- responses out --------------------------------------------------------------------------------------------

    def _end(self, call: ServedCall, result: Any) -> None:
        """Keep what is to be kept, and answer if somebody waits. `result` is a value or a `Failure`."""
        if call.keep is not None:
            self._references.owned.fulfil(call.keep, result)
            result = result if isinstance(result, requests.Failure) else None
        if self._calls[call.peer].get(call.number) is not call or call.is_cancelled or not call.link.is_open:
            self._forget(call)
            return
        kind = Kind.ERROR if isinstance(result, requests.Failure) else Kind.RESPONSE
        try:
            encoded, most = values.Encoded(result, self._references.name_of), self._config.max_message_bytes
            if encoded.size > most:
                raise InvalidMessageError(f"The result has {encoded.size} bytes; max_message_bytes is {most}")
        except InvalidMessageError as exc:
            kind, encoded = Kind.ERROR, values.Encoded(requests.invalid(exc))
        names = encoded.references
        self._references.give(names, call.peer)
        with self._lock:  # the request is gone by now, whatever becomes of the response
            self._held[call.peer] += encoded.size - call.size
            call.size = encoded.size
        outgoing = Outgoing(Message(kind, call.number, encoded.buffers, names))

        def done() -> None:
            if not outgoing.begun:
                self._references.give(names, call.peer, -1)
            self._forget(call)

        outgoing.done = done
        call.response = outgoing
        call.link.post(outgoing)

    def _forget(self, call: ServedCall) -> None:
        with self._lock:
            calls = self._calls[call.peer]
            if calls.get(call.number) is call:
                del calls[call.number]
            # Nothing of it must wait for the garbage collector: a reference that it holds keeps a value.
            call.message = call.request = call.response = call.stop = None
            call.references = []
            self._held[call.peer] -= call.size
            call.size = 0

    # --- state ----------------------------------------------------------------------------------------------------

    @property
    def calls(self) -> int:
        """How many requests are arriving, queued, running or being answered."""
        return sum(map(len, tuple(self._calls.values())))

    @property
    def held(self) -> int:
        """Bytes that are held for all other ranks."""
        return sum(tuple(self._held.values()))

    def close(self) -> None:
        """Give up what is under way."""
        with self._lock:
            self._is_over = True
            loop = self._tasks
        for calls in tuple(self._calls.values()):
            for call in tuple(calls.values()):
                call.cancel()
        self.pool.close()
        if loop is not None and self._tasks_thread is not None:
            asyncio.run_coroutine_threadsafe(_end_tasks(), loop).result(_PATIENCE)
            loop.call_soon_threadsafe(loop.stop)
            self._tasks_thread.join(_PATIENCE)
            loop.close()


async def _end_tasks() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=_PATIENCE / 2) if tasks else None
