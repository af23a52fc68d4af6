"""The arena: what ranks see of each other in memory, and when they sleep, wake each other and disagree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NoReturn

import numpy as np
import pytest

from ringfort.errors import AbortedError
from ringfort.transport.arena import EAGER, ONE_PROCESS, Arena, Patience, arena_bytes, slot_bytes
from ringfort.transport.messages import Envelope
from ringfort.transport.segment import Segment

CALL = bytes(range(16))
FIRST = 10


class DisagreedError(Exception):
    pass


class FakeEngine:
    """Says what was asked of it, and does `meanwhile` in place of sleeping. It numbers ranks from `FIRST` on."""

    def __init__(self) -> None:
        self.nudged: list[int] = []
        self.slept_for: list[int] = []
        self.is_abandoned = False
        self.meanwhile: Callable[[], None] = lambda: None

    def watch(self, is_ready: Callable[[], bool], peer: int, envelope: Envelope) -> None:
        assert not is_ready()
        self.slept_for.append(peer - FIRST)
        self.meanwhile()
        assert is_ready()

    def check(self, envelope: Envelope) -> None:
        pass  # nothing has ended the group

    def nudge(self, peer: int) -> None:
        self.nudged.append(peer - FIRST)

    def abort(self, reason: str) -> None:
        self.is_abandoned = True

    def disagree(self, peer: int, operation: int, call: bytes, envelope: Envelope) -> NoReturn:
        raise DisagreedError(peer - FIRST, operation, call)


class Scene:
    def __init__(self, world_size: int, patience: Patience = ONE_PROCESS) -> None:
        self.engines = [FakeEngine() for _ in range(world_size)]
        members = range(FIRST, FIRST + world_size)
        first = Segment.create(arena_bytes(world_size))
        segments = [first, *(Segment.open(first.offer, arena_bytes(world_size)) for _ in range(world_size - 1))]
        self.arenas = [
            Arena(segment, rank, members, self.engines[rank], patience=patience)  # type: ignore[arg-type]
            for rank, segment in enumerate(segments)
        ]

    def close(self) -> None:
        for arena in self.arenas:
            arena.close()


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    scene = Scene(getattr(request, "param", 2))
    yield scene
    scene.close()


def envelope(operation: int = 1, call: bytes = CALL) -> Envelope:
    return Envelope(0, 0, operation, call)


def begin(arena: Arena, operation: int = 1, call: bytes = CALL) -> None:
    arena.begin(envelope(operation, call))
    arena.publish()


def test_who_comes_last_does_not_sleep(scene: Scene) -> None:
    a, b = scene.arenas
    begin(a)
    begin(b)
    a.wait_signed(envelope())
    b.wait_signed(envelope())
    assert [engine.slept_for for engine in scene.engines] == [[], []]


def test_who_comes_first_sleeps_and_is_woken_by_the_other(scene: Scene) -> None:
    a, b = scene.arenas
    begin(a)
    scene.engines[0].meanwhile = lambda: begin(b)
    a.wait_signed(envelope())
    assert scene.engines[0].slept_for == [1]
    assert scene.engines[1].nudged == [0]
    begin(b, 2)
    assert scene.engines[1].nudged == [0], "nobody sleeps any more"


def test_a_sleeper_that_is_interrupted_no_longer_counts_as_asleep(scene: Scene) -> None:
    a, b = scene.arenas
    begin(a)

    def interrupt() -> None:
        raise KeyboardInterrupt

    scene.engines[0].meanwhile = interrupt
    with pytest.raises(KeyboardInterrupt):
        a.wait(envelope())
    begin(b)
    assert scene.engines[1].nudged == []


@pytest.mark.parametrize("scene", [4], indirect=True)
def test_all_ranks_are_waited_for_and_all_sleepers_woken(scene: Scene) -> None:
    first, *others = scene.arenas
    begin(first)
    todo = iter(others)
    scene.engines[0].meanwhile = lambda: begin(next(todo))
    first.wait_signed(envelope())
    assert scene.engines[0].slept_for == [1, 2, 3]
    assert [engine.nudged for engine in scene.engines] == [[], [0], [0], [0]]


@pytest.mark.parametrize(
    ("operation", "call"), [(2, CALL), (1, b"\xff" + CALL[1:]), (1, CALL[:15] + b"\xff"), (1, bytes(16))]
)
def test_another_number_or_another_call_is_a_disagreement(scene: Scene, operation: int, call: bytes) -> None:
    a, b = scene.arenas
    begin(a)
    begin(b, operation, call)
    with pytest.raises(DisagreedError) as found:
        a.wait_signed(envelope())
    assert found.value.args == (1, operation, call)
    with pytest.raises(DisagreedError) as found:
        b.wait_signed(envelope(operation, call))
    assert found.value.args == (0, 1, CALL)


OTHER_CALLS = [(4, CALL), (3, b"\xff" + CALL[1:]), (3, CALL[:15] + b"\xff")]


@pytest.mark.parametrize("scene", [2, 3], indirect=True)
def test_a_meeting_is_sign_publish_and_a_look(scene: Scene) -> None:
    *first, last = scene.arenas
    meetings = [arena.meeting(CALL) for arena in first]
    meet = last.meeting(CALL)
    assert not any(meeting(1) for meeting in meetings), "not all are there"
    assert meet(1)
    for arena in first:
        arena.wait_signed(envelope())
        begin(arena, 2)
    assert meet(2)
    for arena in first:
        begin(arena, 3)
    assert last.meeting(CALL)(3), "it does not matter who has made it"


@pytest.mark.parametrize(("operation", "call"), OTHER_CALLS)
@pytest.mark.parametrize("scene", [2, 3], indirect=True)
def test_a_meeting_of_different_calls_is_a_disagreement(scene: Scene, operation: int, call: bytes) -> None:
    first, *between, last = scene.arenas
    for arena in (first, last):  # so that both places for a signature hold something
        begin(arena, 1)
        begin(arena, 2, call)
    for arena in between:
        begin(arena, 1)
        begin(arena, 2)
    meet = last.meeting(call)
    begin(first, 3)
    for arena in between:
        begin(arena, 3)
    assert not meet(operation)
    with pytest.raises(DisagreedError) as found:
        last.wait_signed(envelope(operation, call))
    assert found.value.args == (0, 3, CALL)
    with pytest.raises(DisagreedError) as found:
        first.wait_signed(envelope(3))
    assert found.value.args == (scene.arenas.index(last), operation, call)


def test_meetings_of_different_calls_take_turns(scene: Scene) -> None:
    a, b = scene.arenas
    calls = [CALL, bytes(16)]
    of_a, of_b = ([arena.meeting(call) for call in calls] for arena in (a, b))
    for operation in range(1, 9):
        kind = operation // 3 % 2
        assert not of_a[kind](operation)
        assert of_b[kind](operation)
    assert not of_a[0](9)
    assert not of_b[1](9)
    with pytest.raises(DisagreedError) as found:
        a.wait_signed(envelope(9))
    assert found.value.args == (1, 9, calls[1])


def test_a_meeting_after_another_call_in_its_place_is_told_as_what_it_is(scene: Scene) -> None:
    a, b = scene.arenas
    meet = a.meeting(CALL)
    meet(1)
    begin(a, 2)
    begin(a, 3, bytes(16))  # where the first one stood
    begin(a, 4)
    for operation in range(1, 5):
        begin(b, operation)
    begin(b, 5, b"\xff" * 16)
    assert not meet(5)
    with pytest.raises(DisagreedError) as found:
        b.wait_signed(envelope(5, b"\xff" * 16))
    assert found.value.args == (0, 5, CALL)


def test_a_meeting_wakes_who_sleeps(scene: Scene) -> None:
    a, b = scene.arenas
    begin(a)
    meet = b.meeting(CALL)
    scene.engines[0].meanwhile = lambda: meet(1)
    a.wait_signed(envelope())
    assert scene.engines[1].nudged == [0]


def test_a_rank_may_be_one_operation_ahead(scene: Scene) -> None:
    a, b = scene.arenas
    begin(b)
    begin(a)
    b.wait_signed(envelope())
    begin(b, 2, bytes(16))  # while a still looks at the first
    a.wait_signed(envelope())
    begin(a, 2)
    with pytest.raises(DisagreedError):
        a.wait_signed(envelope(2))


@pytest.mark.parametrize("scene", [3], indirect=True)
def test_slots_are_everybodys_and_do_not_overlap(scene: Scene) -> None:
    size = slot_bytes(3) // 8
    views = [arena.slots(np.dtype(np.int64), size) for arena in scene.arenas]
    for turn in (0, 1):
        for rank in range(3):
            views[rank][turn][rank][...] = 10 * turn + rank
    for mine in views:
        for turn in (0, 1):
            assert [set(slot.tolist()) for slot in mine[turn]] == [{10 * turn + rank} for rank in range(3)]
    assert not any(arena.step for arena in scene.arenas)
    begin(scene.arenas[0])
    assert views[0][0][0][0] == 0, "counters are not in a slot"


def test_turns_alternate(scene: Scene) -> None:
    arena = scene.arenas[0]
    assert [arena.next_turn() for _ in range(4)] == [1, 0, 1, 0]


def test_an_eager_rank_spins_before_it_sleeps() -> None:
    scene = Scene(2, EAGER)
    a, b = scene.arenas
    begin(a)
    scene.engines[0].meanwhile = lambda: begin(b)
    a.wait_signed(envelope())
    assert scene.engines[0].slept_for == [1]
    scene.close()


@pytest.mark.parametrize(
    ("exc", "is_abandoned"), [(KeyboardInterrupt, True), (ValueError, True), (AbortedError, False)]
)
def test_what_interrupts_an_operation_ends_the_group(
    scene: Scene, exc: type[BaseException], is_abandoned: bool
) -> None:
    with pytest.raises(exc), scene.arenas[0]:
        raise exc("in the middle")
    assert scene.engines[0].is_abandoned is is_abandoned
    with scene.arenas[1]:
        pass
    assert not scene.engines[1].is_abandoned
