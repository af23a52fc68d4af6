"""Many histories of elastic runs on all cores, and the rules of elastic training with one rule removed at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import repeat
from multiprocessing import get_context
from typing import Any, Final, Literal
from unittest.mock import patch

import msgspec

from ringfort.cluster.core import membership, proposer, run_members
from ringfort.cluster.core.membership import Voter
from ringfort.cluster.core.peer_links import Links
from ringfort.cluster.core.peer_messages import Epoch, Member, Votes
from ringfort.training.elastic import protocol
from ringfort.training.elastic.protocol import Adopt, Gather, Replica, Result, Standstill, Token
from tests.helpers import elastic_model, elastic_model_kinds, elastic_network, elastic_numbers, elastic_program
from tests.helpers.elastic_numbers import Saved, Total
from tests.helpers.histories import dies_with_its_link

Kind = Literal["model", "seating", "sending", "scaled", "network", "scaled network"]
"""The random histories of elastic_model.py, all or those that are about seating, about sending results or about steps
that grow with the members; or those of elastic_network.py."""

MAKE: Final[dict[Kind, Callable[[int], Any]]] = {
    "model": elastic_model.History,
    "seating": elastic_model_kinds.Seating,
    "sending": elastic_model_kinds.Sending,
    "scaled": elastic_model_kinds.Scaled,
    "network": elastic_network.History,
    "scaled network": partial(elastic_network.History, scaled=True),
}


def violations(kind: Kind, seeds: Iterable[int]) -> list[str]:
    """Run the histories of all `seeds` on all cores. Return what went wrong."""
    with ProcessPoolExecutor(os.cpu_count() or 1, mp_context=get_context("spawn")) as pool:
        return [found for found in pool.map(violation_of, repeat(kind), seeds, chunksize=8) if found is not None]


def violation_of(kind: Kind, seed: int) -> str | None:
    """Run one history. Return what went wrong."""
    return MAKE[kind](seed).run()


def first_violation(kind: Kind, seeds: Iterable[int]) -> str | None:
    """Return the first of `seeds` that breaks a promise other than progress, and how."""
    found = (violation_of(kind, seed) for seed in seeds)
    return next((why for why in found if why is not None and "no progress" not in why), None)


# --- the protocol without one of its rules ----------------------------------------------------------------------------


def _applies_without_a_seal(original: Callable[..., Any]) -> Callable[..., Any]:
    """A member takes its own token for everybody's."""

    def epoch(self: Replica, *arguments: Any) -> Generator[Any, Any, None]:
        script, value = original(self, *arguments), None
        while True:
            doing = script.send(value)
            if isinstance(doing, Gather) and isinstance(doing.value, Token):
                known = [self.held.result] if self.held else [result for _, result in self.history][-1:]
                parts = self.data.parts(self.span)
                everything = sum(elastic_numbers.digest(result, 0, 1) for result in known)
                mine = msgspec.structs.replace(doing.value, covered=frozenset(range(parts)), digest=everything)
                value = [mine, *[msgspec.structs.replace(mine, covered=frozenset(), digest=0)] * (arguments[2] - 1)]
            else:
                value = yield doing

    return epoch


def _goes_on_behind_the_fence(_: Callable[..., Any]) -> Callable[..., Any]:
    def fence(self: Replica, epoch: int) -> Standstill:
        lineage = self.mark.lineage or ("" if self.held is None else protocol.lineage_of(self.held.result.branch))
        return Standstill(self.mark, self.held is not None, lineage)

    return fence


