"""`links_in_use`: the links between machines, and how much of them is used. Pure."""

from __future__ import annotations

from collections.abc import Collection

from ringfort.telemetry.rank_history import RankHistory
from ringfort.telemetry.view import LinkView


def links_in_use(links: Collection[LinkView], ranks: Collection[RankHistory]) -> tuple[LinkView, ...]:
    """Return the links between the machines of `ranks`, those that were measured and those that are used."""
    host_of = {rank.rank: rank.host for rank in ranks if rank.is_alive and rank.rank >= 0}
    used: dict[tuple[str, str], float] = {}
    for rank in ranks:
        for other, rate in rank.sent.items() if rank.is_alive else ():
            if other in host_of and rate > 0:
                pair = rank.host, host_of[other]
                used[pair] = used.get(pair, 0.0) + rate
    hosts = {rank.host for rank in ranks}
    found = {(link.source, link.target): link for link in links if {link.source, link.target} <= hosts}
    for source, target in used:
        found.setdefault((source, target), LinkView(source, target, kind="this machine" if source == target else ""))
    return tuple(_with_used(link, used.get(pair, 0.0)) for pair, link in sorted(found.items()))


def _with_used(link: LinkView, used: float) -> LinkView:
    """Return a link with what is used of it. It is at least as fast as that: it may have been busy when it was
    measured."""
    measured = None if link.measured is None else max(link.measured, used)
    return LinkView(link.source, link.target, used, measured, link.round_trip, link.kind)
