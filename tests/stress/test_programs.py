"""Ten thousand random collectives over real sockets."""

from __future__ import annotations

from tests.cluster.test_programs import check_programs


def test_ten_thousand_random_collectives_equal_numpy_and_each_other() -> None:
    done, world_size = 0, 1
    while done < 10_000:
        world_size = world_size % 8 + 1
        done += check_programs(world_size, examples=60, length=20)
    print(f"{done} collectives")
