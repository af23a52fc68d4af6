"""The five pictures of docs/watching.md: the sentence on top is right, and its prediction is what is then measured."""

from __future__ import annotations

import pytest

from benchmarks.watching import SCENARIOS, SECONDS, provoke
from tests.helpers.namespaces import needs_namespaces

pytestmark = needs_namespaces


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_sentence_names_the_cause_and_predicts_the_saving(name: str) -> None:
    found = provoke(name, SECONDS)
    print(found)
    assert found.holds, found
