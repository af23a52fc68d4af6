"""`ringfort top`: its options, and one picture as text. The live picture is in unit/dashboard/test_terminal.py."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from typer import Exit
from typer.testing import CliRunner

from ringfort.cli import app, top as top_module
from ringfort.cli.top import SECONDS, _show_once
from ringfort.telemetry.view import RunView
from tests.helpers.shown_runs import ViewSource, record, three_machines


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["top", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_without_a_terminal_it_names_the_option_that_prints() -> None:
    assert invoke() == (
        1,
        "",
        "error: ringfort top needs a terminal; `ringfort top --once` prints one picture as text\n",
    )


def test_without_textual_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(top_module, "find_spec", lambda name: None if name == "textual" else found(name))
    code, _, err = invoke()
    assert code == 1
    assert err == (
        "error: Textual, which `ringfort top` needs, is not available here: pip install 'ringfort[ui]'; "
        "`ringfort top --once` works without it\n"
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--json",), "json=True: use it together with --once"),
        (("old.rec", "--record", "new.rec"), "record='new.rec': cannot be used with a recording (old.rec)"),
        (("old.rec", "--peer", "attic"), "peer='attic': cannot be used with a recording (old.rec)"),
        (("old.rec", "--interface", "en0"), "interface='en0': cannot be used with a recording (old.rec)"),
    ],
)
def test_options_that_contradict_each_other_are_usage_errors(arguments: tuple[str, ...], complaint: str) -> None:
    assert invoke(*arguments) == (2, "", f"error: {complaint}\n")


def test_once_prints_the_run_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    waits: list[float] = []
    source = ViewSource(three_machines().view())
    _show_once(source, "night", json_=False, wait=waits.append)
    text = capsys.readouterr().out
    assert source.wanted == ["night", "night"]
    assert waits == [SECONDS]
    for words in (
        "train.py  run night  3 ranks on 3 machines",
        "waits 30%",
        "8 of 84 Mbit/s",
        "rank 2 on attic is here",
    ):
        assert words in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_once_prints_the_view_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    view = three_machines().view()
    _show_once(ViewSource(view), None, json_=True, wait=lambda _: None)
    document = json.loads(capsys.readouterr().out)
    assert document["run"] == "night"
    assert [rank["name"] for rank in document["ranks"]] == ["study", "laptop", "attic"]
    assert document["verdict"]["sentence"] == view.verdict.sentence


@pytest.mark.parametrize("json_", [False, True])
def test_once_fails_if_there_is_nobody(capsys: pytest.CaptureFixture[str], json_: bool) -> None:
    with pytest.raises(Exit) as failed:
        _show_once(ViewSource(RunView(0.0)), None, json_=json_, wait=lambda _: None)
    assert failed.value.exit_code == 1
    out = capsys.readouterr().out
    assert json.loads(out)["ranks"] == [] if json_ else "Nobody was found" in out


def test_textual_is_not_imported_before_it_is_needed() -> None:
    from subprocess import run

    code = "import sys; import ringfort.cli; import ringfort.dashboard.picture; print('textual' in sys.modules)"
    assert run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_once_prints_the_end_of_a_recording_also_of_one_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "night.rec"
    record(path, 20)
    code, out, err = invoke("--once", str(path))
    assert (code, err) == (0, "")
    assert "3 ranks on 3 machines" in out
    assert "step 40 of 5,000" in out
    assert json.loads(invoke("--once", "--json", str(path))[1])["is_recording"]
    path.write_bytes(path.read_bytes()[:-100])
    code, out, _ = invoke("--once", str(path))
    assert code == 0
    assert "! The recording was cut off" in out


def test_a_file_that_is_not_a_recording_is_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("no recording")
    code, _, err = invoke("--once", str(path))
    assert code == 2
    assert str(path) in err
