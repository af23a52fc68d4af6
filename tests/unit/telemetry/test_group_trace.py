"""What groups tell the trace of their process."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from ringfort import DistributedContext, PeerLostError, SimulatedBackend
from ringfort.telemetry.trace import Trace
from ringfort.testing import run_ranks
from ringfort.testing.ranks import at_once
from tests.helpers.traces import Written, by_rank


def written(own: Trace) -> Written:
    assert own.folder is not None
    [found] = by_rank(own.folder)
    return found


def contexts(world_size: int) -> list[DistributedContext]:
    return [DistributedContext(backend) for backend in SimulatedBackend.create_group(world_size)]


def test_the_main_group_is_described_and_not_its_sub_groups(own: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = contexts(3)
    assert own.folder is None  # nobody has said that one of them is this process's
    for told, run in (("none", ""), ("mine", "mine")):  # by the launcher
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", told)
        ranks[2].show()
        assert written(own).header.run == run
    header = written(own).header
    assert (header.rank, header.world_size, header.run) == (2, 3, "mine")
    sub = ranks[2].sub_group([1, 2])
    assert sub is not None
    assert sub.group.rank == 1
    assert written(own).header == header
    at_once(*(rank.close for rank in ranks))


def test_fast_collectives_and_slow_ones_are_time_of_the_step(own: Trace) -> None:
    first, second = contexts(2)
    first.show()
    small = [np.ones(1, np.float32) for _ in range(2)]

    def work(context: DistributedContext) -> None:
        for _ in range(5):
            context.all_reduce(small[context.rank])
        context.broadcast(np.ones(3))
        context.all_reduce(np.ones(1000), async_op=True).wait()

    own.restart_step()
    run_ranks([first, second], work)
    own.step_done()
    [step] = written(own).steps
    assert 0 < step.exchange <= step.seconds
    assert first.metrics.exchanged() == second.metrics.exchanged() == (0.0, 0)
    assert written(own).sent[-1].sent[1] > 8000
    first.close()
    second.close()


def _reduce(context: DistributedContext, how: str | None) -> None:
    context.all_reduce(np.ones(50_000, np.float32), compression=how)


def test_compression_has_a_name_a_time_and_a_price(own: Trace) -> None:
    first, second = contexts(2)
    first.show()

    own.restart_step()
    for how in ("int8", "int8", None):
        run_ranks([first, second], partial(_reduce, how=how))
        own.step_done()
    found = written(own)
    assert (found.header.codec, found.header.gradient_bytes) == ("int8", 2 * 200_000)  # both ranks are in this process
    assert found.header.codec_seconds["int8"] > 0
    assert [step.number for step in found.steps if step.codec > 0] == [1, 2]
    first.close()
    second.close()


def test_a_lost_rank_is_an_event_of_the_main_group_once(own: Trace) -> None:
    first, second = contexts(2)
    first.show()
    second.backend.kill()  # type: ignore[attr-defined]
    for _ in range(3):
        with pytest.raises(PeerLostError):
            first.barrier()
    [(kind, text)] = written(own).events
    assert kind == "lost"
    assert text.startswith("Lost rank 1: ")
    first.close()
    second.close()
