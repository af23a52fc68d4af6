"""`ringfort checkpoint`: what it prints of good and damaged files, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from ringfort.cli import app
from ringfort.cli.checkpoint import as_dict, lines
from ringfort.errors import CheckpointError
from ringfort.training.elastic.checkpoint import CheckpointFolder, Stamp, open_checkpoint
from ringfort.training.elastic.state_tree import StateTree

VERBS = {"ls": {"--json"}, "verify": set(), "export": {"--output", "-o", "--step", "--all", "--force"}}
"""Scripts depend on these. Adding is free; removing or renaming one needs a note in the changelog."""


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["checkpoint", *arguments])
    return result.exit_code, result.stdout, result.stderr


def write(folder: Path, step: int, run: str = "night") -> Path:
    stamp = Stamp(run, "rfab@4", epoch=12, step=step, cursor=step * 512, chain=b"")
    return CheckpointFolder(folder).write(stamp, StateTree({"w": np.ones(3 << 17)}).image(), "study")


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (1000, 1010):
        write(tmp_path / "run1", step)
    return tmp_path / "run1"


def test_the_verbs_and_their_options_are_these() -> None:
    group = typer.main.get_command(app).commands["checkpoint"]  # pyright: ignore[reportAttributeAccessIssue]
    found = {
        name: {text for item in command.params for text in (*item.opts, *item.secondary_opts) if text.startswith("-")}
        - {"--help", "-h"}
        for name, command in group.commands.items()
    }
    assert found == VERBS
    assert all(command.help for command in group.commands.values())
    assert all(item.help for command in group.commands.values() for item in command.params if item.name != "help")


# --- ls ---------------------------------------------------------------------------------------------------------------


def test_ls_has_a_line_for_each_checkpoint_newest_first(folder: Path) -> None:
    code, out, err = invoke("ls", str(folder))
    assert (code, err) == (0, "")
    heading, newest, older = out.splitlines()
    assert heading.split() == ["step", "state", "run", "age", "size", "samples", "epoch", "branch", "file"]
    assert newest.split()[:2] == ["1,010", "valid"]
    assert "3.0 MiB" in newest
    assert newest.split()[-4:-1] == ["517,120", "12", "rfab@4"]
    assert older.split()[0] == "1,000"


def test_ls_says_what_is_wrong_with_a_file_and_is_no_failure(folder: Path) -> None:
    path = write(folder, 1020)
    path.write_bytes(path.read_bytes()[:-1])
    code, out, _ = invoke("ls", str(folder))
    assert code == 0
    bad = out.splitlines()[1]
    assert bad.split()[:2] == ["?", "invalid"]
    assert "cut short" in bad
    assert path.name in bad


def test_ls_reads_heads_only(folder: Path) -> None:
    damage(write(folder, 1020), -5)
    assert "damaged" not in invoke("ls", str(folder))[1]


def test_eighty_columns_hold_every_value(folder: Path) -> None:
    path = write(folder, 1020, run="a-run-with-a-name-that-is-very-long")
    now = path.stat().st_mtime + 7200
    bad = CheckpointError("run1/step-3.ringfort", "not a checkpoint of Ringfort")
    narrow = lines([open_checkpoint(path), bad], now, 80)
    assert all(len(line) <= 80 for line in narrow)
    text = "\n".join(narrow)
    for word in ("1,020", "2 h", "3.0 MiB", "522,240", "epoch 12", "branch rfab@4", "valid", path.name, bad.why):
        assert word in text


def test_what_a_file_says_of_itself_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    path = write(tmp_path, 1, run="a\x1b[2J\nb")
    assert "a?[2J?b" in lines([open_checkpoint(path)], 0.0, None)[1]


def test_json_has_plain_units(folder: Path) -> None:
    path = write(folder, 1020)
    path.write_bytes(b"PK")
    os.utime(next(folder.glob("step-000001010-*")), (10**9, 10**9))
    code, out, _ = invoke("ls", str(folder), "--json")
    assert code == 0
    bad, newest, _ = json.loads(out)["checkpoints"]
    assert (bad["file"], bad["valid"], bad["step"]) == (str(path), False, None)
    assert bad["reason"] == "not a checkpoint of Ringfort"
    assert newest["age_seconds"] > 10**8
    assert {name: newest[name] for name in ("step", "run", "branch", "epoch", "samples", "valid", "reason")} == {
        "step": 1010,
        "run": "night",
        "branch": "rfab@4",
        "epoch": 12,
        "samples": 517120,
        "valid": True,
        "reason": "",
    }
    assert newest["bytes"] == Path(newest["file"]).stat().st_size
    assert newest.keys() == bad.keys()


def test_the_age_of_a_file_from_the_future_is_zero(folder: Path) -> None:
    assert as_dict(open_checkpoint(next(folder.iterdir())), 0.0)["age_seconds"] == 0


def test_an_empty_folder_is_said_to_be_empty(tmp_path: Path) -> None:
    assert invoke("ls", str(tmp_path)) == (0, "", f"no checkpoints in {tmp_path}\n")
    assert invoke("ls", str(tmp_path), "--json") == (0, '{"checkpoints": []}\n', "")


@pytest.mark.parametrize("verb", VERBS)
def test_a_folder_that_does_not_exist_is_one_line_and_exit_code_2(tmp_path: Path, verb: str) -> None:
    if verb == "export":
        pytest.importorskip("safetensors")
    more = ["-o", str(tmp_path / "out")] if verb == "export" else []
    code, out, err = invoke(verb, str(tmp_path / "none"), *more)
    assert (code, out) == (2, "")
    assert err == f"error: path='{tmp_path / 'none'}': no such file or folder\n"


# --- verify -----------------------------------------------------------------------------------------------------------


def test_verify_reads_a_file_or_all_files_of_a_folder(folder: Path) -> None:
    path = next(folder.glob("step-000001010-*"))
    assert invoke("verify", str(path)) == (0, f"{path}: valid, step 1,010, 3.0 MiB\n", "")
    code, out, err = invoke("verify", str(folder))
    assert (code, err) == (0, "")
    assert [line.split(": ")[1] for line in out.splitlines()] == [
        "valid, step 1,010, 3.0 MiB",
        "valid, step 1,000, 3.0 MiB",
    ]


def test_verify_names_the_damaged_file_and_fails(folder: Path) -> None:
    path = write(folder, 1020)
    damage(path, -5)
    code, out, _ = invoke("verify", str(folder))
    assert code == 1
    assert out.splitlines()[0] == f"{path}: 1 of 3 blocks of 1 MiB is damaged, first block 2"
    assert len(out.splitlines()) == 3
    assert invoke("verify", str(path))[0] == 1


def test_verify_fails_for_a_foreign_file_and_for_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("notes")
    code, out, _ = invoke("verify", str(tmp_path / "notes"))
    assert (code, out) == (1, f"{tmp_path / 'notes'}: not a checkpoint of Ringfort\n")
    assert invoke("verify", str(tmp_path)) == (1, "", f"no checkpoints in {tmp_path}\n")


# --- export -----------------------------------------------------------------------------------------------------------


def test_export_writes_the_arrays_of_the_newest_and_says_so(folder: Path, tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    output = tmp_path / "model.safetensors"
    assert invoke("export", str(folder), "-o", str(output)) == (
        0,
        f"{output}: 1 array, 3.0 MiB, of step 1,010 of night\n",
        "",
    )
    assert numpy.load_file(output)["w"].tolist() == [1.0] * (3 << 17)
    code, out, err = invoke("export", str(folder), "-o", str(output), "--step", "1000")
    assert (code, out, err) == (2, "", f"error: output='{output}': exists; --force replaces it\n")
    code, out, _ = invoke("export", str(folder), "-o", str(output), "--step", "1000", "--force")
    assert (code, out.endswith("of step 1,000 of night\n")) == (0, True)


def test_export_of_a_torch_run_takes_the_model_or_everything(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    state = {"model": {"0.weight": np.ones(2)}, "optimizer": {"groups": [{"lr": 0.1}], "state": {"m": np.ones(2)}}}
    stamp = Stamp("night", "rfab@4", epoch=12, step=3, cursor=9, chain=b"")
    CheckpointFolder(tmp_path / "run1").write(stamp, StateTree(state).image(), "study")
    code, out, _ = invoke("export", str(tmp_path / "run1"), "-o", str(tmp_path / "model"))
    assert (code, len(out.splitlines()), list(numpy.load_file(tmp_path / "model"))) == (0, 1, ["0.weight"])
    code, out, _ = invoke("export", str(tmp_path / "run1"), "-o", str(tmp_path / "all"), "--all")
    assert sorted(numpy.load_file(tmp_path / "all")) == ["model.0.weight", "optimizer.state.m"]
    assert out.splitlines()[1] == "left out: 1 number or other plain value; safetensors has arrays alone"


def test_export_names_what_it_does_not_use_and_fails_without_a_valid_one(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    output, path = tmp_path / "model.safetensors", next(folder.glob("step-000001010-*"))
    damage(path, -5)
    code, out, err = invoke("export", str(folder), "-o", str(output))
    assert (code, "of step 1,000 of night" in out) == (0, True)
    assert err == f"not used: Checkpoint {path}: 1 of 3 blocks of 1 MiB is damaged, first block 2\n"
    output.unlink()
    code, out, err = invoke("export", str(path), "-o", str(output))
    assert (code, out, err.startswith(f"error: Checkpoint {path}: 1 of 3 blocks")) == (1, "", True)
    assert invoke("export", str(tmp_path), "-o", str(output)) == (
        1,
        "",
        f"error: Checkpoint {tmp_path}: no checkpoint in this folder\n",
    )
    assert not output.exists()


def test_export_without_the_package_is_one_line_with_the_command(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert invoke("export", str(folder), "-o", str(tmp_path / "x")) == (
        1,
        "",
        "error: safetensors is not available here: pip install 'ringfort[export]'\n",
    )


def test_the_real_command_exports(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    command = [sys.executable, "-m", "ringfort", "checkpoint", "export", "run1", "-o", "model.safetensors"]
    first = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout == "model.safetensors: 1 array, 3.0 MiB, of step 1,010 of night\n"
    second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (second.returncode, second.stdout) == (2, "")
    assert second.stderr == "error: output='model.safetensors': exists; --force replaces it\n"
