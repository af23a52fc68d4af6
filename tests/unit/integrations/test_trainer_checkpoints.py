"""Checkpoints of a Trainer on disks of which some are lost, old or damaged."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ringfort.backends.simulated import SimulatedBackend
from ringfort.context import DistributedContext
from ringfort.errors import AbortedError, CheckpointError, InvalidArgumentError
from ringfort.integrations import trainer_checkpoints
from ringfort.integrations.trainer_checkpoints import SEAL, File, Seal, TrainerCheckpoints
from ringfort.testing import run_ranks

HOSTS = (0, 1, 2, 2)
"""Ranks 2 and 3 are on one machine, and rank 2 writes there."""
RUN = 1000.0
EARLY: dict[int, Callable[[], Any]] = {}


class Group:
    """Four ranks on three machines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._contexts = [DistributedContext(one) for one in SimulatedBackend.create_group(4, hosts=HOSTS)]

    def disk(self, rank: int) -> Path:
        return self.folder / f"disk{HOSTS[rank]}"

    def all(self, call: Callable[[TrainerCheckpoints, int], Any], keep: int = 2) -> list[Any]:
        def run(context: DistributedContext) -> Any:
            rank = context.rank
            one = TrainerCheckpoints(context, self.disk(rank), keep, is_writer=HOSTS[rank] == rank, timeout=20.0)
            try:
                return call(one, rank)
            except CheckpointError as exc:
                context.abort(str(exc))  # as the end of a process does
                raise

        return run_ranks(self._contexts, run)

    def save(
        self, step: int, run: float = RUN, best: str | None = None, before: Mapping[int, Callable[[], Any]] = EARLY
    ) -> None:
        """What the Trainer writes, and then the seals. `before` is what ranks do first."""

        def write(one: TrainerCheckpoints, rank: int) -> None:
            before.get(rank, bool)()
            path = self.disk(rank) / f"checkpoint-{step}"
            (path / "adapter").mkdir(parents=True, exist_ok=True)
            (path / f"rng_state_{rank}.pth").write_bytes(b"%d" % rank * 10)
            if HOSTS[rank] == rank:
                (path / "adapter" / "model").write_bytes(b"%d of %d" % (step, run) * 1000)
                (path / "empty").touch()
            one.seal(run, step, best)

        assert self.all(write) == [None] * 4

    def newest(self) -> list[tuple[float, str] | None]:
        """What each rank finds."""
        found = self.all(lambda one, rank: one.newest())
        return [one if one is None or isinstance(one, BaseException) else (one[0], one[1].name) for one in found]

    def content(self, rank: int) -> dict[str, bytes]:
        disk = self.disk(rank)
        return {
            path.relative_to(disk).as_posix(): path.read_bytes()
            for path in disk.rglob("*")
            if path.is_file() and path.name != SEAL
        }

    def close(self) -> None:
        run_ranks(self._contexts, DistributedContext.close)


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    monkeypatch.setattr(trainer_checkpoints, "BLOCK", 1000)  # so that files have several
    made = Group(tmp_path)
    yield made
    made.close()


