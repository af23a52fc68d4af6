"""Metrics: exact where they say exact, within the stated error elsewhere, and right under many threads."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict
from threading import Thread

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ringfort import DistributedContext, SimulatedBackend
from ringfort.errors import InvalidArgumentError
from ringfort.telemetry.metrics import LARGEST, RELATIVE_ERROR, SMALLEST, DistributedMetrics, Histogram
from ringfort.testing import run_ranks

in_range = st.one_of(st.just(0.0), st.floats(SMALLEST, LARGEST), st.floats(1e-6, 60.0))
percents = st.sampled_from([0.0, 1.0, 25.0, 50.0, 90.0, 95.0, 99.0, 99.9, 100.0])


def filled(values: list[float]) -> Histogram:
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    return histogram


@given(st.lists(in_range, min_size=1, max_size=300), percents)
def test_a_percentile_is_within_the_stated_error_of_numpys(values: list[float], percent: float) -> None:
    true = float(np.percentile(values, percent, method="inverted_cdf"))
    # The last billionth is for rounding in the logarithm at the edge between two buckets.
    assert filled(values).percentile(percent) == pytest.approx(true, rel=RELATIVE_ERROR + 1e-9, abs=0)


@given(st.lists(in_range, min_size=1, max_size=100))
def test_count_and_largest_are_exact_and_the_sum_up_to_rounding(values: list[float]) -> None:
    histogram = filled(values)
    assert histogram.count == len(values)
    assert histogram.total == pytest.approx(math.fsum(values), rel=1e-12)
    assert histogram.largest == max(values)


def test_memory_is_bounded_however_wide_the_values() -> None:
    generator = np.random.default_rng(1)
    histogram = filled([10.0 ** float(e) for e in generator.uniform(-30, 30, 20_000)])
    assert len(histogram._buckets) < 1300
    assert histogram.count == 20_000


def test_values_beyond_the_range_count_as_its_ends() -> None:
    assert filled([1e-12] * 3 + [5.0]).percentile(50) == pytest.approx(0, abs=SMALLEST)
    beyond = filled([1.0, 1e15])
    assert beyond.percentile(100) == pytest.approx(LARGEST, rel=2 * RELATIVE_ERROR)
    assert beyond.largest == 1e15


def test_a_histogram_of_nothing_has_percentile_zero() -> None:
    assert Histogram().percentile(50) == 0.0


@pytest.mark.parametrize("value", [-1e-9, math.inf, math.nan])
def test_a_value_that_is_no_duration_is_refused_and_not_counted(value: float) -> None:
    metrics = DistributedMetrics()
    with pytest.raises(InvalidArgumentError, match="value="):
        metrics.record_operation("all_reduce", value, 4)
    assert metrics.snapshot().operations == {}


@pytest.mark.parametrize("percent", [-1, 100.5, math.nan])
def test_a_percentage_outside_the_scale_is_refused(percent: float) -> None:
    with pytest.raises(InvalidArgumentError, match="percent="):
        Histogram().percentile(percent)


@given(st.lists(st.floats(0, 1e13, allow_nan=False), max_size=50))
def test_many_at_once_are_what_one_after_the_other_is(values: list[float]) -> None:
    one_by_one, at_once = Histogram(), Histogram()
    for value in values:
        one_by_one.record(value)
    at_once.record_all(values)
    assert (at_once.count, at_once.largest, at_once.smallest) == (
        one_by_one.count,
        one_by_one.largest,
        one_by_one.smallest,
    )
    assert math.isclose(at_once.total, one_by_one.total)
    for percent in (0, 10, 50, 99, 100):
        assert math.isclose(at_once.percentile(percent), one_by_one.percentile(percent), rel_tol=2 * RELATIVE_ERROR)


def test_recent_calls_are_counted_once_in_a_snapshot_or_when_there_are_many() -> None:
    metrics = DistributedMetrics()
    recent = metrics.recent("all_reduce", 4)
    recent += [0.5, 0.25]
    metrics.recent("all_reduce", 8).append(1.0)
    metrics.record_operation("all_reduce", 2.0, 16)
    for _ in range(2):
        seen = metrics.snapshot().operations["all_reduce"]
        assert (seen.count, seen.bytes, seen.seconds_total, seen.max) == (4, 32, 3.75, 2.0)
    recent.append(4.0)
    metrics.count_recent()
    assert not recent
    assert metrics.snapshot().operations["all_reduce"].max == 4.0
    recent.append(4.0)
    metrics.reset()
    assert not metrics.snapshot().operations


def test_operations_are_kept_apart_by_name() -> None:
    metrics = DistributedMetrics()
    metrics.record_operation("broadcast", 0.5, 10)
    metrics.record_operation("all_reduce", 0.25, 4)
    metrics.record_operation("all_reduce", 0.75, 8)
    operations = metrics.snapshot().operations
    assert list(operations) == ["all_reduce", "broadcast"]
    assert (operations["all_reduce"].count, operations["all_reduce"].bytes) == (2, 12)
    assert (operations["all_reduce"].seconds_total, operations["all_reduce"].max) == (1.0, 0.75)
    assert operations["broadcast"].p50 == operations["broadcast"].max == 0.5


def test_a_failed_call_is_counted_but_leaves_bytes_and_durations_alone() -> None:
    metrics = DistributedMetrics()
    metrics.record_operation("barrier", 0.001, 0)
    metrics.record_operation("barrier", 60.0, 7, failed=True)
    barrier = metrics.snapshot().operations["barrier"]
    assert (barrier.count, barrier.failures, barrier.bytes) == (2, 1, 0)
    assert (barrier.seconds_total, barrier.max) == (0.001, 0.001)


def test_an_operation_that_only_failed_has_zero_durations() -> None:
    metrics = DistributedMetrics()
    metrics.record_operation("barrier", 60.0, 0, failed=True)
    assert metrics.snapshot().operations["barrier"].p99 == 0.0


def test_traffic_is_counted_in_bytes_and_messages() -> None:
    metrics = DistributedMetrics()
    metrics.add_sent(100)
    metrics.add_sent(50, messages=3)
    metrics.add_received(7)
    snapshot = metrics.snapshot()
    assert (snapshot.bytes_sent, snapshot.messages_sent) == (150, 4)
    assert (snapshot.bytes_received, snapshot.messages_received) == (7, 1)


class MeddledSize(int):
    """A size that, in the very moment it is added, has another thread try to count 1 as well."""

    def __new__(cls, size: int, meddle: Callable[[int], None]) -> MeddledSize:
        made = super().__new__(cls, size)
        made.other = Thread(target=meddle, args=(1,))
        return made

    other: Thread

    def __radd__(self, before: int) -> int:
        self.other.start()
        self.other.join(0.05)  # ends at once if nothing keeps it out, and its 1 is then overwritten
        return before + int(self)


@pytest.mark.parametrize("counter", ["operation", "sent", "received"])
def test_no_record_is_lost_between_threads(counter: str) -> None:
    metrics = DistributedMetrics()

    def record(nbytes: int) -> None:
        metrics.record_operation("all_reduce", 1e-3, nbytes)

    add = {"operation": record, "sent": metrics.add_sent, "received": metrics.add_received}[counter]
    size = MeddledSize(10, add)
    add(size)
    size.other.join()
    snapshot = metrics.snapshot()
    counted = snapshot.bytes_sent + snapshot.bytes_received + sum(op.bytes for op in snapshot.operations.values())
    assert counted == 11


def test_a_snapshot_does_not_change_afterwards() -> None:
    metrics = DistributedMetrics()
    metrics.record_operation("all_reduce", 1.0, 4)
    before = metrics.snapshot()
    copy = before.to_dict()
    metrics.record_operation("all_reduce", 2.0, 4)
    metrics.add_sent(1)
    assert before.to_dict() == copy
    with pytest.raises(FrozenInstanceError):
        before.bytes_sent = 1  # type: ignore[misc]


def test_reset_starts_again_from_nothing() -> None:
    metrics = DistributedMetrics()
    empty = metrics.snapshot()
    metrics.record_operation("all_reduce", 1.0, 4)
    metrics.add_sent(1)
    metrics.add_received(1)
    metrics.reset()
    assert metrics.snapshot() == empty


def test_a_snapshot_goes_through_json_unharmed() -> None:
    metrics = DistributedMetrics()
    metrics.record_operation("all_reduce", 0.25, 4)
    snapshot = metrics.snapshot()
    back = json.loads(json.dumps(snapshot.to_dict()))
    assert back == snapshot.to_dict()
    assert back["operations"]["all_reduce"] == asdict(snapshot.operations["all_reduce"])


def test_a_snapshot_prints_as_an_aligned_table_in_human_units() -> None:
    metrics = DistributedMetrics()
    metrics.record_operation("all_reduce", 0.25, 3 * 1024 * 1024)
    metrics.record_operation("barrier", 42e-6, 0)
    metrics.add_sent(1536, messages=2)
    head, reduce, barrier, sent, received = str(metrics.snapshot()).splitlines()
    assert len(head) == len(reduce) == len(barrier)
    assert reduce.split() == ["all_reduce", "1", "0", "3.0", "MiB", *["250", "ms"] * 5]
    assert barrier.split() == ["barrier", "1", "0", "0", "B", *["42", "us"] * 5]
    assert sent == "sent 1.5 KiB in 2 messages"
    assert received == "received 0 B in 0 messages"


def test_contexts_may_count_in_one_place_and_start_it_again() -> None:
    metrics = DistributedMetrics()
    backends = SimulatedBackend.create_group(1) + SimulatedBackend.create_group(1)
    contexts = [DistributedContext(backend, metrics=metrics) for backend in backends]
    for ctx in contexts:
        ctx.all_reduce(np.ones(4))
    assert [ctx.metrics_snapshot().operations["all_reduce"].count for ctx in contexts] == [2, 2]
    contexts[0].reset_metrics()
    assert not contexts[1].metrics_snapshot().operations
    contexts[1].all_reduce(np.ones(4))
    assert contexts[0].metrics.snapshot().operations["all_reduce"].count == 1
    for ctx in contexts:
        ctx.close()


def test_the_traffic_before_a_reset_is_not_told_again() -> None:
    def work(backend: SimulatedBackend) -> list[int]:
        ctx = DistributedContext(backend)
        ctx.barrier()
        before = ctx.metrics_snapshot().messages_sent
        ctx.reset_metrics()
        after = ctx.metrics_snapshot().messages_sent
        ctx.barrier()
        return [before, after, ctx.metrics_snapshot().messages_sent]

    group = SimulatedBackend.create_group(2)
    assert run_ranks(group, work) == [[1, 0, 1]] * 2
    run_ranks(group, lambda backend: backend.close())


def test_what_was_exchanged_is_told_once_however_it_is_counted() -> None:
    metrics = DistributedMetrics()
    durations, others = metrics.recent("all_reduce", 8), metrics.recent("barrier", 0)
    assert durations is not None
    assert others is not None
    durations += [0.5, 0.25]
    others.append(0.125)
    metrics.record_operation("all_reduce", 100.0, 1000)  # who waits for that says so itself
    metrics.record_operation("broadcast", 100.0, 5000)
    assert metrics.exchanged() == (0.875, 1016)
    assert metrics.exchanged() == (0.0, 0)
    durations.append(1.0)
    metrics.count_recent()
    durations.append(2.0)
    assert metrics.exchanged() == (3.0, 16)
    durations.append(4.0)
    metrics.reset()
    metrics.record_operation("reduce_scatter", 1.0, 7)
    assert metrics.exchanged() == (4.0, 7)
    assert metrics.snapshot().operations["reduce_scatter"].bytes == 7
