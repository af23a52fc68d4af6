"""Who failed first, and how to say it. Pure.

When one rank fails, the others lose it and fail too, often sooner than its own end is noticed. So a rank whose last
words are that it lost another is a victim, and is blamed only where nobody else is to be found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import msgspec

from ringfort import errors
from ringfort.launch.processes import TAIL_LINES

MAX_LINE_BYTES: Final = 600
"""Of a line in a summary: a failure with all its lines must fit a note to the other launchers."""

USAGE_ERROR: Final = 2
"""The exit code by which argparse, click and most others say that the command was wrong."""
_USAGE: Final = re.compile(r"\s*usage:", re.IGNORECASE)

_OURS: Final = "|".join(
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type)
    and issubclass(kind, errors.DistributedError)
    and (kind.is_peer_failure or kind is errors.AbortedError)
)
_LOST_ANOTHER: Final = re.compile(
    rf"^(ringfort\.errors\.)?({_OURS}): "
    # Gloo, torch's store, and NCCL
    r"|Connection (closed|reset) by peer|\bDist(Network|Store)Error\b|\bncclRemoteError\b"
)

_Line = Annotated[str, msgspec.Meta(max_length=MAX_LINE_BYTES)]


class Failure(msgspec.Struct, frozen=True):
    """Why a run ended badly: a rank, or (with no rank) a whole machine or a person at it."""

    host: Annotated[str, msgspec.Meta(max_length=256)]
    exit_code: Annotated[int, msgspec.Meta(ge=-255, le=255)]
    """Of a process, negative for the signal that ended it."""
    rank: Annotated[int, msgspec.Meta(ge=0)] | None = None
    why: Annotated[str, msgspec.Meta(max_length=MAX_LINE_BYTES)] = ""
    """In words, where no rank is to blame."""
    tail: Annotated[tuple[_Line, ...], msgspec.Meta(max_length=TAIL_LINES)] = ()
    is_victim: bool = False
    is_final: bool = False
    """Starting the run again would not help, or is not wanted: a person ended it, or a command was wrong."""

    @classmethod
    def of_rank(cls, rank: int, host: str, exit_code: int, tail: Iterable[str]) -> Failure:
        """A rank that ended badly, with the last lines it wrote."""
        lines = tuple(line.encode()[:MAX_LINE_BYTES].decode(errors="ignore") for line in tail)[-TAIL_LINES:]
        return cls(
            host,
            exit_code,
            rank,
            tail=lines,
            is_victim=exit_code > 0 and lost_another(lines),
            is_final=exit_code == USAGE_ERROR and any(_USAGE.match(line) for line in lines),
        )

    @property
    def status(self) -> int:
        """The exit code for a shell: 128 and the number of the signal, where one ended it."""
        return self.exit_code if self.exit_code >= 0 else 128 - self.exit_code


def lost_another(lines: Sequence[str]) -> bool:
    """Whether a process's last words are that it lost another."""
    return any(_LOST_ANOTHER.search(line) for line in lines)


def first(failures: Sequence[Failure]) -> Failure:
    """The one to blame: not a victim, and the lowest rank, so that all launchers name the same."""
    return min(failures, key=lambda failure: (failure.is_victim, failure.rank is None, failure.rank or 0))
