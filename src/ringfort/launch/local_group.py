"""`local`: ranks as processes behind a notebook or a script.

The ranks are new processes, not forks: a notebook has threads, and often CUDA, and neither survives a fork. They are
not started by `multiprocessing` either: it pickles, and it imports the main script again, which a notebook does not
have. Functions travel by name or as source (launch/function_source.py), values in msgpack.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any, NamedTuple

from ringfort.collectives import objects
from ringfort.config import check_timeout, check_world_size, is_set
from ringfort.errors import DistributedError, InvalidArgumentError, LocalRunError
from ringfort.launch import function_source, local_group_frames as frames
from ringfort.launch.failure_report import describe_exit, with_tail
from ringfort.launch.local_ranks import ONE_THREAD, rank_variables
from ringfort.launch.processes import LOCAL_REPORT_SECONDS, POLL_SECONDS, Child, Children

STOP_SECONDS = 2.0
"""How long a rank may take to end after Ctrl-C, for what it does in `finally`, before it is killed."""
SEND_SECONDS = 30.0
"""How long a rank may take to read a call. It does nothing else then, so only a stopped process takes longer."""
OTHERS_SECONDS = 0.2
"""How long the output of the other ranks is still shown after one has failed."""

_own_rank: int | None = None
"""The rank of this process in a group of `local`; None in the notebook."""


def local(n: int, *, timeout: float | None = None, variables: Mapping[str, str] | None = None) -> LocalGroup:
    """Start `n` ranks as processes of this machine, and return the group that runs functions on them.

    `timeout` is that of `ringfort.init`: seconds for forming the group and for every call. `variables` are added to the
    environment of every rank. Each rank gets its share of the cores for BLAS and OpenMP, unless OMP_NUM_THREADS is set.

    Raises:
        InvalidWorldSizeError: `n` is not a whole number of at least 1.
        DistributedError: This process is itself a rank of such a group, or the ranks cannot be started.

    Examples:
        >>> with ringfort.local(4) as group:
        ...     group.run(lambda ctx: ctx.rank)
        [0, 1, 2, 3]
    """
    return LocalGroup(n, timeout=timeout, variables=variables)


def _program() -> str:
    """What to call the program when its ranks are watched. A notebook has no file."""
    return Path(getattr(sys.modules["__main__"], "__file__", None) or "notebook").name


def mark_as_rank(rank: int) -> None:
    """Note that this process is a rank of a group of `local`."""
    global _own_rank  # noqa: PLW0603  # a fact about the process
    _own_rank = rank


class _Rank(NamedTuple):
    incoming: frames.Frames
    number: int


class _RemoteTraceback(Exception):  # noqa: N818  # only shown as the cause of an error
    """The traceback of a rank, as text."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class LocalGroup:
    """The ranks that `ringfort.local` has started. A context manager; without `with`, call `close` at the end.

    For use by one thread at a time.
    """

    def __init__(self, n: int, *, timeout: float | None = None, variables: Mapping[str, str] | None = None) -> None:
        """See `ringfort.local`."""
        check_world_size(n)
        if timeout is not None:
            check_timeout(timeout)
        if _own_rank is not None:
            raise DistributedError(
                f"This process is rank {_own_rank} of a local group already. Call ringfort.local() in the notebook or "
                "script, and use ctx in the function; ctx.sub_group() makes smaller groups."
            )
        self.world_size = n
        self._timeout = timeout
        self._variables = dict(variables or {})
        self._owner = os.getpid()
        self._is_closed = False
        self._is_running = False
        self._ranks: list[_Rank] = []
        self._children = Children()
        self._end = weakref.finalize(self, _end, self._owner, self._children, self._ranks)
        try:
            self._start()
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> LocalGroup:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The process id of each rank; empty after a failure, until the next `run` starts new ranks."""
        return [child.process.pid for child in self._children.children]

    def run(self, fn: Callable[..., Any], /, *args: Any, **keywords: Any) -> list[Any]:
        """Call `fn(ctx, *args, **keywords)` on every rank, and return a list of what the ranks return.

        `ctx` is the rank's `DistributedContext`. What a rank prints is printed here, with the rank in front. Arguments
        and results are None, bools, numbers, strings, bytes, lists, dicts and arrays (a tuple arrives as a list);
        `fn` and all that it uses are copied to the ranks, so a change that it makes to a global stays there.

        Raises:
            LocalRunError: A rank raised an exception or died; the message names it. All ranks are stopped, and the next
                `run` starts new ones. Ctrl-C does the same, and raises `KeyboardInterrupt`.
            InvalidArgumentError: The function or an argument cannot be sent; the message says what to change.
        """
        self._check_open()
        call = _encoded_call(fn, args, keywords)
        self._is_running = True
        try:
            if not self._ranks:
                self._start()
            self._send(call)
            return [answer["result"] for answer in self._answers()]
        except KeyboardInterrupt:
            self._stop(SIGINT)
            raise
        except BaseException:
            self._stop(SIGTERM)
            raise
        finally:
            self._is_running = False

    def close(self) -> None:
        """End all ranks. Idempotent."""
        if os.getpid() != self._owner:
            return  # a fork: the ranks are its parent's
        self._is_closed = True
        for rank in self._ranks:
            rank.incoming.connection.shutdown(socket.SHUT_RDWR)  # ranks end by themselves, and say goodbye
        self._stop(0)
        self._end()

    def _check_open(self) -> None:
        if os.getpid() != self._owner:
            raise DistributedError("This local group belongs to the process that forked this one; call local() here.")
        if self._is_closed:
            raise DistributedError("This local group is closed. Make another one with ringfort.local().")
        if self._is_running:
            raise DistributedError("Another run() of this local group has not ended yet. Wait for it, or interrupt it.")

    def _start(self) -> None:
        try:
            with socket.create_server(("127.0.0.1", 0), backlog=max(16, self.world_size)) as listener:
                for rank in range(self.world_size):
                    self._start_rank(rank, listener)
            path = [entry or str(Path.cwd()) for entry in sys.path]
            self._send(objects.encode({"path": path, "program": _program()}, function_source.MAX_BYTES))
            self._answers()
        except BaseException:
            self._stop(SIGTERM)
            raise

    def _start_rank(self, rank: int, listener: socket.socket) -> None:
        here, there = socket.socketpair()
        self._ranks.append(_Rank(frames.Frames(here), rank))
        threads = {} if is_set("OMP_NUM_THREADS") else dict.fromkeys(ONE_THREAD, str(_share(self.world_size)))
        place = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(self.world_size)}
        variables = {**threads, **rank_variables(rank, self.world_size, listener), **place, **self._variables}
        command = [sys.executable, "-u", "-m", "ringfort.launch.local_group_rank", str(there.fileno())]
        command.append("" if self._timeout is None else str(self._timeout))
        with there:
            passed = [there.fileno(), *([listener.fileno()] if rank == 0 else [])]
            self._children.start(rank, command, variables, pass_fds=passed)

    def _send(self, data: bytes) -> None:
        """Send a call to every rank. A rank that is gone is found by `_answers`."""
        for rank in self._ranks:
            connection = rank.incoming.connection
            connection.settimeout(SEND_SECONDS)
            try:
                frames.send(connection, data)
            except TimeoutError as exc:
                raise LocalRunError(rank.number, "", f"did not read its call within {SEND_SECONDS:.0f} s") from exc
            except OSError:
                continue
            finally:
                connection.settimeout(None)

    def _answers(self) -> list[dict[str, Any]]:
        """Wait for the answer of every rank, and show what the ranks print. Raises `LocalRunError`."""
        answers: dict[int, dict[str, Any]] = {}
        pending = {rank.incoming.connection: rank for rank in self._ranks}
        closed: dict[int, float] = {}
        failed_at = None
        while len(answers) < self.world_size or failed_at is not None:
            for connection in self._wait([*pending]):
                rank = pending[connection]
                try:
                    arrived = rank.incoming.arrived()
                except EOFError:
                    closed[rank.number] = time.monotonic()  # its exit code, which comes a moment later, says why
                    del pending[connection]
                    continue
                for answer in arrived:
                    answers[rank.number] = answer
                    del pending[connection]
            now = time.monotonic()
            if failure := self._failure(answers, {rank for rank, at in closed.items() if now >= at + STOP_SECONDS}):
                failed_at = now if failed_at is None else failed_at
                # The cause of a lost peer is that peer's own failure, which comes a moment later.
                grace = LOCAL_REPORT_SECONDS if failure.is_victim else OTHERS_SECONDS
                if now >= failed_at + grace:
                    self._show(is_last=True)
                    raise failure.error from failure.cause
        self._show(is_last=True)
        return [answers[rank] for rank in range(self.world_size)]

    def _wait(self, connections: Sequence[socket.socket]) -> list[socket.socket]:
        """Wait until a rank answers or prints, show what is printed, and return those that have answered."""
        poller = select.poll()
        streams = [stream for child in self._children.children for stream in child.streams if not stream.closed]
        by_number = {connection.fileno(): connection for connection in connections}
        for number in (*by_number, *(stream.fileno() for stream in streams)):
            poller.register(number, select.POLLIN)
        ready = [number for number, _ in poller.poll(1000 * POLL_SECONDS)]
        self._show()
        return [by_number[number] for number in ready if number in by_number]

    def _show(self, *, is_last: bool = False) -> None:
        """Print the lines that the ranks have written; at the end of a call, also those without an end."""
        for output in self._children.poll(0.0):
            self._print(output.child, output.is_error, output.lines())
        for child in self._children.children if is_last else ():
            for is_error in (False, True):
                rest, child.partial[is_error] = child.partial[is_error], b""
                self._print(child, is_error, [rest] if rest else [])

    def _print(self, child: Child, is_error: bool, lines: Sequence[bytes]) -> None:
        stream = sys.stderr if is_error else sys.stdout
        width = len(str(self.world_size - 1))
        for line in lines:
            stream.write(f"[{child.number:>{width}}] {line.decode(errors='replace')}\n")
        child.keep(lines)

    def _failure(self, answers: Mapping[int, dict[str, Any]], silent: Set[int]) -> _Failure | None:
        """The failure that caused the others, as far as it is known. Nothing more is heard from `silent` ranks."""
        found = [_Failure.of_answer(rank, answer) for rank, answer in answers.items() if "type_name" in answer]
        for child in self._children.children:
            if child.number not in answers and (child.is_over or child.number in silent):
                what = describe_exit(child.exit_code or 0) if child.is_over else "closed its connection to this process"
                message = with_tail(what, child.tail)
                found.append(_Failure(LocalRunError(child.number, "", message), None, is_victim=False))
        return min(found, key=lambda failure: (failure.is_victim, failure.error.rank), default=None)

    def _stop(self, signum: int) -> None:
        """End every rank, and show its last output."""
        try:
            for output in self._children.finish(STOP_SECONDS, signum):
                self._print(output.child, output.is_error, output.lines())
        finally:
            for rank in self._ranks:
                rank.incoming.connection.close()
            self._ranks.clear()
            for child in [*self._children.children]:
                if child.is_over:
                    self._children.forget(child)


class _Failure(NamedTuple):
    error: LocalRunError
    cause: BaseException | None
    is_victim: bool

    @classmethod
    def of_answer(cls, rank: int, answer: Mapping[str, Any]) -> _Failure:
        """The failure of a rank that has reported it."""
        error = LocalRunError(rank, answer["type_name"], answer["message"], answer["traceback"])
        cause = _RemoteTraceback(answer["traceback"]) if answer["traceback"] else None
        return cls(error, cause, answer["is_victim"])


def _encoded_call(fn: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]) -> bytes:
    steps = function_source.pack(fn)
    for name, value in (*enumerate(args), *keywords.items()):
        try:
            objects.encode(value, function_source.MAX_BYTES)
        except InvalidArgumentError as exc:
            which = f"args[{name}]" if isinstance(name, int) else name
            why = (
                "cannot be sent to the ranks; pass numbers, strings, lists, dicts or arrays, or make it in the function"
            )
            raise InvalidArgumentError(which, type(value).__name__, why) from exc
    call = {"steps": steps, "args": list(args), "keywords": dict(keywords)}
    return objects.encode(call, function_source.MAX_BYTES)


def _share(ranks: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)


def _end(owner: int, children: Children, ranks: list[_Rank]) -> None:
    """What is done at the latest when the group is dropped or the interpreter ends, but not by a fork of it."""
    if os.getpid() != owner:
        return
    for rank in ranks:
        rank.incoming.connection.close()
    children.close()
