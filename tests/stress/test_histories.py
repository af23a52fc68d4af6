"""Thousands of random histories of a cluster, and a proof that the rules they are held to can be broken.

A thousand take two minutes on two cores, and a quarter of one on sixteen: THOUSANDS says how many.
"""

from __future__ import annotations

import os

import pytest

from tests.helpers.histories import BROKEN_LAWS, broken_law, first_violation, violations

THOUSANDS = int(os.environ.get("THOUSANDS", "5"))
# This needs a schedule that chance hardly finds; it is refused in tests/unit/cluster/test_membership.py.
NOT_BY_CHANCE = {"accepts any number"}


@pytest.mark.parametrize("thousand", range(THOUSANDS))
def test_no_history_breaks_a_rule(thousand: int) -> None:
    assert violations(range(1000 * thousand, 1000 * (thousand + 1)), duration=12.0) == []


@pytest.mark.parametrize("law", sorted(BROKEN_LAWS.keys() - NOT_BY_CHANCE))
def test_a_law_without_one_of_its_rules_is_found_out(law: str) -> None:
    with broken_law(law):
        assert first_violation(range(2000)) is not None
