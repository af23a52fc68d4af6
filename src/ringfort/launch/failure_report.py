"""`Failure`: why a run failed, and which failure came first. Pure.

When one rank fails, its peers lose it and fail too, and their exits are often noticed earlier. So a rank whose last
lines say that it lost a peer is a victim. A victim is reported only if no other rank failed.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import msgspec

from ringfort import errors

TAIL_LINES: Final = 20
"""Lines of output to keep per rank: the end of a traceback, with the error and where it was raised."""
MAX_LINE_BYTES: Final = 600
"""Per line of a failure report: a failure with all its lines must fit into one note to the other launchers."""

USAGE_ERROR: Final = 2
"""The exit code that argparse, click and most other parsers use for a usage error."""
_USAGE: Final = re.compile(r"\s*usage:", re.IGNORECASE)

_WRONG_ARGUMENT: Final = re.compile(
    r"(ringfort\.errors\.)?("
    + "|".join(
        name
        for name, item in vars(errors).items()
        if isinstance(item, type) and issubclass(item, errors.InvalidArgumentError)
    )
    + "): "
)
"""The last line of a program that passed an invalid argument or setting to Ringfort."""

_OURS: Final = "|".join(
    name
    for name, item in vars(errors).items()
    if getattr(item, "is_peer_failure", False) or item is errors.AbortedError
)
_LOST_ANOTHER: Final = re.compile(
    rf"^(ringfort\.errors\.)?({_OURS}): "
    # Gloo, torch's store, and NCCL
    r"|Connection (closed|reset) by peer|\bDist(Network|Store)Error\b|\bncclRemoteError\b"
)

Line = Annotated[str, msgspec.Meta(max_length=MAX_LINE_BYTES)]


class Failure(msgspec.Struct, frozen=True):
    """Why a run failed: because of a rank, or (where `rank` is None) of a whole machine or of its user."""

    host: Annotated[str, msgspec.Meta(max_length=256)]
    exit_code: Annotated[int, msgspec.Meta(ge=-255, le=255)]
    """Of the process; negative for the signal that ended it."""
    rank: Annotated[int, msgspec.Meta(ge=0)] | None = None
    why: Line = ""
    """The reason, where no rank failed."""
    tail: Annotated[tuple[Line, ...], msgspec.Meta(max_length=TAIL_LINES)] = ()
    is_victim: bool = False
    is_final: bool = False
    """A restart would not help or is not wanted: the user ended the run, or the command was wrong."""

    @classmethod
    def of_rank(cls, rank: int, host: str, exit_code: int, tail: Iterable[str]) -> Failure:
        """The failure of a rank, with the last lines of its output."""
        lines = tuple(line.encode()[:MAX_LINE_BYTES].decode(errors="ignore") for line in tail)[-TAIL_LINES:]
        return cls(
            host,
            exit_code,
            rank,
            tail=lines,
            is_victim=exit_code > 0 and any(_LOST_ANOTHER.search(line) for line in lines),
            is_final=(exit_code == USAGE_ERROR and any(_USAGE.match(line) for line in lines))
            or (exit_code == 1 and bool(lines) and _WRONG_ARGUMENT.match(lines[-1]) is not None),
        )

    @property
    def status(self) -> int:
        """The exit code for a shell: 128 plus the signal number if a signal ended the process."""
        return self.exit_code if self.exit_code >= 0 else 128 - self.exit_code


def first(failures: Sequence[Failure]) -> Failure:
    """The failure to report: not a victim's, and of the lowest rank, so that all launchers report the same."""
    return min(failures, key=lambda failure: (failure.is_victim, failure.rank is None, failure.rank or 0))


def describe_exit(exit_code: int) -> str:
    """How a process ended, in words; a negative code is a signal's."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    names = {one.value: one.name for one in signal.Signals}
    return f"was killed by {names.get(-exit_code, f'signal {-exit_code}')}"


def with_tail(text: str, tail: Sequence[str]) -> str:
    """`text` with the last lines of a process: on the same line if there is only one."""
    return text + ("" if not tail else f": {tail[0]}" if len(tail) == 1 else ":\n    " + "\n    ".join(tail))
