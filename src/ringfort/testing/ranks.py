"""`run_ranks`: one thread per rank; a hang becomes an error with the stack of each rank."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from ringfort.errors import DistributedError, InvalidArgumentError

RANKS_TIMEOUT = 60.0
"""Seconds. Longer than every timeout of a check, so that only a real hang reaches it."""
_LAST_CHANCE = 2.0
"""Seconds for ranks that hang to end after an abort, so that they do not pile up in a test run."""

T = TypeVar("T")
R = TypeVar("R")


class HangError(DistributedError, TimeoutError):
    """Ranks did not end in time. The message has the stack of each rank that still runs."""

    def __init__(self, timeout: float, stacks: dict[int, str]) -> None:
        where = "\n".join(f"rank {rank} is at:\n{stack}" for rank, stack in stacks.items())
        super().__init__(f"{len(stacks)} ranks have not ended after {timeout:g} s\n{where}")
        self.timeout = timeout
        self.stacks = stacks


def run_ranks(
    ranks: Sequence[T], program: Callable[[T], R], *, timeout: float = RANKS_TIMEOUT
) -> list[R | BaseException]:
    """Run `program` for each of `ranks` (backends, contexts, anything), each in a thread of its own.

    Returns what each call returned or raised. Raises `HangError` if one has not ended after `timeout` seconds; ranks
    that have a method `abort` are aborted first.
    """
    outcomes: dict[int, R | BaseException] = {}

    def run(index: int) -> None:
        try:
            outcomes[index] = program(ranks[index])
        except BaseException as exc:  # whatever it is, it is the outcome
            outcomes[index] = exc

    threads = [
        threading.Thread(target=run, args=(index,), name=f"rank-{index}", daemon=True) for index in range(len(ranks))
    ]
    for thread in threads:
        thread.start()
    _join(threads, timeout)
    stacks = {index: _stack(thread) for index, thread in enumerate(threads) if thread.is_alive()}
    if stacks:
        for rank in ranks:
            if isinstance(abort := getattr(rank, "abort", None), Callable):
                abort("the ranks hang")
        _join(threads, _LAST_CHANCE)
        raise HangError(timeout, stacks)
    return [outcomes[index] for index in range(len(ranks))]


def results(outcomes: Sequence[R | BaseException]) -> list[R]:
    """Return what each rank returned. If any raised, raise the most likely cause: an error that names no peer."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, DistributedError) and error.peer is not None)
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


def at_once(*actions: Callable[[], R], timeout: float = RANKS_TIMEOUT) -> list[R]:
    """Run `actions` at the same time, each in a thread. Returns their results; raises as `results` does."""
    if not actions:
        raise InvalidArgumentError("actions", actions, "nothing to run")
    return results(run_ranks(actions, lambda action: action(), timeout=timeout))


def _join(threads: Sequence[threading.Thread], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)  # pyright: ignore[reportPrivateUsage]
    return "".join(traceback.format_stack(frame)) if frame is not None else "  (it has just ended)\n"
