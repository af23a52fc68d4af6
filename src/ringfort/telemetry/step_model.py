"""`StepModel`: the time of a step, made of what each rank does, and what it would be if something were different. Pure.

All ranks end a step together. A rank that waits for nobody came last, so the step takes as long as what this rank does
by itself (data, compute, codec), the wire and the seal. If what ranks do by themselves changes, the step becomes
shorter by the difference of the largest of these sums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import sqrt
from typing import Final, NamedTuple

import msgspec

from ringfort.telemetry.view import LinkView, RankView

RATIOS: Final = {"int8": 512 * 4 / (512 + 4), "int4": 128 * 4 / (64 + 4)}
"""How many times fewer bytes a codec sends, with its scales, for gradients of 32-bit floats: these are advised."""
IN_USE: Final = {**RATIOS, "fp16": 2.0, "bf16": 2.0, "onebit": 512 * 4 / (64 + 4)}
"""The same of codecs whose bytes do not depend on the gradients."""
LATE: Final = 0.05
"""Ranks that wait less than this part of a step, more than the one that waits the least, came last too."""
SLOW: Final = 2.5
"""If all links differ by at most this factor, all of them are slow: on Wi-Fi measurements differ that much."""


class StepModel:
    """A step of some ranks, of which there is at least one, by the means of their recent steps."""

    def __init__(self, ranks: Sequence[RankView]) -> None:
        self.ranks = ranks
        self.last = min(ranks, key=lambda rank: rank.split.waiting)
        """The rank that waits the least."""
        self.seconds = self.last.split.total
        self.longest_wait = max(rank.split.waiting for rank in ranks)
        """Of any rank, which is how much is lost because ranks differ."""
        least = self.last.split.waiting
        self.late = [rank for rank in ranks if rank.split.waiting <= least + LATE * self.seconds]
        """The ranks that came last; all of them if nobody waits."""
        self.hosts = {rank.host or rank.key for rank in ranks}

    # --- what each cause costs, in seconds of a step ------------------------------------------------------------------

    def data(self) -> float:
        """What is lost because of slow data loaders, those of `loading`."""
        slow = {rank.key for rank in self.loading()}
        return self._saved(lambda rank: own(rank) - (rank.split.data if rank.key in slow else 0.0))

    def loading(self) -> list[RankView]:
        """The ranks whose data loaders are slow: with these alone mended, no other would hold up the rest for long."""
        most = max(rank.split.data for rank in self.ranks)
        return [rank for rank in self.ranks if rank.split.data >= most / 2 and rank.split.data > 0]

    def imbalance(self) -> float:
        """What is lost because the shares of the ranks do not fit their speeds."""
        if self.longest_wait <= LATE * self.seconds:
            return 0.0
        even = self._even()
        return self._saved(lambda rank: even + rank.split.codec)

    def _even(self) -> float:
        """The seconds that each rank would load and compute, if all had shares in proportion to their speed."""
        shares = [(share, work(rank)) for rank, share in zip(self.ranks, self._shares(), strict=True) if work(rank) > 0]
        speed = sum(share / seconds for share, seconds in shares)
        return sum(share for share, _ in shares) / speed if speed > 0 else 0.0

    def _shares(self) -> list[float]:
        """What each rank has of the work of a step: samples, or equal shares if the program does not say."""
        samples = [rank.samples_per_second / max(1e-9, rank.steps_per_second) for rank in self.ranks]
        # In elastic training a rank may have no part in a step.
        is_told = all(samples) or (self.is_elastic and any(samples))
        return samples if is_told else [1.0] * len(samples)

    @property
    def is_elastic(self) -> bool:
        """Whether shares are dealt by speed already."""
        return any(rank.split.seal > 0 for rank in self.ranks)

    def wire(self) -> float:
        """What is spent on links between machines, or between the processes of a machine."""
        return self.last.split.wire if len(self.ranks) > 1 else 0.0

    def seal(self) -> float:
        """What is spent to agree that a step counts."""
        return self.last.split.seal if len(self.ranks) > 1 else 0.0

    def codec(self, link: LinkView | None) -> float:
        """What compression costs more than it saves; all that it costs, if it is unknown what it saves."""
        gained = self.gained_by_compression(link)
        return self._spent_on_codec() if gained is None else max(0.0, -gained)

    def turns(self) -> float:
        """What even the rank that waits the least waits: in each step another one comes last."""
        return self.last.split.waiting

    # --- compression --------------------------------------------------------------------------------------------------

    @property
    def compression(self) -> str:
        """The codec in use; empty without one."""
        name = self.last.compression
        return "" if name == "none" else name

    def gained_by_compression(self, link: LinkView | None) -> float | None:
        """What the compression in use saves; less than 0 if it costs more. None without one, or if it is unknown."""
        ratio = IN_USE.get(self.compression)
        return None if ratio is None else self.compressible(link) * (ratio - 1) - self._spent_on_codec()

    def compressible(self, link: LinkView | None) -> float:
        """The seconds on the wire that fewer bytes would shorten: not those of round trips. `link` is the slowest."""
        wire = self.wire()
        if link is None or link.round_trip is None:
            return wire
        # A ring passes each pair of neighbours 2(n-1) times. On a busy link messages of all kinds wait, so the measured
        # round trip is too long; the bytes that were sent say how much of the time they need at least.
        rounds = (len(self.hosts) - 1) * link.round_trip
        sent = max(rank.sent / max(1e-9, rank.steps_per_second) for rank in self.ranks)
        return max(0.0, min(wire, max(wire - rounds, sent / link.measured if link.measured else 0.0)))

    def saved_by(self, codec: str, link: LinkView | None, codec_seconds: float) -> float:
        """What `codec` would save, if it were used instead of the one in use, which may be none."""
        now = IN_USE.get(self.compression, 1.0)
        return self.compressible(link) * (1 - now / RATIOS[codec]) - codec_seconds + self._spent_on_codec()

    def _spent_on_codec(self) -> float:
        return max(rank.split.codec for rank in self.ranks)

    def _saved(self, changed: Callable[[RankView], float]) -> float:
        return max(0.0, max(map(own, self.ranks)) - max(map(changed, self.ranks)))


def work(rank: RankView) -> float:
    """The seconds that grow with a rank's share."""
    return rank.split.compute + rank.split.data


