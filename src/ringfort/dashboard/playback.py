"""What a recording has beyond a live run: a position that moves."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from ringfort.telemetry.words import position as place


@runtime_checkable
class Playback(Protocol):
    """What the source of a recording has beyond that of a live run."""

    playing: bool
    speed: float

    @property
    def duration(self) -> float:
        """Seconds of the whole recording."""
        ...

    @property
    def position(self) -> float:
        """Seconds since its beginning."""
        ...

    def seek(self, seconds: float) -> None:
        """Go to a place in the recording."""
        ...


class Played(NamedTuple):
    """Where the playback of a recording is."""

    position: float
    duration: float
    is_playing: bool = True
    speed: float = 1.0

    @property
    def has_ended(self) -> bool:
        """Whether there is nothing left to play."""
        return self.position >= self.duration

    def __str__(self) -> str:
        speed = f" at {self.speed:g}x" if self.speed != 1 else ""
        state = "" if self.is_playing or self.has_ended else ", stopped"
        return f"recording {place(self.position)} of {place(self.duration)}{speed}{state}"


def played(source: object) -> Played | None:
    """Return where the playback is; None for what is not a recording."""
    if not isinstance(source, Playback):
        return None
    return Played(source.position, source.duration, source.playing, source.speed)
