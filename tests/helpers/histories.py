"""Many histories on all cores, and the rules of membership with one rule removed at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import repeat
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

from ringfort.cluster.core import membership
from ringfort.cluster.core.election import ElectionManager
from ringfort.cluster.core.membership import Voter
from ringfort.cluster.core.peer_links import Links
from ringfort.cluster.core.proposer import Proposer
from ringfort.testing.histories import History, Violation


def violations(seeds: Iterable[int], duration: float = 20.0) -> list[str]:
    """Run the histories of all `seeds` on all cores. Return those that break a rule, with their traces."""
    with ProcessPoolExecutor(os.cpu_count() or 1, mp_context=get_context("spawn")) as pool:
        found = pool.map(_violation_of, seeds, repeat(duration), chunksize=8)
        return [str(one) for one in found if one is not None]


def _violation_of(seed: int, duration: float) -> Violation | None:
    return History(seed, duration).run()


def first_violation(seeds: Iterable[int]) -> str | None:
    """Return the first of `seeds` that breaks a safety rule, and how."""
    for seed in seeds:
        found = History(seed).run()
        if found is not None and "no agreement" not in found.why:
            return f"seed {seed}: {found.why}"
    return None


# --- the law without one of its rules ---------------------------------------------------------------------------------


def _any_number(original: Callable[..., Any]) -> Callable[..., Any]:
    def objection(self: Voter, proposal: Any) -> str | None:
        why = original(self, proposal)
        return None if why is not None and "is not above" in why else why

    return objection


def _commit_on_majority(original: Callable[..., Any]) -> Callable[..., Any]:
    def accepted(self: Any, now: float, peer: str, number: int) -> Any:
        pending = self.pending
        if pending is not None and pending.epoch.number == number:
            self._accepted.add(peer)
            if 2 * len(self._accepted) > len(pending.epoch.members):
                self._accepted |= set(pending.epoch.peers)
        return original(self, now, peer, number)

    return accepted


def _blind_to_doubts(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: replace(original(*arguments), doubts=())


def _keeps_its_epoch(original: Callable[..., Any]) -> Callable[..., Any]:
    def accept(self: Voter, proposal: Any) -> None:
        kept = self.current
        original(self, proposal)
        self.current = kept

    return accept


def _half_is_enough(original: Callable[..., Any]) -> Callable[..., Any]:
    def is_lawful(group: Any, epoch: Any, dead: Any, policy: str, copied_at: Any = None) -> bool:
        rest = {peer for peer in epoch.peers if peer in group or peer not in dead}
        return not epoch.lineages or 2 * len(rest & set(group)) >= len(rest)

    return is_lawful


def dies_with_its_link(original: Callable[..., Any]) -> Callable[..., Any]:
    def lose(self: Links, contact: Any, why: str) -> None:
        if contact.report is not None and not contact.hung_up:
            self._state.departed[contact.peer] = contact.report.votes
        original(self, contact, why)

    return lose


def _votes_again(original: Callable[..., Any]) -> Callable[..., Any]:
    def answer(self: Any, now: float, peer: str, term: Any) -> None:
        self._voted = 0
        original(self, now, peer, term)

    return answer


BROKEN_LAWS: dict[str, list[tuple[Any, str, Any]]] = {
    "accepts any number": [(Voter, "objection", _any_number)],
    "commits on a majority": [(Proposer, "accepted", _commit_on_majority)],
    "any group goes on": [(membership, "is_lawful", lambda _: lambda *_: True)],
    "half goes on": [(membership, "is_lawful", _half_is_enough)],
    "ignores doubts": [
        (membership, "basis_of", _blind_to_doubts),
        (Voter, "_is_known", lambda _: lambda *_: True),
    ],
    "stays in its epoch": [(Voter, "accept", _keeps_its_epoch)],
    "every closed link is a death": [(Links, "lose", dies_with_its_link)],
    "forgets its earlier processes": [(Voter, "recall", lambda _: lambda *_: None)],
    "votes twice": [(ElectionManager, "_answer", _votes_again)],
}


@contextmanager
def broken_law(name: str) -> Iterator[None]:
    """Run with one rule removed."""
    changes = BROKEN_LAWS[name]
    patches = [patch.object(where, attribute, make(getattr(where, attribute))) for where, attribute, make in changes]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()