def own(rank: RankView) -> float:
    """The seconds that a rank needs by itself."""
    return work(rank) + rank.split.codec


class SlowLink(NamedTuple):
    """The slowest link, and what makes it slow."""

    link: LinkView
    hosts: tuple[str, ...] = ()
    """The machines of which all links are slow, by `RankView.host`; empty if it is only this link."""
    is_everywhere: bool = False
    """All links are slow, of three machines or more."""


def slowest_link(ranks: Collection[RankView], links: Collection[LinkView]) -> SlowLink | None:
    """The slowest link between machines of `ranks`, or None if no speed is known. Of a machine whose links are all slow
    it is the fastest: while links are measured, others may be busy."""
    hosts = {rank.host for rank in ranks}
    between = [link for link in links if link.source != link.target and {link.source, link.target} <= hosts]
    pairs: dict[frozenset[str], LinkView] = {}
    for link in sorted((link for link in between if link.measured), key=_speed):
        pairs.setdefault(frozenset((link.source, link.target)), link)  # the slower direction
    if not pairs:
        return None
    best = {
        host: max((link for pair, link in pairs.items() if host in pair), key=_speed, default=None) for host in hosts
    }
    slowest, fastest = min(pairs.values(), key=_speed), max(pairs.values(), key=_speed)
    is_everywhere = len(pairs) > 1 and _speed(fastest) <= SLOW * _speed(slowest)
    # At least half of the fastest: if the slowest was busy while it was measured, it says little of the others.
    limit = max(sqrt(_speed(slowest) * _speed(fastest)), _speed(fastest) / 2)
    slow = [(_speed(link), host, link) for host, link in best.items() if link is not None and _speed(link) < limit]
    slow = [] if is_everywhere else sorted((one for one in slow if _degree(one[1], pairs) > 1), key=lambda one: one[:2])
    found = slow[0][2] if slow else slowest
    back = [link.kind for link in between if (link.target, link.source) == (found.source, found.target)]
    found = msgspec.structs.replace(found, kind=found.kind or next(iter(back), ""))  # only one end may know it
    return SlowLink(found, tuple(host for _, host, _ in slow), is_everywhere)


def _speed(link: LinkView) -> float:
    return link.measured or 0.0


def _degree(host: str, pairs: Collection[frozenset[str]]) -> int:
    """How many links of a machine are known."""
    return sum(host in pair for pair in pairs)
