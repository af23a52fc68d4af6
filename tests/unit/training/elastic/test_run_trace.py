"""What an elastic run writes into the trace of its process."""

from __future__ import annotations

from typing import Any

from ringfort import SimulatedBackend
from ringfort.cluster.core.events import EpochStarted
from ringfort.cluster.core.peer_messages import Epoch, Member
from ringfort.telemetry.step_time import Phase
from ringfort.telemetry.trace import Trace
from ringfort.training.elastic.run_trace import RunTrace
from tests.helpers.traces import Written, by_rank

EPOCH = Epoch(3, "n.a", (Member("n.a", name="attic"), Member("n.b", name="barn")))


def written(own: Trace) -> Written:
    assert own.folder is not None
    [found] = by_rank(own.folder)
    return found


def test_a_learner_says_how_far_it_is_and_a_member_writes_steps(own: Trace) -> None:
    run, backends = RunTrace("mine", 100), SimulatedBackend.create_group(2)
    member: Any = backends[1]
    run.follows()
    found = written(own)
    assert (found.header.rank, found.header.role, found.header.run) == (-1, "learner", "mine")
    run.replayed(41)
    own.mark(run)  # an optimizer: the run counts its steps itself
    assert (written(own).step, written(own).steps) == (41, [])
    run.formed(member, EPOCH)
    header = written(own).header
    assert (header.rank, header.world_size, header.epoch, header.role) == (1, 2, 3, "member")
    assert header.total_steps == 100
    own.time.add(Phase.EXCHANGE, 1e-9)
    run.reduced(12)
    own.time.add(Phase.EXCHANGE, 1e3)  # the tokens are a collective too
    run.has_tokens(1e3, 64)
    run.sealed(42, 0.25)  # which rank 0 tells
    own.log({"loss": 0.5})
    run.applied(42, 2)
    found = written(own)
    [step] = found.steps
    assert (step.number, step.samples) == (42, 12)
    assert step.exchange <= 1e-9
    assert step.seal > 0
    assert found.values["loss"] == {42: 0.5}
    run.close()
    assert written(own).header.role == ""
    for backend in backends:
        backend.close()


def test_a_pause_is_told_once_and_so_is_its_end(own: Trace) -> None:
    run, [backend] = RunTrace("mine", 100), SimulatedBackend.create_group(1)
    ranks: Any = backend
    run.on_event(EpochStarted(EPOCH))
    run.formed(ranks, EPOCH)
    for _ in range(2):
        with run.left_out():
            run.pauses("Paused: 1 of at least 2 members are here")
    for step in (7, 8):
        run.reduced(1)
        run.sealed(step, None)
        run.applied(step, 2)
    assert written(own).events == [
        ("epoch", "Epoch 3 has begun: attic, barn"),
        ("paused", "Paused: 1 of at least 2 members are here"),
        ("resumed", "Training continues from step 7, with 2 members"),
    ]
    run.close()
    backend.close()


def test_rank_0_tells_the_loss_of_a_step_until_the_program_logs_one(own: Trace) -> None:
    run, [backend] = RunTrace("mine", 100), SimulatedBackend.create_group(1)
    ranks: Any = backend
    run.formed(ranks, EPOCH)
    run.sealed(1, 4.0)
    run.sealed(2, None)  # of a program that tells no losses
    own.log({"loss": 3.0}, 3)
    run.sealed(4, 2.0)
    assert written(own).values["loss"] == {1: 4.0, 3: 3.0}
    run.close()
    backend.close()


def test_a_run_that_formed_no_group_opens_no_trace(own: Trace) -> None:
    RunTrace("mine", 100).close()
    assert own.folder is None