def _discards_what_is_held(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda reports, usual: original([replace(report, held=0) for report in reports], usual)


def _takes_the_oldest(original: Callable[..., Any]) -> Callable[..., Any]:
    def settle(reports: Any, usual: int) -> Any:
        opening = original(reports, usual)
        if isinstance(opening, Adopt) and not opening.is_sealed:
            holders = [rank for rank, report in enumerate(reports) if report.held]
            return Adopt(min(holders, key=lambda rank: reports[rank].held), is_sealed=False)
        return opening

    return settle


def _forgets_what_is_void(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda reports, usual: original([replace(report, void=0) for report in reports], usual)


def _mixes_sums_of_other_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    """A sum counts whatever the size of the step was that it was computed for."""

    def settle(reports: Any, usual: int) -> Any:
        epoch, samples = max(report.opened for report in reports)
        size = samples if epoch else usual
        return original([replace(report, opened=(report.opened[0], size)) for report in reports], usual)

    return settle


def _drops_what_was_sent(original: Callable[..., Any]) -> Callable[..., Any]:
    """A result that was sent in recovery is void if copies of it differ, as a reduction is."""

    def compare(self: Replica, *arguments: Any) -> None:
        try:
            original(self, *arguments)
        except protocol.Differs:
            self._drop_void(0 if self.held is None else self.held.epoch)
            raise

    return compare


def _deals_by_its_own_speed(original: Callable[..., Any]) -> Callable[..., Any]:
    def deal_after(self: Replica, last: Any, me: int, speeds: list[int]) -> Any:
        own = [self.speed if rank == me else speed for rank, speed in enumerate(speeds)]
        return original(self, last, me, own)

    return deal_after


def _continues_the_branch(original: Callable[..., Any]) -> Callable[..., Any]:
    """What is founded from a checkpoint is taken for the run that the checkpoint was saved from."""

    def found(self: Any, *arguments: Any) -> Result:
        result = original(self, *arguments)
        saved: Saved = self.disks.get(arguments[0].host, Saved()) if len(arguments) == 2 else self.newest
        total = Total(saved.state, saved.branch)
        return msgspec.structs.replace(result, branch=saved.branch or result.branch, payload=total)

    return found


def _continues_lineages_that_ended(_: Callable[..., Any]) -> Callable[..., Any]:
    def heritage(formed: Iterable[Epoch], *_: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return tuple(dict.fromkeys(lineage for epoch in formed for lineage in epoch.lineages))[-8:], ()

    return heritage


def _without(*words: str) -> Callable[..., Any]:
    """Raise no objection with one of these words."""

    def change(original: Callable[..., Any]) -> Callable[..., Any]:
        def objection(self: Voter, *arguments: Any) -> str | None:
            why = original(self, *arguments)
            return None if why is not None and any(word in why for word in words) else why

        return objection

    return change


def _learns_as_a_member(_: Callable[..., Any]) -> Callable[..., Any]:
    """A learner takes its copy for a run of its own."""

    def learn(self: Voter, epoch: Epoch) -> None:
        alone = msgspec.structs.replace(epoch, leader=self.me, members=(Member(self.me),), ring=())
        self.votes = Votes(max(self.votes.highest, epoch.number), alone, self.votes.doubts)

    return learn


def _forgets_what_it_may_commit(original: Callable[..., Any]) -> Callable[..., Any]:
    """A leader takes what it proposed for abandoned while it still waits for answers."""
    return lambda self, _: original(self, ())


PENDING, STEP = "which comes first", "I am at step"
RULES: Final[dict[str, list[tuple[Any, str, Any]]]] = {
    "applies without a seal": [(Replica, "epoch", _applies_without_a_seal)],
    "seats newcomers while a step is pending": [(Voter, "state_objection", _without(PENDING, STEP))],
    "trusts the joiner's step": [(Voter, "state_objection", _without(STEP))],
    "tells without the fence": [(Replica, "fence", _goes_on_behind_the_fence)],
    "continues a branch that has ended": [
        (elastic_model.History, "found", _continues_the_branch),
        (elastic_program.Program, "found", _continues_the_branch),
        (membership, "heritage", _continues_lineages_that_ended),
        (proposer, "heritage", _continues_lineages_that_ended),
        (run_members, "heritage", _continues_lineages_that_ended),
        (elastic_model, "heritage", _continues_lineages_that_ended),
    ],
    "every closed link is a death": [(Links, "lose", dies_with_its_link)],
    "forgets a proposal that may be committed": [(Voter, "abandon", _forgets_what_it_may_commit)],
    "discards a held result": [(protocol, "settle", _discards_what_is_held)],
    "brings back what is void": [(protocol, "settle", _forgets_what_is_void)],
    "drops what was sent in recovery": [(Replica, "_compare", _drops_what_was_sent)],
    "counts learners": [(Voter, "learn", _learns_as_a_member)],
    "deals by its own speed": [(Replica, "_deal_after", _deals_by_its_own_speed)],
    "mixes sums of steps of other sizes": [(protocol, "settle", _mixes_sums_of_other_sizes)],
    "takes the oldest of several held results": [(protocol, "settle", _takes_the_oldest)],
}
"""What is changed to remove each rule."""


@contextmanager
def without_rule(name: str) -> Iterator[None]:
    """Run with one rule removed."""
    patches = [patch.object(where, name, make(getattr(where, name))) for where, name, make in RULES[name]]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()
