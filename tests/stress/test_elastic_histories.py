"""Thousands of random histories of elastic runs, and a proof that each rule of the protocol is needed.

ELASTIC_THOUSANDS says how many thousands of each kind. On two idle cores a thousand of the model take half a minute,
and a thousand on simulated hosts a minute and a half.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.helpers.elastic_faults import POINTS, STRIKES
from tests.helpers.elastic_network import History
from tests.helpers.elastic_rules import RULES, Kind, first_violation, violations, without_rule

pytestmark = pytest.mark.timeout(3600)  # whoever runs them: a busy machine takes ten times as long as an idle one

THOUSANDS = int(os.environ.get("ELASTIC_THOUSANDS", "3"))
FOUND_BY: dict[str, Kind] = {
    "every closed link is a death": "network",
    "seats newcomers while a step is pending": "seating",
    "trusts the joiner's step": "seating",
    "tells without the fence": "seating",
    "drops what was sent in recovery": "sending",
    "adds sums that overlap": "sending",
    "adds sums that overlap and checks no coverage": "sending",
    "lets a witness win a tie": "witnessed network",
    "goes on without a holder of the state": "witnessed network",
    "forgets what was given up": "meeting",
    "forgets a proposal that may be committed": "sending",
    "mixes sums of steps of other sizes": "scaled",
}
"""The histories that find out what is missing, if not those of the model."""
KINDS: list[Kind] = ["model", "seating", "sending", "scaled", "network", "scaled network", "witnessed network"]
IMPLIED = {"takes the oldest of several held results"}
"""Another rule keeps two results for one step from ever meeting: a peer that did not take part in an epoch is no member
of those that only shrink it, and is seated only when nobody holds anything. So the members of one epoch never hold two
results. tests/unit/training/elastic/test_protocol.py has the rule by itself."""


@pytest.mark.parametrize("thousand", range(THOUSANDS))
@pytest.mark.parametrize("kind", KINDS)
def test_no_history_breaks_a_promise(kind: Kind, thousand: int) -> None:
    assert violations(kind, range(1000 * thousand, 1000 * (thousand + 1))) == []


def test_two_runs_that_meet_break_no_promise_but_that_of_progress() -> None:
    assert first_violation("meeting", range(1000 * THOUSANDS)) is None


def test_every_kind_of_fault_comes_at_each_point_of_the_protocol() -> None:
    hits: Counter[tuple[str, str]] = Counter()
    for seed in range(400):
        history = History(seed)
        assert history.run() is None
        hits += history.world.faults.hits
    assert {(point, kind) for point in POINTS for kind in STRIKES} <= hits.keys()


@pytest.mark.parametrize("rule", sorted(RULES.keys() - IMPLIED))
def test_a_run_without_one_of_its_rules_is_found_out(rule: str) -> None:
    with without_rule(rule):
        assert first_violation(FOUND_BY.get(rule, "model"), range(1000)) is not None