def test_every_machine_keeps_the_files_of_all_ranks(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    names, is_listed = trainer_checkpoints._names, threading.Event()

    def listed(path: Path) -> list[str]:
        found = names(path)
        if path.is_relative_to(group.disk(3)):
            is_listed.set()
        return found

    monkeypatch.setattr(trainer_checkpoints, "_names", listed)
    group.save(3, before={3: lambda: is_listed.wait(0.2)})  # rank 3 is late, and nobody lists files without its own
    expected = {f"checkpoint-3/rng_state_{rank}.pth": b"%d" % rank * 10 for rank in range(4)}
    expected |= {"checkpoint-3/adapter/model": b"3 of 1000" * 1000, "checkpoint-3/empty": b""}
    assert [group.content(rank) for rank in range(4)] == [expected] * 4


@pytest.mark.parametrize("lost", [(0,), (1, 2), (0, 2)])
def test_machines_that_have_lost_their_disk_or_have_an_old_one_get_the_newest(
    group: Group, lost: tuple[int, ...]
) -> None:
    group.save(3)
    for rank in lost[1:]:
        shutil.copytree(group.disk(rank), group.folder / f"old{rank}")
    group.save(6)
    for rank in lost:
        shutil.rmtree(group.disk(rank))
    for rank in lost[1:]:
        (group.folder / f"old{rank}").rename(group.disk(rank))
    assert group.newest() == [(RUN, "checkpoint-6")] * 4
    whole = {name: data for name, data in group.content(({0, 1, 2} - set(lost)).pop()).items() if "-6/" in name}
    for rank in range(3):
        assert whole.items() <= group.content(rank).items()
    shutil.rmtree(group.disk(({0, 1, 2} - set(lost)).pop()))  # those who were given it can give it in turn
    assert group.newest() == [(RUN, "checkpoint-6")] * 4


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: damage(path / "adapter" / "model"),
        lambda path: (path / "rng_state_1.pth").unlink(),
        lambda path: (path / SEAL).unlink(),
        lambda path: (path / SEAL).write_text("{"),
    ],
    ids=["a flipped bit", "a file that is missing", "a power cut before the seal", "half a seal"],
)
def test_what_is_not_whole_is_replaced_by_the_same_of_another_or_by_the_one_before(
    group: Group, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    for step in (3, 6):
        group.save(step)
    whole = group.content(1)
    spoil(group.disk(1) / "checkpoint-6")
    assert group.newest() == [(RUN, "checkpoint-6")] * 4
    assert group.content(1) == whole
    for rank in range(3):
        spoil(group.disk(rank) / "checkpoint-6")
    assert group.newest() == [(RUN, "checkpoint-3")] * 4
    group.save(5)  # a run that saves at other steps now; its newest is not the damaged one
    assert group.newest() == [(RUN, "checkpoint-5")] * 4


def test_without_a_checkpoint_there_is_none(group: Group) -> None:
    assert group.newest() == [None] * 4


def test_the_last_ones_stay_and_the_best(group: Group) -> None:
    for step in range(1, 6):
        group.save(step, best="elsewhere/checkpoint-2" if step > 2 else None)
    names = {f"checkpoint-{step}" for step in (2, 4, 5)}
    assert [{path.name for path in group.disk(rank).iterdir()} for rank in range(3)] == [names] * 3


def test_of_two_runs_in_one_folder_the_later_counts(group: Group) -> None:
    group.save(9)
    group.save(3, run=RUN + 1)
    assert group.newest() == [(RUN + 1, "checkpoint-3")] * 4
    group.save(6, run=RUN)  # rank 0 has got a clock that goes wrong: the other run is in the way, and removed
    assert group.newest() == [(RUN, "checkpoint-6")] * 4


@pytest.mark.parametrize("name", ["../escaped", "{folder}/escaped"])
def test_a_name_that_leaves_the_folder_is_refused(group: Group, name: str) -> None:
    name = name.format(folder=group.folder)
    path = group.disk(0) / "checkpoint-3"
    path.mkdir(parents=True)
    (path / name).write_bytes(b"")
    file = File(0, trainer_checkpoints._described(path / name).hash)
    (path / SEAL).write_bytes(msgspec.json.encode(Seal(RUN, 3, {name: file})))
    found = group.newest()
    assert all(isinstance(one, CheckpointError | AbortedError) and "invalid name" in str(one) for one in found), found
    assert not list(group.disk(1).rglob("escaped"))


def test_a_step_that_is_no_number_is_refused(group: Group) -> None:
    (group.folder / "disk1" / "victim").mkdir(parents=True)

    def offer(one: TrainerCheckpoints, rank: int) -> Any:
        return one._context.all_gather_object((RUN, "5/../victim")) if rank == 0 else one.newest()

    found = group.all(offer)[1:]
    assert all(isinstance(one, CheckpointError | AbortedError) and "invalid step" in str(one) for one in found), found
    assert (group.folder / "disk1" / "victim").exists()


def test_a_folder_without_files_is_no_checkpoint(group: Group) -> None:
    found = group.all(lambda one, rank: one.seal(RUN, 3))
    assert all("no machine has written a file" in str(found[rank]) for rank in range(3)), found
    assert not list(group.folder.rglob(SEAL))


def test_a_disk_that_cannot_be_read_has_the_checkpoint_of_another(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    group.save(3)
    described = trainer_checkpoints._described

    def read(path: Path) -> File:
        if path.is_relative_to(group.disk(1)) and not path.parent.name.startswith("checkpoint"):
            raise OSError(5, "Input/output error", str(path))
        return described(path)

    monkeypatch.setattr(trainer_checkpoints, "_described", read)
    assert group.newest() == [(RUN, "checkpoint-3")] * 4


def test_what_was_left_in_a_folder_is_not_sealed_with_the_next_checkpoint_there(group: Group) -> None:
    rest = group.disk(1) / "checkpoint-3" / "adapter" / "cut"
    rest.parent.mkdir(parents=True)
    rest.write_bytes(b"half")  # of a hand-over that was cut off
    trainer_checkpoints.discard(rest.parents[1])  # as RingfortCallback does before a step
    group.save(3)
    assert not any("cut" in name for rank in range(3) for name in group.content(rank))


def test_a_disk_that_takes_nothing_is_named(group: Group, tmp_path: Path) -> None:
    group.save(3)
    shutil.rmtree(group.disk(1))
    group.disk(1).write_text("a file")
    found = group.all(lambda one, rank: one.newest())
    assert isinstance(found[1], CheckpointError)
    assert str(group.disk(1)) in str(found[1])


@pytest.mark.parametrize("keep", [0, True, 1.5])
def test_how_many_to_keep_is_a_whole_number(group: Group, keep: Any) -> None:
    assert all(isinstance(one, InvalidArgumentError) for one in group.all(lambda one, rank: None, keep))
