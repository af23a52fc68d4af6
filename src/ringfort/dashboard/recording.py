"""`RecordedSource`: plays a recording."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Final

import msgspec

from ringfort.dashboard.known import AnyFrame, Known, Reported
from ringfort.dashboard.recording_file import RecordingReader
from ringfort.errors import InvalidArgumentError
from ringfort.telemetry.report import Report, Sums
from ringfort.telemetry.view import RunView

if TYPE_CHECKING:
    from typing_extensions import Self

FULL: Final = 120.0
"""Seconds before a position of which every frame is read."""
MOST: Final = 20_000
"""Frames that are read of what was before that: reading one takes about 13 microseconds. A curve has 600 points."""
SPEEDS: Final = (0.1, 1000.0)


class RecordedSource:
    """Plays a recording. It is a `dashboard.source.Source` with a position that moves. All methods are thread-safe."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Open a recording. Raises `InvalidArgumentError` if the file is not one, or cannot be read."""
        self._reader = RecordingReader(path)
        self._clock = clock
        self._lock = Lock()
        self._playing, self._speed = True, 1.0
        self._position, self._moved_at = 0.0, clock()
        self._reset(0)
        self._run = ""

    def _reset(self, block: int) -> None:
        """Forget everything, and go on with a block."""
        self._now = self._reader.start
        """The time of the latest frame."""
        self._known = Known(lambda: self._now)
        self._next = block
        self._frames: Iterator[tuple[float, AnyFrame]] = iter(())
        self._waiting: tuple[float, AnyFrame] | None = None

    # --- time -------------------------------------------------------------------------------------------------------

    @property
    def duration(self) -> float:
        """Seconds of the whole recording."""
        return self._reader.end - self._reader.start

    @property
    def position(self) -> float:
        """Seconds since its beginning."""
        with self._lock:
            return self._move()

    @property
    def playing(self) -> bool:
        """Whether time goes on. It stops at the end."""
        with self._lock:
            self._move()
            return self._playing

    @playing.setter
    def playing(self, playing: bool) -> None:
        with self._lock:
            if self._move() >= self.duration and playing:
                self._position = 0.0  # again from the beginning
            self._playing = playing

    @property
    def speed(self) -> float:
        """Seconds of the recording per second."""
        return self._speed

    @speed.setter
    def speed(self, speed: float) -> None:
        if not SPEEDS[0] <= speed <= SPEEDS[1]:
            raise InvalidArgumentError("speed", speed, f"must be from {SPEEDS[0]:g} to {SPEEDS[1]:g}")
        with self._lock:
            self._move()
            self._speed = speed

    def seek(self, seconds: float) -> None:
        """Go to a position, or to the beginning or end if it is outside."""
        with self._lock:
            self._move()
            self._position = min(max(0.0, seconds), self.duration)

    def _move(self) -> float:
        now = self._clock()
        if self._playing:
            self._position = min(self.duration, self._position + (now - self._moved_at) * self._speed)
            self._playing = self._position < self.duration
        self._moved_at = now
        return self._position

    # --- views ------------------------------------------------------------------------------------------------------

    def view(self, run: str | None = None) -> RunView:
        """Return the run as it was at the position."""
        with self._lock:
            at = self._reader.start + self._move()
            self._read_until(at)
            view = self._known.history.view(run, at)
            self._run = view.run
            is_at_end = self._position >= self.duration
            notices = [view.notice, self._reader.notice if is_at_end else ""]
            return msgspec.structs.replace(view, notice=" ".join(filter(None, notices)), is_recording=True)

    def log(self, rank: int, run: str | None = None) -> list[str]:
        """Return the output of a rank that was recorded up to the position: only what the viewer had on its screen."""
        with self._lock:
            return self._known.output(self._run if run is None else run, rank).lines()

    def _read_until(self, at: float) -> None:
        if at < self._now or at - self._now > FULL:
            self._jump(at)
        while True:
            if self._waiting is None:
                self._waiting = next(self._frames, None)
            if self._waiting is None:
                if self._next >= len(self._reader) or self._reader.block(self._next).at > at:
                    break
                self._frames = self._reader.frames(self._reader.block(self._next))
                self._next += 1
                continue
            if self._waiting[0] > at:
                break
            self._take(*self._waiting)
            self._waiting = None
        self._now = max(self._now, at)

    def _take(self, at: float, frame: AnyFrame) -> None:
        self._now = at
        self._known.take(frame, at)

    def _jump(self, at: float) -> None:
        """Read some of what was before the time `at`, for the curves and the events, and all of the last seconds."""
        reader = self._reader
        full = reader.block_at(at - FULL)
        self._reset(full)
        chosen = _choose([reader.block(number)[-2:] for number in range(full)], MOST)
        for number, following in pairwise([*chosen, full]):
            block = reader.block(number)
            end = reader.block(following).at if following < len(reader) else reader.end
            scale = max(1, int(end) - int(block.at))
            for when, frame in reader.frames(block):
                self._take(when, frame if scale == 1 else _scaled(frame, scale))

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _choose(blocks: list[tuple[int, bool]], most: int) -> list[int]:
    """Choose blocks that have about `most` frames, of the frames of each and whether it is needed: the needed ones, if
    they are not too many, and others at equal distances."""
    total = sum(count for count, _ in blocks)
    every = max(1, -(-total // most))
    needed = [number for number, (_, is_needed) in enumerate(blocks) if is_needed]
    kept, frames = set(range(0, len(blocks), every)), 0
    for number in reversed(needed):
        frames += blocks[number][0]
        if frames > most:
            break
        kept.add(number)
    return sorted(kept)


def _scaled(frame: AnyFrame, scale: int) -> AnyFrame:
    """Let a report stand for several seconds, of which the others are left out."""
    if not isinstance(frame, Reported):
        return frame
    report: Report = frame.report
    sums = Sums(*(getattr(report.sums, name) * scale for name in Sums.__struct_fields__))
    return Reported(msgspec.structs.replace(report, sums=sums))
