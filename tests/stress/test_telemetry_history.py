"""A day of reports of 32 ranks, in virtual time."""

from __future__ import annotations

from tests.helpers.telemetry import Rank, SimulatedRun, size_of

HOUR = 3600.0


def test_a_day_of_32_ranks_stays_in_bounded_memory() -> None:
    ranks = [Rank(f"machine{n}", compute=0.9 + n / 1000, vitals={"cpu": 0.5, "memory": 1e9}) for n in range(32)]
    run = SimulatedRun(ranks, wire=0.05)
    run.advance(HOUR)
    after_an_hour = size_of(run.history)
    run.advance(23 * HOUR)
    after_a_day = size_of(run.history)
    print(f"\n32 ranks: {after_an_hour / 1e6:.1f} MB after an hour, {after_a_day / 1e6:.1f} MB after a day")
    assert after_a_day < 1.1 * after_an_hour
    assert len(run.view().ranks) == 32
