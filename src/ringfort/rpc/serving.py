"""What this rank does for others: requests in, functions run, responses out."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextvars import ContextVar
from typing import Any

from ringfort.config import RpcConfig
from ringfort.errors import FunctionNotFoundError, InvalidMessageError
from ringfort.rpc import values
from ringfort.rpc.calls import RpcFuture
from ringfort.rpc.framing import FETCH, Arrived, Failed, overloaded, raised, read_request, refusal
from ringfort.rpc.functions import Function
from ringfort.rpc.inbound import Head
from ringfort.rpc.link import Line
from ringfort.rpc.outbound import Outgoing
from ringfort.rpc.pool import Pool
from ringfort.rpc.protocol import Kind, Message, Reference, pack_cancel
from ringfort.rpc.references import References
from ringfort.transport.locks import Thread

current: ContextVar[ServedCall | None] = ContextVar("ringfort_rpc_call", default=None)
"""The call that this thread or task works on."""


class ServedCall:
    """A call that this rank works on, as its function sees it."""

    def __init__(self, line: Line, number: int, message: Message, references: list[object]) -> None:
        self.line = line
        self.number = number
        self.message: Message | None = message
        self.request: Arrived | None = None
        self.references = references
        self.size = message.size
        self.depth = 0
        self.deadline = float("inf")
        self.keep: Reference | None = None
        self.children: set[RpcFuture] = set()
        self.stop: Callable[[], object] | None = None
        """How to end the task of an async function."""
        self.response: Outgoing | None = None
        self._is_cancelled = False

    @property
    def peer(self) -> int:
        """The rank that called."""
        return self.line.peer

    @property
    def time_left(self) -> float:
        """Seconds until the caller gives up."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def is_cancelled(self) -> bool:
        """The caller has given up or is gone, or its time is over: nobody waits for the result."""
        return self._is_cancelled or time.monotonic() >= self.deadline

    def check(self) -> None:
        """Raises `concurrent.futures.CancelledError` if nobody waits for the result any more. For long functions."""
        if self.is_cancelled:
            raise CancelledError("the caller has given up")

    def cancel(self) -> None:
        """The caller has given up: so do the calls that were made for it."""
        self._is_cancelled = True
        if self.stop is not None:
            self.stop()
        for child in tuple(self.children):
            child.cancel()


