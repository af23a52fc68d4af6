"""What a person should know before the figures: nobody found, a rank lost, a recording that has ended. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from ringfort.dashboard.playback import Played
from ringfort.telemetry.view import ENDED, RankView, RunView
from ringfort.telemetry.words import clean, uptime

PATIENCE: Final = 5.0
"""Seconds after which advice is given if nobody was found. Peers are found in tenths of a second, ranks in a second."""
NAMED: Final = 4
"""Ranks that a sentence names."""

ADVICE: Final = (
    "To watch a run on this machine, start it: `ringfort run --local 2 train.py`. It is found by itself.",
    "To watch other machines, this one needs their key: `ringfort key show` there, `ringfort key join` here.",
    "If they are not found even so, `ringfort doctor` says why.",
)


class Notice(NamedTuple):
    """A sentence that stands above the figures."""

    text: str
    is_bad: bool = False


def without_replaced(view: RunView) -> RunView:
    """Return the view without processes that have ended and whose rank another process has now."""
    taken = {rank.rank for rank in view.ranks if rank.state not in ENDED}
    return replace(view, ranks=tuple(rank for rank in view.ranks if rank.state not in ENDED or rank.rank not in taken))


def notices(view: RunView, failure: str = "", played: Played | None = None) -> list[Notice]:
    """Return what a person should know, the worst first."""
    found: list[Notice] = []
    lost = [rank for rank in view.ranks if rank.state == "lost"]
    if lost:
        found.append(Notice(f"{_who(lost)} lost: {_have_ended(lost)}. {_its(lost)} log may say why.", is_bad=True))
    if failure:
        found.append(Notice(f"{failure} The picture is the last one that is known.", is_bad=True))
    told = clean(view.notice)
    if told:
        found.append(Notice(told, is_bad=True))
    odd = [rank for rank in view.ranks if rank.state == "nonsense" and clean(rank.name) not in told]
    if odd:
        found.append(
            Notice(
                f"What {_named(odd)} sends cannot be understood. Install the same version of Ringfort there and here.",
                is_bad=True,
            )
        )
    silent = [rank for rank in view.ranks if rank.state == "silent"]
    if silent:
        heard = uptime(min(rank.heard for rank in silent))
        found.append(
            Notice(
                f"Nothing was heard of {_named(silent)} for {heard}. `ringfort doctor` says what may be wrong.", True
            )
        )
    active = [rank for rank in view.ranks if rank.state in ("training", "learner", "paused")]
    is_said = "paused" in view.verdict.sentence.lower()
    if active and all(rank.state == "paused" for rank in active) and not is_said:
        found.append(Notice("The run is paused: no rank has finished a step for a while."))
    if played is not None and played.has_ended:
        found.append(Notice("The recording ends here. The left arrow goes back; p plays it again."))
    return found


def _who(ranks: Sequence[RankView]) -> str:
    return f"{_named(ranks, 'R')} {'is' if len(ranks) == 1 else 'are'}"


def _its(ranks: Sequence[RankView]) -> str:
    return "Its" if len(ranks) == 1 else "Their"


def _have_ended(ranks: Sequence[RankView]) -> str:
    return "its process has ended" if len(ranks) == 1 else "their processes have ended"


def _named(ranks: Sequence[RankView], first: str = "r") -> str:
    """`rank 1 (laptop)`, or `ranks 1 (laptop), 2 (attic)`, in at most `NAMED` names."""
    names = ", ".join(f"{rank.rank} ({clean(rank.name) or '?'})" for rank in ranks[:NAMED])
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    return f"{first}ank{'s' if len(ranks) > 1 else ''} {names}{more}"


def nobody(view: RunView | None, failure: str, wanted: str | None, waited: float) -> list[Notice]:
    """Return what stands in the place of a run while there is none, and what to do."""
    if failure:
        return [Notice(failure, is_bad=True), Notice("It is tried again twice a second.")]
    found: list[Notice] = []
    runs = view.runs if view is not None else ()
    if view is not None and view.is_recording:
        found.append(Notice("The recording has no rank at this moment."))
    elif wanted and runs:
        names = ", ".join(clean(run) for run in runs[:8])
        found.append(
            Notice(f"The run {clean(wanted)} is not there. Runs that are there: {names}. Press r for the next.")
        )
    elif waited < PATIENCE:
        found.append(Notice("Looking for runs on this machine and on the network."))
    else:
        found.append(Notice(f"Nobody was found in {uptime(waited)}; still looking."))
        found += [Notice(advice) for advice in ADVICE]
    if view is not None and view.notice:
        found.insert(1, Notice(clean(view.notice), is_bad=True))
    return found
