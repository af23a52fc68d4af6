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
from ringfort.training.elastic.protocol import Adopt, Continue, Gather, Replica, Result, Standstill, Token
from tests.helpers import elastic_model, elastic_model_kinds, elastic_network, elastic_numbers, elastic_program
from tests.helpers.elastic_numbers import Saved, Total
from tests.helpers.histories import dies_with_its_link

Kind = Literal["model", "seating", "sending", "meeting", "scaled", "network", "scaled network", "witnessed network"]
"""The random histories of elastic_model.py, all or those that are about seating, about sending results, about two runs
that meet or about steps that grow with the members; or those of elastic_network.py, with steps that grow too, or with
witnesses."""

MAKE: Final[dict[Kind, Callable[[int], Any]]] = {
    "model": elastic_model.History,
    "seating": elastic_model_kinds.Seating,
    "sending": elastic_model_kinds.Sending,
    "meeting": elastic_model_kinds.Meeting,
    "scaled": elastic_model_kinds.Scaled,
    "network": elastic_network.History,
    "scaled network": partial(elastic_network.History, scaled=True),
    "witnessed network": lambda seed: elastic_network.History(seed, witnesses=1 + seed % 2),
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


def _recovers_without_a_seal(original: Callable[..., Any]) -> Callable[..., Any]:
    """In recovery a member takes its own word for everybody's. In steps it waits for those of all."""

    def adopt(self: Replica, *arguments: Any) -> Generator[Any, Any, None]:
        script, value, result = original(self, *arguments), None, None
        while True:
            try:
                doing = script.send(value)
            except StopIteration:
                return
            if isinstance(doing, Gather):
                assert result is not None
                value = [msgspec.structs.replace(doing.value, digest=elastic_numbers.digest(result, 0, 1))]
            else:
                value = yield doing
                result = value or result

    return adopt


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


def _adds_sums_that_overlap(original: Callable[..., Any]) -> Callable[..., Any]:
    """All sums of one size count, also two that have the same micro-batch."""

    def settle(reports: Any, usual: int) -> Any:
        opening = original(reports, usual)
        if isinstance(opening, Continue):
            fits = [report.covered if report.opened[1] == opening.samples else frozenset() for report in reports]
            return replace(opening, kept=tuple(fits))
        return opening

    return settle


def _checks_no_coverage(original: Callable[..., Any]) -> Callable[..., Any]:
    """A step is sealed whatever the micro-batches are that its sums have."""

    def step(self: Replica, *arguments: Any, **options: Any) -> Generator[Any, Any, Any]:
        script, value = original(self, *arguments, **options), None
        while True:
            try:
                doing = script.send(value)
            except StopIteration as end:
                return end.value
            value = yield doing
            if isinstance(doing, Gather):
                first, *others = value
                everything = frozenset(range(self.data.parts(self.span)))
                value = [msgspec.structs.replace(first, covered=everything)]
                value += [msgspec.structs.replace(other, covered=frozenset()) for other in others]

    return step


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


def _lets_witnesses_win(original: Callable[..., Any]) -> Callable[..., Any]:
    """Half of the members may go on if a witness is among them."""

    def is_lawful(group: Any, epoch: Epoch, dead: Any, policy: Any, copied_at: Any = membership.NOTHING_COPIED) -> bool:
        rest = [peer for peer in epoch.peers if peer in group or peer not in dead]
        kept = [peer for peer in rest if peer in group]
        has_holder = any(peer in epoch.holders and copied_at.get(peer, 0) <= epoch.number for peer in kept)
        is_tie = 2 * len(kept) == len(rest) and has_holder and not set(kept) <= set(epoch.holders)
        return is_tie or original(group, epoch, dead, policy, copied_at)

    return is_lawful


def _needs_no_holder(original: Callable[..., Any]) -> Callable[..., Any]:
    """More than half of the members may go on, whoever they are."""

    def is_lawful(group: Any, epoch: Epoch, dead: Any, policy: Any, copied_at: Any = membership.NOTHING_COPIED) -> bool:
        rest = [peer for peer in epoch.peers if peer in group or peer not in dead]
        return 2 * sum(peer in group for peer in rest) > len(rest) or original(group, epoch, dead, policy, copied_at)

    return is_lawful


def _forgets_what_was_given_up(original: Callable[..., Any]) -> Callable[..., Any]:
    """Who has copied another state counts as a holder of those from before."""
    return lambda group, epoch, dead, policy, _=None: original(group, epoch, dead, policy)


PENDING, STEP = "which comes first", "I am at step"
RULES: Final[dict[str, list[tuple[Any, str, Any]]]] = {
    "applies without a seal": [(Replica, "epoch", _applies_without_a_seal)],
    "recovers without a seal": [(Replica, "_adopt", _recovers_without_a_seal)],
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
    "lets a witness win a tie": [(membership, "is_lawful", _lets_witnesses_win)],
    "goes on without a holder of the state": [(membership, "is_lawful", _needs_no_holder)],
    "forgets what was given up": [(membership, "is_lawful", _forgets_what_was_given_up)],
    "every closed link is a death": [(Links, "lose", dies_with_its_link)],
    "forgets a proposal that may be committed": [(Voter, "abandon", _forgets_what_it_may_commit)],
    "discards a held result": [(protocol, "settle", _discards_what_is_held)],
    "brings back what is void": [(protocol, "settle", _forgets_what_is_void)],
    "drops what was sent in recovery": [(Replica, "_compare", _drops_what_was_sent)],
    "counts learners": [(Voter, "learn", _learns_as_a_member)],
    "deals by its own speed": [(Replica, "_deal_after", _deals_by_its_own_speed)],
    "adds sums that overlap": [(protocol, "settle", _adds_sums_that_overlap)],
    "adds sums that overlap and checks no coverage": [
        (protocol, "settle", _adds_sums_that_overlap),
        (Replica, "_step", _checks_no_coverage),
    ],
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
