"""Random programs of collectives over real sockets. tests/stress has the long form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from ringfort import Backend, DistributedConfig, DistributedContext, SimulatedBackend
from ringfort.testing.groups import GroupFactory, closing_all, tcp_group
from ringfort.testing.ranks import results, run_ranks
from tests.helpers.programs import programs, run_program


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_random_collectives_equal_numpy_and_each_other(world_size: int) -> None:
    check_programs(world_size, examples=40, length=12)


def test_random_collectives_on_hosts_of_one_three_and_two_ranks() -> None:
    @contextmanager
    def group(world_size: int, config: DistributedConfig) -> Iterator[Sequence[Backend]]:
        hosts = (0, 1, 1, 3, 1, 3)
        with closing_all(SimulatedBackend.create_group(world_size, config=config, hosts=hosts)) as backends:
            yield backends

    check_programs(6, examples=30, length=12, group=group)


def check_programs(world_size: int, *, examples: int, length: int, group: GroupFactory = tcp_group) -> int:
    """Runs so many random programs on one group, over loopback; returns how many collectives that were."""
    done = 0
    with group(world_size, DistributedConfig(timeout=30)) as backends:
        contexts = [DistributedContext(backend) for backend in backends]

        @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(st.data())
        def run(data: st.DataObject) -> None:
            nonlocal done
            program = data.draw(programs(world_size, length))
            digests = results(run_ranks(contexts, lambda ctx: run_program(ctx, program)))
            assert len(set(digests)) == 1
            done += len(program)

        with closing_all(contexts):
            run()
    return done
