"""`own_trace()`: what this process writes down while it trains, for `ringfort top`, `ringfort dash` and others.

    trace = own_trace()
    with trace.blocked(Phase.DATA): ...    # or trace.time.add(Phase.DATA, seconds)
    trace.step_done(samples=64)            # writes the step, with the time of each phase since the step before
    trace.log({"loss": 0.3})
    trace.event("checkpoint", "step 100 was saved")

Nothing here raises for a full disk or a missing folder, and nothing waits: a display must never stop a training run.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from ringfort.config import launched_run, telemetry_folder
from ringfort.telemetry.folder import new_folder
from ringfort.telemetry.gradients import Gradients, Price
from ringfort.telemetry.records import MAX_NAME, MAX_TEXT, MAX_VALUES, Event, Header, Sent, Step, Values
from ringfort.telemetry.step_time import Blocked, Phase, Source, StepTime
from ringfort.telemetry.trace_file import SUFFIX, TraceWriter

_log = logging.getLogger(__name__)

OFF: Final = "off"
_MARK: Final = "_ringfort_steps"
"""The attribute that holds an object's count of steps. A WeakKeyDictionary would need hashable objects, and its
callback can swallow a KeyboardInterrupt."""
_SENT_EVERY: Final = 1.0
"""Seconds between two records of the bytes that were sent."""
_PEERS: Final = 16
"""Ranks in one record of the bytes that were sent."""
_CUT_NAMES: Final = 64
"""Names that are compared after they were cut."""
_KEPT_EVENTS: Final = 64
"""Events that are kept until the trace is opened."""

SentSource = Callable[[], tuple[Mapping[int, int], int] | None]
"""Returns the bytes that were sent since the start, by rank, and all bytes received; None if its owner is gone."""


class Trace:
    """The trace of one process. It is opened when the process takes part in a group (`describe`); until then steps are
    only counted. All methods may be called from any thread."""

    def __init__(self, folder: str | None = None, run: str = "") -> None:
        """`folder` is the launcher's, or `off`; by default the trace has a folder of its own. `run` is the launcher's
        name of the run."""
        self.step = 0
        """The latest step."""
        self.logged: set[str] = set()
        """The names of values that the program has logged."""
        self.folder: Path | None = None
        """Where the trace is; None before it is opened, and if it could not be."""
        self._told = folder
        self._is_own = False
        self._lock = threading.RLock()  # a handler of a signal may log
        self._writer: TraceWriter | None = None
        self._is_off = folder == OFF
        self._header = Header(os.getpid(), time.time(), program=_program(), run=encodable(run)[:64])
        self.time = StepTime()
        """Where the time of the current step goes."""
        self._is_begun = False
        """Whether it is known when the current step began."""
        self._thread = 0
        """The thread that makes the steps, once it is known."""
        self._samples = 0
        self._gradients = Gradients()
        self._waiting: list[Event] = []
        self._cut_names: dict[str, str] = {}
        """Names of values that were cut, by what is left of them."""
        self._sent: SentSource | None = None
        self._sent_at = 0.0

    # --- who writes -----------------------------------------------------------------------------------------------

    @property
    def header(self) -> Header:
        """Who writes."""
        return self._header

    @property
    def path(self) -> Path | None:
        """The file that it is written to; None while there is none."""
        writer = self._writer
        return None if writer is None else writer.path

    def describe(self, **changes: Any) -> None:
        """Change fields of the `Header`, and open the trace if it is not open: `describe(rank=0, world_size=2)`."""
        with self._lock:
            header = msgspec.structs.replace(self._header, **_cut(changes))
            if self._writer is not None and header == self._header:
                return
            self._header = header
            if self._open():
                self._write(lambda writer: writer.describe(header))

    def _open(self) -> bool:
        if self._writer is None and not self._is_off:
            try:
                self._is_own = self._told is None
                self.folder = Path(self._told) if self._told is not None else new_folder()
                self._writer = writer = TraceWriter(self.folder / f"{os.getpid()}{SUFFIX}")
                atexit.register(self.close)
                writer.set_step(self.step)
                for event in self._waiting:
                    writer.write(event)
            except OSError as exc:
                _log.info("No telemetry of this process can be seen: %s", exc)
                self._is_off, self.folder = True, None
            self._waiting.clear()
        return self._writer is not None

    def _write(self, action: Callable[[TraceWriter], None]) -> None:
        if self._writer is not None:
            with suppress(ValueError, OSError, msgspec.MsgspecError):  # closed, at the end of the program
                action(self._writer)

    def close(self) -> None:
        """Remove the trace, with a mark for those who read it now that the process has finished, unless an exception
        has ended it. Idempotent."""
        with self._lock:
            # In a notebook or at a prompt an exception ends nothing.
            if hasattr(sys, "ps1") or not isinstance(getattr(sys, "last_value", None), Exception):
                self._header = header = msgspec.structs.replace(self._header, is_finished=True)
                self._write(lambda writer: writer.describe(header))
            writer, self._writer, self._is_off = self._writer, None, True
            if writer is not None:
                with suppress(OSError):
                    writer.close()
                if self._is_own and self.folder is not None:
                    with suppress(OSError):
                        self.folder.rmdir()
                atexit.unregister(self.close)

    def abandon(self) -> None:
        """In a forked child: what is written belongs to the parent."""
        writer, self._writer = self._writer, None
        self._lock, self.time = threading.RLock(), StepTime()  # a thread of the parent may have held its lock
        if writer is not None:
            atexit.unregister(self.close)
            with suppress(OSError, ValueError):
                writer.abandon()

    # --- steps ----------------------------------------------------------------------------------------------------

    def blocked(self, phase: Phase = Phase.EXCHANGE) -> AbstractContextManager[None]:
        """Count the time of a block for `phase`, by default that of collectives."""
        return Blocked(self.time, phase)

    def loading(self) -> AbstractContextManager[None]:
        """Count the time of a block as waiting for data, if it is the program's own thread that waits. The first such
        block begins the first step."""
        if self._thread not in (0, threading.get_ident()):
            return nullcontext()
        self.begin()
        return self.blocked(Phase.DATA)

    def add_samples(self, samples: int) -> None:
        """Count samples of this step."""
        self._samples += samples

    def exchange_from(self, source: Source) -> None:
        """Ask `source` at the end of each step for what was exchanged since it was last asked."""
        self.time.add_source(source)

    def sent_from(self, source: SentSource) -> None:
        """Ask `source` from time to time for the bytes that were sent."""
        self._sent = source

    def codecs_from(self, price: Price) -> None:
        """Ask `price` how long codecs would take for the gradients, when their size is known or has changed."""
        self._gradients.price = price

    def compressed(self, strategy: str, codec: float, seconds: float) -> None:
        """Count a collective that `strategy` has compressed. It took `seconds`, of which the codec took `codec`."""
        self.time.compressed(codec, seconds)
        self._gradients.codec = strategy

    def mark(self, doer: Any, samples: int = 0) -> None:
        """Count one step of `doer`, for example an optimizer. The steps of each are counted separately; the largest
        count is the program's step. An elastic run counts its steps itself."""
        count = getattr(doer, _MARK, 0) + 1
        with suppress(AttributeError):  # a class with __slots__
            setattr(doer, _MARK, count)
        if count > self.step and not self._header.role:
            if self._is_begun:
                self.step_done(count, samples=samples)
            else:  # nobody knows when it began
                self.set_step(count)
                self.restart_step()

    def begin(self) -> None:
        """The program begins its first step."""
        if not self._is_begun:
            self.restart_step()

    def step_done(self, number: int | None = None, *, samples: int = 0) -> None:
        """Write the step that ends now; by default the next one."""
        with self._lock:
            spent = self.time.take()
            samples, self._samples = samples + self._samples, 0
            self.set_step(self.step + 1 if number is None else number)
            self._is_begun, self._thread = True, threading.get_ident()
            if self._writer is None:
                return
            at = time.time()
            step = Step(self.step, at, *spent[:-1], samples)
            self._write(lambda writer: writer.write(step))
            if (changes := self._gradients.step_done(spent.reduced, self._header)) is not None:
                self.describe(**changes)
            if self._sent is not None and at - self._sent_at > _SENT_EVERY:
                self._sent_at = at
                self._write_sent(at)

    def set_step(self, number: int) -> None:
        """Say which step was done last, of which no time is known: that of a learner, for example."""
        with self._lock:
            if number != self.step:
                self.step = number
                self._write(lambda writer: writer.set_step(number))

    def restart_step(self) -> None:
        """Begin the step anew: what was spent so far belongs to none, such as the time before the first step."""
        with self._lock:
            self.time.restart()
            self._is_begun, self._samples, self._thread = True, 0, threading.get_ident()

    def _write_sent(self, at: float) -> None:
        found = self._sent() if self._sent is not None else None
        if found is None:
            self._sent = None
            return
        by_rank, received = sorted(found[0].items()), found[1]
        for start in range(0, max(1, len(by_rank)), _PEERS):
            sent = Sent(at, dict(by_rank[start : start + _PEERS]), received)
            self._write(lambda writer, sent=sent: writer.write(sent))

    # --- values and events ----------------------------------------------------------------------------------------

    def log(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Write values that the program wants to be seen."""
        self.logged |= values.keys()
        self.show(values, step)

    def show(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Write values that are known without the program."""
        number = self.step if step is None else step
        with self._lock:
            pairs = [(self._name(name), value) for name, value in values.items() if name]
            for start in range(0, len(pairs), MAX_VALUES):
                record = Values(max(0, number), time.time(), dict(pairs[start : start + MAX_VALUES]))
                self._write(lambda writer, record=record: writer.write(record))

    def _name(self, name: str) -> str:
        """A value's name, cut to its room. Two names that become the same share a curve; a warning says so once."""
        if len(name) <= MAX_NAME and name.isascii():
            return name
        cut = encodable(name)[:MAX_NAME]
        known = self._cut_names.setdefault(cut, name) if len(self._cut_names) < _CUT_NAMES else name
        if known not in ("", name):
            self._cut_names[cut] = ""  # said
            _log.warning(
                "Viewers show the logged values %r and %r as one curve, %r: their first %d characters are the same. "
                "Choose names that differ earlier.",
                encodable(known), encodable(name), cut, MAX_NAME,
            )  # fmt: skip
        return cut

    def event(self, kind: str, text: str) -> None:
        """Write that something happened."""
        event = Event(time.time(), encodable(kind)[:MAX_NAME], cut_text(text), max(0, self.step))
        with self._lock:
            if self._writer is not None:
                self._write(lambda writer: writer.write(event))
            elif not self._is_off and len(self._waiting) < _KEPT_EVENTS:
                self._waiting.append(event)


def encodable(text: str) -> str:
    """Return `text` with `?` for what UTF-8 has no bytes for: the name of a file may have such characters."""
    return text.encode(errors="replace").decode()


def cut_text(text: str) -> str:
    """Return `text`, cut to what an event has room for: characters, and bytes where they are not ASCII."""
    text = " ".join(encodable(text).split())
    if len(text) > MAX_TEXT:
        text = text[: MAX_TEXT - 1] + "…"
    while len(text.encode()) > MAX_TEXT + 40:
        text = text[:-2] + "…"
    return text


def _cut(changes: dict[str, Any]) -> dict[str, Any]:
    limits = {"program": 64, "run": 64, "role": 16, "codec": 32}
    return {name: encodable(value)[: limits[name]] if name in limits else value for name, value in changes.items()}


def _program() -> str:
    return encodable(Path(sys.argv[0] if sys.argv else "").name)[:64]


@cache
def own_trace() -> Trace:
    """Return the trace of this process."""
    return Trace(telemetry_folder(), launched_run())


def _after_fork() -> None:
    parents = own_trace() if own_trace.cache_info().currsize else None
    own_trace.cache_clear()
    if parents is not None:
        parents.abandon()


os.register_at_fork(after_in_child=_after_fork)
