"""`Journal`: who came, who went and what it cost; how much of what the members can compute was sealed. Pure."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

MAX_EVENTS: Final = 1000
"""Lines that are kept."""
Say = Callable[[int, str], None]
"""Takes a level of `logging` and a line."""


class Journal:
    """What happened to the members of a run, in lines for people."""

    def __init__(self, say: Say) -> None:
        self.events: deque[str] = deque(maxlen=MAX_EVENTS)
        """What was said, newest last."""
        self.sealed_samples = 0
        self.possible_samples = 0.0
        """What the members could have computed meanwhile, by their own measured speeds."""
        self._say = say
        self._members: dict[str, str] = {}
        """The members at the last sealed step, and their names."""
        self._present: dict[str, str] = {}
        self._reasons: dict[str, str] = {}
        self._sealed_at: float | None = None
        self._waits_for: tuple[str, ...] | None = None
        self._aside = 0.0

    @property
    def goodput(self) -> float:
        """Sealed samples divided by what the members could have computed in that time; 0 before the second step."""
        return min(1.0, self.sealed_samples / self.possible_samples) if self.possible_samples > 0 else 0.0

    def say(self, text: str, level: int = logging.INFO) -> None:
        """Add a line."""
        self.events.append(text)
        self._say(level, text)

    def lost(self, peer: str, why: str) -> None:
        """A peer is gone."""
        if peer in self._present or peer in self._members:
            self._reasons[peer] = why

    def began(self, members: Mapping[str, str]) -> None:
        """The group of an epoch with these `members` was formed."""
        self._present = dict(members)

    def waits(self, fewest: int) -> None:
        """No step begins, because there are fewer members than `fewest`."""
        gone = self._gone()
        if gone != self._waits_for:
            self._waits_for = gone
            missing = f"missing: {'; '.join(gone)}" if gone else "others were never here"
            self.say(
                f"Waiting with the state in memory: {len(self._present)} of at least {fewest} members are here "
                f"({', '.join(self._present.values())}); {missing}",
                logging.WARNING,
            )

    def sealed(self, step: int, samples: int, speeds: Sequence[int], now: float) -> None:
        """A step was sealed by members of these speeds, in samples per second; 0 for an unknown one."""
        last, self._sealed_at = self._sealed_at, now
        came, gone = list[str](), tuple[str, ...]()
        if self._present is not self._members:  # else this is another step of the same epoch
            came = [name for peer, name in self._present.items() if peer not in self._members]
            gone = self._gone()
        if self._members and (came or gone):
            cost = "" if last is None else f"; {now - last:.1f} s without a sealed step"
            what = [*(f"{name} joined" for name in came), *(f"{line} left" for line in gone)]
            self.say(f"{', '.join(what)}: {_counted(len(self._present))} from step {step}{cost}")
        elif not self._members:
            self.say(f"Step {step} is sealed by {_counted(len(self._present))}: {', '.join(self._present.values())}")
        self._members, self._waits_for = self._present, None
        # Why a present one is lost may come, in another thread, before the last step that was sealed with it.
        for peer in [peer for peer in tuple(self._reasons) if peer not in self._present]:
            del self._reasons[peer]
        known = [speed for speed in speeds if speed > 0]
        if last is not None and known:
            usual = sum(known) / len(known)
            seconds = max(0.0, now - last - self._aside)
            self.possible_samples += seconds * sum(speed or usual for speed in speeds)
            self.sealed_samples += samples
        self._aside = 0.0

    def aside(self, seconds: float) -> None:
        """The program of this member has used so much time for something else."""
        self._aside += seconds

    def _gone(self) -> tuple[str, ...]:
        gone = [(peer, name) for peer, name in self._members.items() if peer not in self._present]
        return tuple([f"{name} ({self._reasons[p]})" if p in self._reasons else name for p, name in gone])


def _counted(members: int) -> str:
    return f"{members} member{'' if members == 1 else 's'}"