class Serving:
    """Takes requests, has them run, and sends what came out."""

    def __init__(self, name: str, config: RpcConfig, references: References) -> None:
        self.functions: dict[str, Function] = {}
        self._config = config
        self._references = references
        self._pool = Pool(f"{name}-worker", config.workers, config.max_queued, self._run)
        self._name = name
        self._calls: dict[tuple[int, int], ServedCall] = {}
        self._held: dict[int, int] = {}
        self._open: dict[int, int] = {}
        self._lock = threading.Lock()
        self._tasks: asyncio.AbstractEventLoop | None = None
        self._tasks_thread: threading.Thread | None = None
        self._is_over = False

    # --- requests in, in the agent's thread -----------------------------------------------------------------------

    def admit(self, line: Line, head: Head) -> bool:
        """Whether there is room for a request; if not, the caller is told why."""
        held, calls = self._held.get(line.peer, 0), self._open.get(line.peer, 0)
        if head.size > self._config.max_message_bytes:
            why = f"a request of {head.size} bytes, where max_message_bytes is {self._config.max_message_bytes}"
            self._refuse(line, head.call, refusal(InvalidMessageError(why)))
        elif held + head.size > self._config.max_held_bytes:
            why = f"it holds {held} bytes of calls from this rank, and max_held_bytes is {self._config.max_held_bytes}"
            self._refuse(line, head.call, overloaded(why))
        elif calls >= 2 * self._config.max_in_flight:  # twice, for of some the caller knows already that they ended
            why = f"it works on {calls} calls from this rank, and max_in_flight is {self._config.max_in_flight}"
            self._refuse(line, head.call, overloaded(why))
        else:
            self._hold(line.peer, head.size)
            return True
        return False

    def take(self, line: Line, message: Message, references: list[object]) -> None:
        """A whole request has come."""
        call = ServedCall(line, message.call, message, references)
        with self._lock:
            if self._is_over:
                return
            self._calls[line.peer, message.call] = call
            self._open[line.peer] = self._open.get(line.peer, 0) + 1
        try:
            request = call.request = read_request(message.buffers[0])
        except InvalidMessageError as exc:
            self._end(call, refusal(exc))
            return
        call.depth = request.depth
        call.deadline = time.monotonic() + request.timeout
        if request.keep:
            call.keep = Reference(self._references.rank, line.peer, request.keep)
            if self._references.is_full_for(line.peer):
                why = f"it keeps values for {self._references.most} references of this rank, which is max_references"
                self._end(call, overloaded(why))
                return
        if request.name == FETCH:
            self._fetch(call)
        elif not self._pool.submit(call):
            why = f"{self._pool.queued} requests wait for {self._config.workers} workers, which is max_queued"
            self._end(call, overloaded(why))

    def cancel(self, peer: int, number: int) -> None:
        """The caller has given up."""
        call = self._calls.get((peer, number))
        if call is None:
            return
        call.cancel()
        response = call.response
        if response is not None:  # no more of it is wanted
            response.withdrawn = True
            call.line.control(pack_cancel(number, of_response=True))
        elif call.message is not None and call.keep is None:
            call.message = None
            self._forget(call)

    def lost(self, peer: int) -> None:
        """Nobody is left to answer at `peer`."""
        for call in [call for (caller, _), call in tuple(self._calls.items()) if caller == peer]:
            call.cancel()
            if call.keep is None:
                call.message = None
                self._forget(call)

    # --- running --------------------------------------------------------------------------------------------------

    def _run(self, call: ServedCall) -> None:
        """In a worker."""
        message, request = call.message, call.request
        if message is None or request is None or (call.is_cancelled and call.keep is None):
            self._forget(call)
            return
        call.message = call.request = None  # the function has its own hold on the arguments
        token = current.set(call)
        try:
            try:
                function = self.functions.get(request.name)
                if function is None:
                    raise FunctionNotFoundError(request.name, sorted(self.functions))
                args, kwargs = self._arguments(call, message, request)
                args, kwargs = function.bind(args, kwargs)
            except (InvalidMessageError, FunctionNotFoundError) as exc:
                self._end(call, refusal(exc))
                return
            finally:
                del message, request
            if function.is_async:
                self._spawn(call, function, function.fn(*args, **kwargs))
                return
            try:
                result = function.check_result(function.fn(*args, **kwargs))
            except BaseException as exc:  # whatever it is: the caller is told, the worker goes on
                result = raised(exc)
            del args, kwargs
            self._end(call, result)
        finally:
            current.reset(token)

    @staticmethod
    def _arguments(call: ServedCall, message: Message, request: Arrived) -> tuple[list[Any], dict[str, Any]]:
        references, call.references = call.references, []
        args = values.decode(message.buffers, references, request.args, list[Any])
        return args, values.decode(message.buffers, references, request.kwargs, dict[str, Any])

    def run_one(self, timeout: float | None) -> bool:
        """Runs the next request in this thread."""
        return self._pool.run_one(timeout)

    def help_until(self, future: Future[Any]) -> bool:
        """In a worker: runs deeper requests until `future` is done. False elsewhere."""
        call = current.get()
        return call is not None and self._pool.help_until(future, call.depth)

    def _spawn(self, call: ServedCall, function: Function, coroutine: Coroutine[Any, Any, Any]) -> None:
        loop = self._task_loop()

        async def work() -> None:
            token = current.set(call)
            task = asyncio.current_task()
            assert task is not None
            call.stop = lambda: loop.call_soon_threadsafe(task.cancel)
            try:
                if call.is_cancelled:
                    coroutine.close()
                    raise asyncio.CancelledError
                result = function.check_result(await coroutine)
            except BaseException as exc:
                result = raised(exc)
            finally:
                current.reset(token)
            self._end(call, result)

        asyncio.run_coroutine_threadsafe(work(), loop)

    def _task_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._tasks is None:
                loop = asyncio.new_event_loop()
                self._tasks_thread = Thread(loop.run_forever, name=f"{self._name}-tasks")
                self._tasks_thread.start()
                self._tasks = loop
            return self._tasks

    # --- responses out --------------------------------------------------------------------------------------------

    def _fetch(self, call: ServedCall) -> None:
        """Answers with a reference's value when it has one. No worker waits for it."""
        message, call.message = call.message, None
        assert message is not None
        assert call.request is not None
        try:
            creator, number = self._arguments(call, message, call.request)[0]
            if not isinstance(creator, int) or not isinstance(number, int):
                raise InvalidMessageError("a reference is two numbers")
        except (InvalidMessageError, ValueError) as exc:
            self._end(call, refusal(InvalidMessageError(str(exc))))
            return
        reference = Reference(self._references.rank, creator, number)
        outcome = self._references.outcome(reference, call.peer)
        call.stop = lambda: self._references.forget(reference)

        def answer(done: Future[Any]) -> None:
            self._end(call, done.result())

        outcome.add_done_callback(answer)

    def _end(self, call: ServedCall, result: Any) -> None:
        """The call has come to its end: keeps what is to be kept and answers, if anybody waits."""
        if call.keep is not None:
            self._references.fulfil(call.keep, result)
            result = result if isinstance(result, Failed) else None
        if self._calls.get((call.peer, call.number)) is not call or call.is_cancelled or not call.line.is_open:
            self._forget(call)
            return
        give = self._references.giver(call.peer)
        kind, value = Kind.RESPONSE, result
        if isinstance(result, Failed):
            kind, value = Kind.ERROR, result.failure
        try:
            encoded = values.Encoded(value, give)
            if encoded.size > self._config.max_message_bytes:
                raise InvalidMessageError(
                    f"the result has {encoded.size} bytes, where max_message_bytes is {self._config.max_message_bytes}"
                )
        except InvalidMessageError as exc:
            give.undo()
            give = self._references.giver(call.peer)
            kind, encoded = Kind.ERROR, values.Encoded(refusal(exc).failure, give)
        # The request is gone by now, whatever becomes of the response.
        self._hold(call.peer, encoded.size - call.size)
        call.size = encoded.size
        outgoing = Outgoing(Message(kind, call.number, encoded.buffers, encoded.references))

        def done() -> None:
            if not outgoing.begun:
                give.undo()
            self._forget(call)

        outgoing.done = done
        call.response = outgoing
        call.line.post(outgoing)

    def _refuse(self, line: Line, number: int, why: Failed) -> None:
        encoded = values.Encoded(why.failure, self._references.giver(line.peer))
        line.post(Outgoing(Message(Kind.ERROR, number, encoded.buffers)))

    def _hold(self, peer: int, size: int) -> None:
        with self._lock:
            self._held[peer] = self._held.get(peer, 0) + size

    def release(self, peer: int, size: int) -> None:
        """A request that was admitted never became one."""
        self._hold(peer, -size)

    def _forget(self, call: ServedCall) -> None:
        with self._lock:
            if self._calls.get((call.peer, call.number)) is call:
                del self._calls[call.peer, call.number]
                self._open[call.peer] -= 1
            # Nothing of it must wait for the garbage collector: a reference that it holds is a value that is kept.
            call.message = call.request = call.response = call.stop = None
            call.references = []
            size, call.size = call.size, 0
            self._held[call.peer] = self._held.get(call.peer, 0) - size

    # --- state ----------------------------------------------------------------------------------------------------

    @property
    def calls(self) -> int:
        """Calls that this rank works on, or has queued, or whose response has not gone out."""
        return len(self._calls)

    @property
    def is_running(self) -> bool:
        """Whether a worker runs a function, or is about to."""
        return self._pool.is_running

    @property
    def queued(self) -> int:
        """Requests that wait for a worker."""
        return self._pool.queued

    def held(self) -> int:
        """Bytes that are held for all other ranks."""
        return sum(self._held.values())

    def close(self) -> None:
        """Gives up what is under way."""
        with self._lock:
            self._is_over = True
            calls, loop = list(self._calls.values()), self._tasks
        for call in calls:
            call.cancel()
        self._pool.close()
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


_PATIENCE = 2.0
"""Seconds that async functions have to end when the agent closes."""
