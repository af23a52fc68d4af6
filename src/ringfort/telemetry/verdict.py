"""Who makes everyone wait, and what would help: a sentence and a prediction, from where the time of ranks goes. Pure.

`StepModel` says what each cause costs; the largest is named:

    data            data loaders
    slow_machine    what ranks compute longer than they would if all had shares by their speed
    slow_link       the wire
    exchange        the same inside one machine
    seal            agreeing that a step counts, in elastic training
    codec           compressing gradients
    uneven          ranks that wait for each other in turn
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from ringfort.telemetry.rank_names import RankNames, listed
from ringfort.telemetry.step_model import LATE, RATIOS, StepModel, slowest_link, work
from ringfort.telemetry.view import ENDED, LinkView, RankView, RunView

WORTH: Final = 0.1
"""The smallest part of a step that is called a cause."""
WORTH_ADVICE: Final = 0.05
"""The smallest part of a step that an advice must save."""
ALIKE: Final = 0.8
"""Ranks that wait at least this part of the longest wait are named together."""
_RANK: Final = re.compile(r"^rank(?=s? \d)")
HOT: Final = 90.0
"""Degrees Celsius at which processors slow down."""


class Finding(NamedTuple):
    """What is the matter."""

    cause: str
    sentence: str
    culprit: str = ""
    saving: float = 0.0


def judge(
    ranks: Sequence[RankView],
    links: Sequence[LinkView] = (),
    codec_seconds: Mapping[str, float] | None = None,
    speed_up: float | None = None,
    learners: Sequence[str] = (),
) -> Finding:
    """Return what costs the run the most time. `ranks` are those that train. `codec_seconds` are what codecs would take
    for the gradients of a step, by name. `learners` are machines that copy the state of the run now."""
    ranks = [rank for rank in ranks if rank.split.total > 0]
    if not ranks:
        return Finding("unknown", "No step has been seen yet.")
    return _Case(ranks, links, codec_seconds or {}, speed_up, learners).finding()


def in_collectives(ranks: Sequence[RankView]) -> float:
    """Return the largest part of a step that a rank spends in collectives: waiting for others, and for the wire."""
    return max((rank.split.part("waiting", "wire") for rank in ranks), default=0.0)


def judge_some(ranks: Sequence[RankView], run: RunView) -> Finding:
    """Return what can be said of `ranks`, those that train, if others of the run are not seen: nobody is named."""
    seen = f"{run.seen} of {run.world_size} ranks {'is' if run.seen == 1 else 'are'} seen"
    part = f"up to {_percent(in_collectives(ranks))} of each step is spent in collectives"
    return Finding("unknown", f"{seen}; {part}, and who waits for whom cannot be told.")


class _Case:
    """One run to judge."""

    def __init__(
        self,
        ranks: Sequence[RankView],
        links: Sequence[LinkView],
        codec_seconds: Mapping[str, float],
        speed_up: float | None,
        learners: Sequence[str],
    ) -> None:
        self.ranks, self.codec_seconds, self.speed_up, self.learners = ranks, codec_seconds, speed_up, learners
        self.model = StepModel(ranks)
        self.names = RankNames(ranks)
        self.slow = slowest_link(ranks, links)
        self.link = None if self.slow is None else self.slow.link

    def finding(self) -> Finding:
        """Return the largest cause, if it is large enough for a word."""
        model = self.model
        costs = {
            self._data: model.data(),
            self._slow_machine: model.imbalance(),
            self._slow_link: model.wire(),
            self._seal: model.seal(),
            self._codec: model.codec(self.link),
            self._uneven: model.turns(),
        }
        cause, cost = max(costs.items(), key=lambda item: item[1])
        return cause(cost) if cost >= WORTH * model.seconds else self._well()

    # --- causes -------------------------------------------------------------------------------------------------------

    def _data(self, cost: float) -> Finding:
        loading = self.model.loading()
        last = max(loading, key=work)
        part = _percent(last.split.part("data"))
        advice = f"more loader workers would save up to {_time(cost)}"
        if len(loading) == len(self.ranks) > 1:
            return self._found(
                "data", f"All ranks wait {part} of each step for their data loaders; {advice}", saving=cost
            )
        names = self.names.titles(loading)
        waiting = self._waiting_for(names)
        if waiting:
            start = f"{waiting} and its data loader" if len(names) == 1 else f"{waiting}, and their data loaders"
        else:
            waits = "waits {} of each step for its data loader" if len(names) == 1 else "wait {} of each step for data"
            start = f"{listed(names)} {waits.format(part)}"
        return self._found("data", f"{start}; {advice}", last, cost)

    def _slow_machine(self, cost: float) -> Finding:
        last = max(self.model.late, key=work)
        ratio = work(last) / max(1e-9, min(seconds for rank in self.ranks if (seconds := work(rank)) > 0))
        names = self.names.titles(self.model.late)
        facts = _condition(last) if len(names) == 1 else []
        names[0] += f" ({', '.join(facts)})" if facts else ""
        computes = "computes" if len(names) == 1 else "compute"
        advice = "batches in proportion to speed would save about"
        if self.model.is_elastic:
            advice = "shares follow the speeds by themselves; if this stays, smaller micro-batches would save up to"
        sentence = f"{self._waiting_for(names)}, which {computes} {ratio:.1f} times as long; {advice} {_time(cost)}"
        return self._found("slow_machine", sentence, last, cost)

    def _slow_link(self, cost: float) -> Finding:
        part = _percent(cost / self.model.seconds)
        if len(self.model.hosts) == 1:
            advice = "fewer ranks, or larger batches, may be as fast"
            return self._found("exchange", f"{part} of each step is spent on exchange inside the machine; {advice}")
        sentence = f"{part} of each step is spent on {self._where()}"
        if self.learners:
            # What the learner copies passes the same links.
            return self._found("slow_link", f"{sentence}, while {listed(self.learners)} copies the state of the run")
        advice, saving = self._compression_advice()
        culprit = self.names.machine(self.slow.hosts[0]) if self.slow is not None and self.slow.hosts else ""
        return self._found("slow_link", f"{sentence}; {advice}", culprit, saving)

    def _compression_advice(self) -> tuple[str, float]:
        """What compression would do, and what it would save."""
        in_use = self.model.compression
        if not in_use or in_use in ("fp16", "bf16"):
            for codec in RATIOS:
                saved = self.model.saved_by(codec, self.link, self.codec_seconds.get(codec, 0.0))
                if saved > WORTH_ADVICE * self.model.seconds:
                    instead = f" instead of {in_use}" if in_use else ""
                    return f"compression {codec}{instead} would save about {_time(saved)}", saved
        if in_use:
            gained = self.model.gained_by_compression(self.link) or 0.0
            saves = f", which saves about {_time(gained)}" if gained > 0 else ""
            return f"it is compressed already ({in_use}{saves}), so larger batches would help, or a faster link", 0.0
        is_far = self.model.compressible(self.link) < self.model.wire() / 2
        why = "larger batches would: most of it is round trips" if is_far else "the codec would take longer"
        return f"compression would not save time; {why}", 0.0

    def _where(self) -> str:
        """The link that is slow, with its kind and speed."""
        slow = self.slow
        if slow is None:
            return "the network"
        facts = [_KINDS.get(slow.link.kind, slow.link.kind), bits(slow.link.measured or 0.0)]
        if slow.is_everywhere:
            where = "the network"
        elif slow.hosts:
            names = [self.names.machine(host) for host in slow.hosts]
            where = f"the link{'s' if len(names) > 1 else ''} of {listed(names)}"
        else:
            ends = sorted(map(self.names.machine, (slow.link.source, slow.link.target)))
            where = f"the link between {' and '.join(ends)}"
        return f"{where} ({', '.join(filter(None, facts))})"

    def _seal(self, cost: float) -> Finding:
        sentence = f"{_percent(cost / self.model.seconds)} of each step is spent on agreeing that it counts"
        return self._found("seal", f"{sentence}; larger batches make fewer steps")

    def _codec(self, cost: float) -> Finding:
        last = max(self.ranks, key=lambda rank: rank.split.codec)
        in_use = self.model.compression
        who = f"{self.names.title(last)} compresses gradients for {_percent(last.split.part('codec'))} of each step"
        if self.model.gained_by_compression(self.link) is None:
            return self._found("codec", f"{who}; a cheaper codec such as int8 or bf16, or none, may be faster", last)
        advice = f"compression {in_use} costs more than it saves, none would save about {_time(cost)}"
        return self._found("codec", f"{who}; {advice}", last, cost)

    def _uneven(self, cost: float) -> Finding:
        sentence = f"The ranks wait for each other in turn, {_percent(cost / self.model.seconds)} of each step"
        return self._found(
            "uneven", f"{sentence}: batches of equal cost would help, such as of texts of similar length"
        )

    def _well(self) -> Finding:
        ranks, model = self.ranks, self.model
        computing = sum(rank.split.compute for rank in ranks) / len(ranks) / model.seconds
        who = "1 rank computes" if len(ranks) == 1 else f"{len(ranks)} ranks compute"
        sentence = f"All well: {who} {_percent(computing)} of each step"
        if self.speed_up is not None and len(ranks) > 1:
            sentence += f", {self.speed_up:.1f} times as fast as the fastest alone"
        gained = model.gained_by_compression(self.link)
        if gained is not None and gained > WORTH_ADVICE * model.seconds:
            sentence += f"; compression {model.compression} saves about {_time(gained)}"
        return Finding("well", f"{sentence}.")

    # --- words --------------------------------------------------------------------------------------------------------

    def _found(self, cause: str, sentence: str, culprit: RankView | str = "", saving: float = 0.0) -> Finding:
        if self.speed_up is not None and len(self.ranks) > 1 and self.speed_up < 1.05:
            sentence += f". The fastest alone would be {'as fast' if self.speed_up > 0.95 else 'faster'}"
        name = culprit if isinstance(culprit, str) else self.names.culprit(culprit)
        sentence = _RANK.sub("Rank", sentence)  # names of machines stay as they are
        return Finding(cause, f"{sentence}.", name, max(0.0, saving))

    def _waiting_for(self, names: Sequence[str]) -> str:
        """Who waits how long for those with `names`; empty if hardly anyone does."""
        longest = self.model.longest_wait
        if longest - self.model.turns() <= LATE * self.model.seconds:
            return ""
        first = [rank for rank in self.ranks if rank.split.waiting >= ALIKE * longest]
        waiters = self.names.titles(first)
        who = (
            "The others"
            if len(waiters) > 2 and len(first) + len(self.model.late) == len(self.ranks)
            else listed(waiters)
        )
        verb = "waits" if len(waiters) == 1 else "wait"
        return f"{who} {verb} {_percent(longest / self.model.seconds)} of each step for {listed(names)}"


def why_nothing(ranks: Sequence[RankView]) -> str:
    """Return why no rank makes steps."""
    if not ranks:
        return "No rank has been seen yet."
    states = {rank.state for rank in ranks}
    if states <= set(ENDED):
        return "All ranks have ended."
    if "silent" in states and not states - {"silent", *ENDED}:
        return "Nothing has been heard of this run for a while."
    names = RankNames(ranks)
    silent = [rank for rank in ranks if rank.state == "silent"]
    if silent:
        heard = max(rank.heard for rank in silent)
        return f"All wait: nothing has been heard of {listed(names.titles(silent))} for {heard:.0f} s."
    if "paused" not in states:
        return "No step has been seen yet."
    lost = [rank for rank in ranks if rank.state in ENDED]
    ended = f" {listed(names.titles(lost))} {'has' if len(lost) == 1 else 'have'} ended." if lost else ""
    return f"Paused: no rank has made a step for a while.{ended}"


_KINDS: Final = {"unknown": "", "wifi": "Wi-Fi", "ethernet": "Ethernet", "thunderbolt": "Thunderbolt"}
"""Names of links for people."""


def _condition(rank: RankView) -> list[str]:
    """Why a machine may be slower than it could be."""
    vitals = rank.vitals
    facts = ["on battery"] if vitals.get("plugged") == 0 else []
    return [*facts, f"{vitals['temperature']:.0f} °C"] if vitals.get("temperature", 0.0) >= HOT else facts


def bits(bytes_per_second: float) -> str:
    """A speed in bits per second, such as `84 Mbit/s`."""
    value = bytes_per_second * 8
    return f"{value / 1e9:.3g} Gbit/s" if value >= 1e9 else f"{value / 1e6:.3g} Mbit/s"


def _percent(part: float) -> str:
    return f"{100 * part:.0f}%"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms" if seconds >= 0.001 else "under 1 ms"
