"""Checkpoints on a disk: what was written comes back, what is damaged is named and skipped, and nothing is lost."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ringfort.errors import CheckpointError, InvalidArgumentError
from ringfort.training.elastic import checkpoint
from ringfort.training.elastic.checkpoint import CheckpointFolder, Saved, Stamp, _hash, open_checkpoint
from ringfort.training.elastic.protocol import Mark
from ringfort.training.elastic.state_tree import BLOCK, Image, StateTree, hashed

MIB = 1 << 20


def stamp(step: int = 5, branch: str = "a@1", run: str = "night") -> Stamp:
    return Stamp(run, branch, epoch=3, step=step, cursor=step * 512, chain=b"\x01" * 16, settings="batch=512")


def image(value: float = 1.0, size: int = 3 * MIB // 8) -> Image:
    return StateTree({"w": np.full(size, value), "rate": 0.1}).image()


SMALL = image(size=4)


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "run1")


def steps(folder: CheckpointFolder) -> list[int]:
    return [found.stamp.step for found in folder.saved() if isinstance(found, Saved)]


def names(folder: CheckpointFolder) -> list[str]:
    return sorted(path.name for path in folder.folder.iterdir())


def failing(error: OSError) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


# --- there and back ---------------------------------------------------------------------------------------------------


def test_what_was_written_comes_back(folder: CheckpointFolder) -> None:
    path = folder.write(stamp(), image(2.5), "study")
    assert names(folder) == [path.name]
    (found,) = folder.saved()
    assert isinstance(found, Saved)
    assert (found.path, found.stamp) == (path, stamp())
    assert found.nbytes == path.stat().st_size
    assert found.stamp.mark == Mark("a@1", 5, b"\x01" * 16, 2560)
    state: dict[str, Any] = {"w": np.zeros(3 * MIB // 8), "rate": 0}
    found.verify()
    StateTree(state).load(found.read())
    assert (state["rate"], set(state["w"].tolist())) == (0.1, {2.5})


def test_a_state_without_arrays_comes_back(folder: CheckpointFolder) -> None:
    path = folder.write(stamp(), StateTree({"step": 3}).image(), "study")
    assert open_checkpoint(path).read().manifest.entries[0].value == 3


def test_the_format_never_changes(tmp_path: Path) -> None:
    path = CheckpointFolder(tmp_path).write(stamp(), StateTree({"w": np.arange(3.0), "n": 2**70}).image(), "study")
    assert path.name == "step-000000005-c5cfa490-study.ringfort"
    data = path.read_bytes()
    assert data[:16] == b"ringfort" + bytes([2, 0, 0, 0]) + (len(data) - 32 - 64).to_bytes(4, "little")
    assert data[16:32].hex() == "6a8a152c7bba4fde6c83eb388c249831"
    assert data[-64:] == np.arange(3.0).tobytes() + bytes(40)


def test_files_of_format_1_are_read_by_programs_with_the_same_leaves(tmp_path: Path) -> None:
    array, number = StateTree({"w": np.arange(3.0)}).image(), StateTree({"n": 2**70}).image()
    manifest = msgspec.to_builtins(hashed(array, _hash).manifest, builtin_types=(bytes,))
    del manifest["tree"]
    manifest["entries"] += msgspec.to_builtins(number.manifest.entries, builtin_types=(bytes,))
    head = msgspec.msgpack.encode({"stamp": stamp(), "manifest": manifest})
    start = b"ringfort" + bytes([1, 0, 0, 0]) + len(head).to_bytes(4, "little") + _hash(head)
    assert start[16:].hex() == "5b34826a609cf2fbdfb403d994a8b3ea"  # so it is as they were written
    path = tmp_path / "step-000000005-c5cfa490-study.ringfort"
    path.write_bytes(start + head + array.data.tobytes())
    found = open_checkpoint(path)
    found.verify()
    state: dict[str, Any] = {"w": np.zeros(3), "n": 0}
    StateTree(state).load(found.read())
    assert (state["w"].tolist(), state["n"]) == ([0, 1, 2], 2**70)
    assert StateTree({"w": np.zeros(3)}).misfit(found.manifest) == "state['n'] is missing here and a plain value there"


def test_a_folder_that_does_not_exist_yet_is_empty_and_is_made_by_the_first_write(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "not" / "there")
    assert list(folder.saved()) == []
    assert folder.newest(lambda _: "") is None
    assert not folder.folder.exists()
    folder.write(stamp(), SMALL, "study")
    assert steps(folder) == [5]


# --- how many are kept ------------------------------------------------------------------------------------------------


def test_the_latest_few_are_kept_newest_first(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in (1, 2, 30, 4_000_000_000):
        folder.write(stamp(step), SMALL, "study")
    assert steps(folder) == [4_000_000_000, 30]


def test_each_writer_keeps_its_own(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in range(1, 5):
        folder.write(stamp(step), SMALL, "study")
        folder.write(stamp(step), SMALL, "dy")
    assert steps(folder) == [4, 4, 3, 3]
    assert len({name.split("-")[-1] for name in names(folder)}) == 2


def test_a_branch_that_went_further_does_not_push_out_what_is_written_now(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in (100, 110, 120):
        folder.write(stamp(step, branch="a@1"), SMALL, "study")
    for step in (50, 60, 70):
        path = folder.write(stamp(step, branch="b@7"), SMALL, "study")
        assert path.exists()
    # The last of the other branch stays: it may be all that there is of those steps.
    assert steps(folder) == [120, 70, 60]


def test_files_of_other_runs_and_of_later_versions_stay(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    kept = [folder.write(stamp(step, run=run), SMALL, "study") for run, step in (("day", 30), ("noon", 20))]
    kept.append(folder.write(msgspec.structs.replace(stamp(15), settings="batch=64"), SMALL, "study"))
    kept.append(folder.write(stamp(14, branch="other shape"), image(size=5), "study"))
    kept.append(folder.write(stamp(13, branch="newer"), SMALL, "study"))
    kept[-1].write_bytes(b"ringfort" + bytes([99]) + kept[-1].read_bytes()[9:])
    for step, branch in ((7, "b@1"), (8, "c@1"), (9, "d@1")):
        kept[5:] = [*kept[5:], folder.write(stamp(step, branch=branch), SMALL, "study")][-2:]
    assert names(folder) == sorted(path.name for path in kept)


def test_the_same_step_of_two_branches_has_two_files(folder: CheckpointFolder) -> None:
    folder.write(stamp(5, branch="a@1"), SMALL, "study")
    folder.write(stamp(5, branch="b@1"), SMALL, "study")
    folder.write(stamp(5, branch="b@1"), SMALL, "study")
    assert steps(folder) == [5, 5]


def test_files_of_others_are_left_alone(folder: CheckpointFolder) -> None:
    folder.folder.mkdir()
    for name in ("notes.txt", "step-1.ringfort", "step-000000001-study.ringfort", ".step-000000001-study.new"):
        (folder.folder / name).write_text("mine")
    for step in range(1, 9):
        folder.write(stamp(step), SMALL, "study")
    assert len(names(folder)) == 4 + folder.keep
    assert steps(folder) == [8, 7, 6]


@pytest.mark.parametrize("writer", ["", "Study", "a-b", "../x", "a/b", "ä"])
def test_a_writer_whose_files_would_not_be_found_again_is_refused(folder: CheckpointFolder, writer: str) -> None:
    with pytest.raises(InvalidArgumentError, match="lower-case letters and digits"):
        folder.write(stamp(), SMALL, writer)
    assert not folder.folder.exists()


@pytest.mark.parametrize("keep", [0, -1, True, 1.5])
def test_at_least_one_is_kept(tmp_path: Path, keep: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="keep"):
        CheckpointFolder(tmp_path, keep)


# --- damage -----------------------------------------------------------------------------------------------------------


def rewritten(path: Path, change: Any) -> None:
    data = bytearray(path.read_bytes())
    changed = change(data)
    path.write_bytes(data if changed is None else changed)


def flip(at: int) -> Any:
    def change(data: bytearray) -> None:
        data[at] ^= 4

    return change


DAMAGES = {
    "a truncated file": (lambda data: data[:-1], "cut short"),
    "a file with more": (lambda data: data + b"x", "cut short or changed"),
    "a truncated head": (lambda data: data[:50], "its head is damaged or cut short"),
    "an empty file": (lambda _: b"", "not a checkpoint"),
    "a foreign file": (lambda data: b"PK\x03\x04" + data[4:], "not a checkpoint of Ringfort"),
    "a newer version": (lambda data: data[:8] + b"\x03" + data[9:], "has format 3, newer than 2; pip install -U"),
    "a flipped bit in the length": (flip(15), "its head is damaged"),
    "a flipped bit in the hash": (flip(20), "its head is damaged"),
    "a flipped bit in the head": (flip(60), "its head is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_head_is_named_and_the_one_before_is_taken(
    folder: CheckpointFolder, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    change, words = DAMAGES[damage]
    for step in (1, 2):
        path = folder.write(stamp(step), SMALL, "study")
    rewritten(path, change)
    bad, good = folder.saved()
    assert isinstance(bad, CheckpointError)
    assert (bad.path, words in bad.why) == (str(path), True)
    assert str(bad) == f"Checkpoint {path}: {bad.why}"
    assert str(path) not in bad.why  # named once
    assert isinstance(good, Saved)
    assert folder.newest(lambda _: "") == good
    assert str(path) in caplog.text


@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_damaged_block_is_named_and_the_checkpoint_before_is_taken(
    folder: CheckpointFolder, block: int, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        path = folder.write(stamp(step), image(), "study")
    rewritten(path, flip(path.stat().st_size - 3 * MIB + block * BLOCK + 17))
    found = open_checkpoint(path)
    for look in (found.read, found.verify):
        with pytest.raises(CheckpointError) as raised:
            look()
        assert raised.value.why == f"1 of 3 blocks of 1 MiB is damaged, first block {block}"
    newest = folder.newest(lambda _: "")
    assert newest is not None
    assert newest.stamp.step == 1
    assert "first block" in caplog.text


def test_all_damaged_blocks_are_counted(folder: CheckpointFolder) -> None:
    path = folder.write(stamp(), image(), "study")
    begin = path.stat().st_size - 3 * MIB
    rewritten(path, flip(begin + BLOCK))
    rewritten(path, flip(begin + 2 * BLOCK))
    with pytest.raises(CheckpointError, match="2 of 3 blocks of 1 MiB are damaged, first block 1"):
        open_checkpoint(path).verify()


def test_a_head_that_lies_is_refused_before_memory_is_taken(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = SMALL.manifest
    for manifest in (
        msgspec.structs.replace(whole, nbytes=2**60, hashes=(b"",)),
        msgspec.structs.replace(whole, nbytes=-1),
        whole,  # without hashes
    ):
        monkeypatch.setattr(checkpoint, "hashed", lambda image, _, manifest=manifest: Image(manifest, image.data))
        with pytest.raises(CheckpointError, match="does not have a hash for each block"):
            open_checkpoint(folder.write(stamp(), SMALL, "study"))


def test_a_head_of_another_kind_is_named(folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_Head", lambda stamp, _: {"stamp": stamp, "tensors": []})
    path = folder.write(stamp(), SMALL, "study")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="its head is invalid: Object"):
        open_checkpoint(path)


def test_only_what_fits_is_taken(folder: CheckpointFolder) -> None:
    folder.write(stamp(9, run="day"), SMALL, "study")
    folder.write(stamp(5, run="night"), SMALL, "study")
    newest = folder.newest(lambda found: "" if found.stamp.run == "night" else "another run")
    assert newest is not None
    assert newest.stamp.step == 5
    assert folder.newest(lambda _: "another run") is None


def test_a_file_that_its_writer_removes_meanwhile_is_passed_over(folder: CheckpointFolder) -> None:
    for step in (1, 2, 3):
        path = folder.write(stamp(step), SMALL, "study")
    found = folder.saved()
    assert isinstance(next(found), Saved)
    for path in folder.folder.glob("step-000000002-*"):
        path.unlink()
    assert [one.stamp.step for one in found if isinstance(one, Saved)] == [1]


# --- disks that fail --------------------------------------------------------------------------------------------------


def test_a_crash_before_the_rename_leaves_the_old_ones(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write(stamp(1), SMALL, "study")
    before = names(folder)
    monkeypatch.setattr(Path, "replace", failing(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(CheckpointError, match="input/output error"):
        folder.write(stamp(2), SMALL, "study")
    assert names(folder) == before
    assert steps(folder) == [1]


@pytest.mark.parametrize("where", ["os.fsync", "pathlib.Path.open", "pathlib.Path.mkdir"])
def test_a_full_disk_is_an_error_with_advice_and_leaves_nothing_behind(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    folder.write(stamp(1), SMALL, "study")
    before = names(folder)
    monkeypatch.setattr(where, failing(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(CheckpointError) as raised:
        folder.write(stamp(2), SMALL, "study")
    assert raised.value.why == "no space left on device; free some space, or keep fewer checkpoints"
    monkeypatch.undo()
    assert names(folder) == before


def test_a_disk_that_is_full_in_the_middle_of_the_state_leaves_nothing_behind(folder: CheckpointFolder) -> None:
    resource = pytest.importorskip("resource")
    folder.write(stamp(1), SMALL, "study")
    before = names(folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))  # Python ignores the signal, so that write fails
    try:
        with pytest.raises(CheckpointError, match="file too large"):
            folder.write(stamp(2), image(), "study")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(folder) == before


def test_an_interrupt_leaves_nothing_behind(folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        folder.write(stamp(1), SMALL, "study")
    assert names(folder) == []


def test_the_file_and_its_name_are_flushed_before_an_old_one_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, done = CheckpointFolder(tmp_path, keep=1), list[str]()
    folder.write(stamp(1), SMALL, "study")
    fsync, replace, unlink = os.fsync, Path.replace, Path.unlink
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("flush"), fsync(handle)))
    monkeypatch.setattr(Path, "replace", lambda path, to: (done.append("rename"), replace(path, to)))
    monkeypatch.setattr(Path, "unlink", lambda path, **options: (done.append("remove"), unlink(path, **options)))
    folder.write(stamp(2), SMALL, "study")
    assert done == ["flush", "rename", "flush", "remove"]


def test_a_file_system_that_cannot_flush_folders_is_used_all_the_same(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def only_files(handle: int) -> None:
        if os.path.isdir(f"/dev/fd/{handle}"):  # noqa: PTH112
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", only_files)
    folder.write(stamp(1), SMALL, "study")
    assert steps(folder) == [1]


def test_what_a_killed_process_left_is_ignored_and_cleaned_up_by_the_next_write(folder: CheckpointFolder) -> None:
    path = folder.write(stamp(1), SMALL, "study")
    left, other = path.with_suffix(".new"), Path(str(path).replace("-study.ringfort", "-attic.new"))
    left.write_bytes(path.read_bytes()[:40])
    other.write_bytes(b"attic is writing it now")
    assert steps(folder) == [1]
    folder.write(stamp(2), SMALL, "study")
    assert not left.exists()
    assert other.exists()
    assert steps(folder) == [2, 1]


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = CheckpointFolder(tmp_path / "file")
    with pytest.raises(CheckpointError, match="file"):
        list(folder.saved())
    with pytest.raises(CheckpointError, match="file"):
        folder.write(stamp(), SMALL, "study")


def test_a_folder_that_can_never_be_used_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "folder", Path("/proc/nowhere")):
        with pytest.raises(InvalidArgumentError, match=f"checkpoint='{path}': cannot be used"):
            CheckpointFolder(path).check()
    CheckpointFolder(tmp_path / "new" / "folder").check()
    assert (tmp_path / "new" / "folder").is_dir()


def test_a_folder_that_may_not_be_written_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(InvalidArgumentError, match="permission denied; choose a folder that this user may write"):
        CheckpointFolder(tmp_path).check()


def test_a_disk_that_is_full_does_not_keep_a_machine_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "mkdir", failing(OSError(errno.ENOSPC, "No space left on device")))
    CheckpointFolder(tmp_path / "new").check()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint(tmp_path / "step.ringfort")
