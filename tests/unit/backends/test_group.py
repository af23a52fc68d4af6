"""What is true only for one set of ranks lives and ends with it."""

from __future__ import annotations

import re

import pytest

from ringfort import EpochEndedError, SimulatedBackend, SubBackend
from ringfort.testing import run_ranks
from tests.helpers.source import PACKAGE


class Plans:
    pass


class Costs:
    pass


def test_a_group_has_one_part_of_each_kind() -> None:
    backends = SimulatedBackend.create_group(2)
    group, other = (backend.group for backend in backends)
    assert group.part(Plans) is group.part(Plans)
    assert isinstance(group.part(Costs), Costs)
    assert group.part(Plans) is not other.part(Plans)
    assert group.part(Plans) is not group.sub_group([0, 1]).part(Plans)
    run_ranks(backends, lambda backend: backend.close())


def test_what_ends_a_group_ends_its_sub_groups_and_the_first_reason_stays() -> None:
    (backend,) = SimulatedBackend.create_group(1)
    group = backend.group
    inner = group.sub_group([0]).sub_group([0])
    inner.check()
    group.fail(lambda: EpochEndedError("epoch 3 of 2", "a member left"))
    group.fail(lambda: EpochEndedError("epoch 4 of 2", "later"))
    for ended in (group, inner):
        with pytest.raises(EpochEndedError, match="epoch 3 of 2 has ended: a member left"):
            ended.check()
    backend.close()


def test_every_backend_and_every_sub_group_has_a_group_of_its_own() -> None:
    backends = SimulatedBackend.create_group(2)
    sub = SubBackend(backends[0], [0, 1])
    assert len({id(backend.group) for backend in (*backends, sub, SubBackend(sub, [0]))}) == 4
    run_ranks(backends, lambda backend: backend.close())


def test_a_sub_group_of_what_has_ended_is_refused_even_alone() -> None:
    (backend,) = SimulatedBackend.create_group(1)
    alone = SubBackend(backend, [0])
    backend.group.fail(lambda: EpochEndedError("epoch 3 of 2", "a member left"))
    for call in (alone.barrier, lambda: SubBackend(alone, [0]), lambda: SubBackend(backend, [0])):
        with pytest.raises(EpochEndedError):
            call()
    backend.close()


def test_no_module_keeps_what_belongs_to_a_group_in_a_table_of_its_own() -> None:
    """Such a table outlives the ranks that what is in it was measured, planned or agreed with."""
    keyed_by_group = re.compile(r"WeakKeyDictionary\[(\w*Backend|DistributedContext)\b")
    assert [path for path in PACKAGE.rglob("*.py") if keyed_by_group.search(path.read_text())] == []
