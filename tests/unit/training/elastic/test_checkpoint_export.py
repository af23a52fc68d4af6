"""Exporting a checkpoint: which file is read, which arrays are written under which names, and what is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from ringfort.collectives.reduction import ELEMENT_TYPES
from ringfort.errors import BackendUnavailableError, CheckpointError, InvalidArgumentError
from ringfort.training.elastic import checkpoint_export as exporting
from ringfort.training.elastic.checkpoint import CheckpointFolder, Saved, Stamp, open_checkpoint
from ringfort.training.elastic.state_tree import StateTree

safetensors = pytest.importorskip("safetensors")
from safetensors.numpy import load_file  # noqa: E402

TORCH = {
    "model": {"0.weight": np.full((2, 3), 1.5, np.float32), "0.bias": np.zeros(2, np.float16), "1.seen": np.array(7)},
    "optimizer": {
        "groups": [{"lr": 0.1, "params": "0.weight 0.bias"}],
        "state": {"0.weight": {"exp_avg": np.ones((2, 3), np.float32), "step": 4.0}},
    },
    "user": {"average": {"0.weight": np.ones(3)}},
}
"""The state of a torch run."""


def stamp(step: int = 5, branch: str = "a@1", run: str = "night", settings: str = "batch=512") -> Stamp:
    return Stamp(run, branch, epoch=3, step=step, cursor=step * 512, chain=b"", settings=settings)


def write(folder: Path, state: Any, stamp: Stamp = stamp(), writer: str = "study") -> Saved:  # noqa: B008
    return open_checkpoint(CheckpointFolder(folder).write(stamp, StateTree(state).image(), writer))


def names(saved: Saved, **options: bool) -> list[str]:
    return sorted(exporting.select(saved, **options).arrays)


def exported(saved: Saved, output: Path, **options: bool) -> dict[str, np.ndarray[Any, Any]]:
    exporting.write(output, saved.read(), exporting.select(saved, **options), saved.stamp)
    return load_file(output)


def damage(saved: Saved) -> None:
    data = bytearray(saved.path.read_bytes())
    data[-1] ^= 1
    saved.path.write_bytes(data)


# --- names ------------------------------------------------------------------------------------------------------------


def test_names_are_keys_joined_by_dots(tmp_path: Path) -> None:
    w = np.zeros(2)
    state = {"weights": {"hidden": w, "it's": w}, "layers": [{"w": w}, [w, w]], 3: w, -1: w, "rate": 0.1, "a.b": w}
    saved = write(tmp_path, state)
    assert names(saved) == [
        "-1",
        "3",
        "a.b",
        "layers.0.w",
        "layers.1.0",
        "layers.1.1",
        "weights.hidden",
        "weights.it's",
    ]
    assert exporting.select(saved).values == 1


def test_a_list_as_the_state_has_numbers_as_names(tmp_path: Path) -> None:
    assert names(write(tmp_path, [np.zeros(2), {"w": np.zeros(1)}])) == ["0", "1.w"]


def test_of_a_torch_run_the_model_is_taken_with_its_own_names(tmp_path: Path) -> None:
    saved = write(tmp_path, TORCH)
    assert names(saved) == ["0.bias", "0.weight", "1.seen"]
    assert names(saved, everything=True) == [
        "model.0.bias",
        "model.0.weight",
        "model.1.seen",
        "optimizer.state.0.weight.exp_avg",
        "user.average.0.weight",
    ]


@pytest.mark.parametrize("optimizer", [{"momentum": np.zeros(1)}, np.zeros(1), [np.zeros(1)]])
def test_another_run_may_have_the_same_words_in_its_state(tmp_path: Path, optimizer: Any) -> None:
    assert "model.w" in names(write(tmp_path, {"model": {"w": np.zeros(1)}, "optimizer": optimizer}))


def test_files_of_format_1_have_the_same_names(tmp_path: Path) -> None:
    saved = write(tmp_path, TORCH)
    older = Saved(saved.path, saved.stamp, msgspec.structs.replace(saved.manifest, tree=None), saved.nbytes, 0.0)
    assert names(older) == names(saved)


@given(
    st.recursive(
        st.just(0),
        lambda inner: (
            st.lists(inner, min_size=1, max_size=3)
            | st.dictionaries(
                st.text(st.characters(codec="utf-8"), max_size=4) | st.integers(), inner, min_size=1, max_size=3
            )
        ),
        max_leaves=6,
    ).filter(bool)
)
def test_the_keys_of_every_leaf_come_back_from_its_path(shape: Any) -> None:
    def leaves(node: Any, keys: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        if node == 0:
            return [keys]
        items = node.items() if isinstance(node, dict) else enumerate(node)
        return [found for key, child in items for found in leaves(child, (*keys, key))]

    saved = Saved(Path("x"), stamp(), StateTree(shape).manifest(), 0, 0.0)
    assert sorted(map(repr, leaves(shape))) == sorted(
        repr(exporting._keys(saved, entry.path)) for entry in saved.manifest.entries
    )


BAD = {
    "two of one name": ({"a": {"b": np.zeros(1)}, "a.b": np.zeros(1)}, "both named a.b; rename one"),
    "a number and its text": ({1: np.zeros(1), "1": np.zeros(1)}, "both named 1;"),
    "a reserved name": ({"__metadata__": np.zeros(1)}, "keeps for itself"),
    "a missing type": ({"w": np.zeros(1, np.complex128)}, r"state\['w'\] is complex128, which safetensors does not"),
    "no arrays": ({"rate": 0.1}, "has no arrays to export"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_the_format_cannot_hold_is_refused_by_name(tmp_path: Path, case: str) -> None:
    state, words = BAD[case]
    with pytest.raises(CheckpointError, match=words):
        exporting.select(write(tmp_path, state))


@pytest.mark.parametrize("path", ["state", "", "state[", "state[open('x')]", "state[" * 9999, "state[1:2]"])
def test_a_path_that_is_none_is_refused_and_not_run(tmp_path: Path, path: str) -> None:
    saved = write(tmp_path, {"w": np.zeros(1)})
    (entry,) = saved.manifest.entries
    manifest = msgspec.structs.replace(saved.manifest, entries=(msgspec.structs.replace(entry, path=path),))
    with pytest.raises(CheckpointError, match="its head is invalid"):
        exporting.select(Saved(saved.path, saved.stamp, manifest, saved.nbytes, 0.0))


def test_an_array_that_would_be_outside_the_file_is_refused(tmp_path: Path) -> None:
    saved = write(tmp_path, {"w": np.zeros(4)})
    (entry,) = saved.manifest.entries
    beyond = exporting.Selection({"w": msgspec.structs.replace(entry, offset=48)}, 0, False)
    with pytest.raises(InvalidArgumentError, match="not in the place"):
        exporting.write(tmp_path / "out", saved.read(), beyond, saved.stamp)


# --- the file ---------------------------------------------------------------------------------------------------------


def test_every_element_type_comes_back(tmp_path: Path) -> None:
    missing = {"bfloat16", "complex128"}  # NumPy has none of the first, and the format none of the second
    types = [kind.name for kind in ELEMENT_TYPES if kind.name not in missing]
    state: dict[str, Any] = {name: np.array([[0, 1, 2], [3, 4, 5]]).astype(name) for name in types}
    state |= {"scalar": np.array(2.5), "empty": np.zeros((0, 3), np.float32)}
    found = exported(write(tmp_path, state), tmp_path / "out")
    assert found.keys() == state.keys()
    for name, array in state.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


def test_bfloat16_needs_nothing_but_the_package(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    saved = write(tmp_path, {"w": np.array([1.0, -2.5], ml_dtypes.bfloat16)})
    exporting.write(tmp_path / "out", saved.read(), exporting.select(saved), saved.stamp)
    ((name, found),) = safetensors.deserialize((tmp_path / "out").read_bytes())
    assert (name, found["dtype"], found["shape"]) == ("w", "BF16", [2])
    assert bytes(found["data"]) == np.array([1.0, -2.5], np.float32).view(np.uint16)[1::2].tobytes()


@pytest.mark.parametrize(("state", "more"), [(TORCH, {"format": "pt"}), ({"w": np.zeros(2)}, {})])
def test_the_file_says_where_it_is_from(tmp_path: Path, state: Any, more: dict[str, str]) -> None:
    exported(write(tmp_path, state), tmp_path / "out")
    with safetensors.safe_open(tmp_path / "out", framework="np") as file:
        assert file.metadata() == {"run": "night", "branch": "a@1", "step": "5", "cursor": "2560", **more}


def test_the_file_has_the_mode_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    exported(write(tmp_path / "run1", TORCH), tmp_path / "out")
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_model_of_torch_loads_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load

    def made() -> Any:
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1).bfloat16())

    first, second = made(), made()
    with torch.no_grad():
        first[1].running_mean.fill_(0.25)
    exported_state = {**TORCH, "model": dict(first.state_dict())}
    saved = write(tmp_path, exported_state)
    exporting.write(tmp_path / "out", saved.read(), exporting.select(saved), saved.stamp)
    second.load_state_dict(load(tmp_path / "out"))
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name])


def test_a_disk_that_is_really_full_leaves_the_old_file(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk can only be mounted by root")
    try:
        (disk / "out").write_bytes(b"old")
        saved = write(tmp_path / "run1", {"w": np.zeros(1 << 14)})
        with pytest.raises(CheckpointError, match=f"Checkpoint {disk}/out: not written: no space left on device"):
            exported(saved, disk / "out")
        assert [(item.name, item.read_bytes()) for item in disk.iterdir()] == [("out", b"old")]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(5, "Input/output error")])
def test_what_breaks_before_the_rename_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    saved = write(tmp_path / "run1", TORCH)

    def broken(_: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises((KeyboardInterrupt, CheckpointError)):
        exported(saved, tmp_path / "out")
    assert [item.name for item in tmp_path.iterdir()] == ["run1"]


def test_an_error_of_the_package_that_is_none_of_the_system_is_told_in_its_words(tmp_path: Path) -> None:
    saved = write(tmp_path, {"w": np.zeros(2, np.complex128)})
    (unknown,) = saved.manifest.entries
    with pytest.raises(CheckpointError, match="not written: Unknown dtype"):
        exporting.write(tmp_path / "out", saved.read(), exporting.Selection({"w": unknown}, 0, False), saved.stamp)


# --- before anything is read ------------------------------------------------------------------------------------------


def test_a_file_that_exists_is_replaced_only_by_force(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(InvalidArgumentError, match="exists; --force replaces it"):
        exporting.check_output(tmp_path / "out", force=False)
    exporting.check_output(tmp_path / "out", force=True)


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_as_the_output_and_one_that_is_missing_are_refused(tmp_path: Path, force: bool) -> None:
    with pytest.raises(InvalidArgumentError, match="is a folder; give the name of a file"):
        exporting.check_output(tmp_path, force=force)
    with pytest.raises(InvalidArgumentError, match="none does not exist"):
        exporting.check_output(tmp_path / "none" / "out", force=force)


@pytest.mark.parametrize("installed", [None, sys])
def test_without_the_package_or_with_an_old_one_the_error_has_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: Any
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", installed)
    with pytest.raises(BackendUnavailableError) as raised:
        exporting.check_output(tmp_path / "out", force=False)
    assert str(raised.value) == "safetensors is not available here: pip install 'ringfort[export]'"


# --- which checkpoint -------------------------------------------------------------------------------------------------


def newest(path: Path, step: int | None = None) -> tuple[int, list[str]]:
    warnings = list[str]()
    saved, _ = exporting.read_newest(path, step, warnings.append)
    return saved.stamp.step, warnings


def test_the_newest_of_a_folder_or_that_of_a_step_or_the_file_is_read(tmp_path: Path) -> None:
    saved = [write(tmp_path, TORCH, stamp(step)) for step in (5, 7, 6)]
    assert newest(tmp_path) == (7, [])
    assert newest(tmp_path, 6) == (6, [])
    assert newest(saved[0].path) == (5, [])


def test_a_damaged_one_is_named_and_the_one_before_is_read(tmp_path: Path) -> None:
    older, good, torn, newer = (write(tmp_path, TORCH, stamp(step), "a" + str(step)) for step in (5, 6, 7, 8))
    older.path.write_bytes(b"PK")  # not asked for, so not told
    damage(torn)
    newer.path.write_bytes(b"ringfort" + bytes([99]) + newer.path.read_bytes()[9:])
    step, warnings = newest(tmp_path)
    assert step == good.stamp.step
    assert [str(torn.path) in warnings[1], str(newer.path) in warnings[0], len(warnings)] == [True, True, 2]
    assert "1 of 1 blocks of 1 MiB is damaged" in warnings[1]
    assert "has format 99, newer than" in warnings[0]


def test_a_damaged_file_is_an_error_where_it_was_asked_for(tmp_path: Path) -> None:
    saved = [write(tmp_path, TORCH, stamp(step)) for step in (5, 6)][1]
    damage(saved)
    for path, step in ((saved.path, None), (tmp_path, 6)):
        with pytest.raises(CheckpointError, match="1 of 1 blocks of 1 MiB is damaged"):
            newest(path, step)


def test_a_head_of_the_step_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    saved = [write(tmp_path, TORCH, stamp(step)) for step in (5, 6)][1]
    saved.path.write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="not a checkpoint of Ringfort"):
        newest(tmp_path, 6)


def test_if_none_can_be_used_all_reasons_are_told(tmp_path: Path) -> None:
    for step in (5, 6):
        damage(write(tmp_path, TORCH, stamp(step)))
    with pytest.raises(CheckpointError) as raised:
        newest(tmp_path)
    assert raised.value.why.count("damaged") == 2
    assert raised.value.why.startswith("no checkpoint here can be used\n  ")


def test_an_empty_folder_and_a_step_that_is_not_there_are_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in this folder"):
        newest(tmp_path)
    write(tmp_path, TORCH)
    with pytest.raises(CheckpointError, match="no checkpoint of step 6 in this folder"):
        newest(tmp_path, 6)


def test_a_path_that_is_not_there_and_a_step_of_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="no such file or folder"):
        newest(tmp_path / "none")
    with pytest.raises(InvalidArgumentError, match="chooses from a folder"):
        newest(write(tmp_path, TORCH).path, 5)


@pytest.mark.parametrize("other", [{"run": "day"}, {"settings": "batch=64"}])
def test_a_folder_of_several_runs_needs_the_name_of_a_file(tmp_path: Path, other: dict[str, str]) -> None:
    mine, theirs = write(tmp_path, TORCH, stamp(9)), write(tmp_path, TORCH, stamp(300, **other), "attic")
    with pytest.raises(InvalidArgumentError) as raised:
        newest(tmp_path)
    assert "has checkpoints of several runs; name the file that you want:\n" in str(raised.value)
    assert f"{mine.path} (run night, step 9)" in str(raised.value)
    assert str(theirs.path) in str(raised.value)
    assert newest(tmp_path, 9) == (9, [])


def test_branches_compare_by_step_unless_it_is_the_same(tmp_path: Path) -> None:
    write(tmp_path, TORCH, stamp(5, "a@1"))
    write(tmp_path, TORCH, stamp(7, "b@1"))
    assert newest(tmp_path) == (7, [])
    write(tmp_path, TORCH, stamp(7, "c@1"))
    with pytest.raises(InvalidArgumentError, match="several branches at step 7; name the file"):
        newest(tmp_path)


def test_files_of_two_writers_at_one_step_are_one_state(tmp_path: Path) -> None:
    first, second = (write(tmp_path, TORCH, stamp(7), writer) for writer in ("study", "attic"))
    assert newest(tmp_path) == (7, [])
    damage(first)
    step, warnings = newest(tmp_path)
    assert (step, second.path.exists(), len(warnings)) == (7, True, 1)
