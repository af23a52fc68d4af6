"""`ringfort dash`: what it says and refuses. Browsers are in tests/integration."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ringfort.cli.app import app
from ringfort.cli.dash import redirect_to
from ringfort.dashboard.known import Reported
from ringfort.dashboard.recording_file import Recorder
from ringfort.telemetry.records import Header
from ringfort.telemetry.report import Report
from tests.helpers.agents import until


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "run.recording"
    recorder = Recorder(path)
    for second in range(3):
        recorder.write(Reported(Report(Header(7, 1e9, 0, 1, run="night"), 1e9 + second, "a", "attic")), 1e9 + second)
    recorder.close()
    return path


def failure(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["dash", *arguments])
    return result.exit_code, result.stderr.strip()


@pytest.mark.parametrize("name", ["starlette", "uvicorn"])
def test_without_the_extra_it_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    assert failure() == (1, f"error: {name} is not available here: pip install 'ringfort[ui]'")


@pytest.mark.parametrize("option", [("--peer", "attic"), ("--interface", "lo"), ("--record", "x")])
def test_what_a_recording_does_not_need_is_refused(option: tuple[str, str], recording: Path) -> None:
    code, said = failure(str(recording), *option)
    assert code == 2
    assert "invalid with a recording" in said


def test_a_file_that_is_no_recording_is_told(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("hello")
    for name in ("notes", "nothing"):
        code, said = failure(str(tmp_path / name))
        assert code == 2
        assert str(tmp_path / name) in said


class Terminal:
    """`ringfort dash` in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._side, other = os.openpty()
        command = [sys.executable, "-m", "ringfort", "dash", *arguments]
        # As on a machine without a screen: no browser opens.
        environment = {name: value for name, value in os.environ.items() if not name.endswith("DISPLAY")}
        self.child = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, env=environment)
        os.close(other)
        self.said = ""

    def link(self) -> str:
        """Wait for the next link."""
        while "Ctrl-C ends" not in self.said:
            self.said += os.read(self._side, 4096).decode()
        found = re.findall(r"within 60 s; it works once:\s+(http://127.0.0.1:\d+/open#\S{43})\s", self.said)
        self.said = ""
        assert len(found) == 1
        return found[0]

    def type(self, keys: bytes) -> None:
        os.write(self._side, keys)

    def end(self) -> int:
        self.child.send_signal(signal.SIGINT)
        try:
            return self.child.wait(20)
        finally:
            os.close(self._side)


def test_it_plays_a_recording_to_whoever_has_a_link_prints_another_after_enter_and_ends_with_ctrl_c(
    recording: Path,
) -> None:
    terminal = Terminal(str(recording), "--port", "0")
    try:
        first = terminal.link()
        terminal.type(b"\n")
        second = terminal.link()
        terminal.type(b"\x04")  # Ctrl-D: nothing more will be typed
        assert first != second
        origin, _, secret = first.partition("/open#")
        connection = HTTPConnection(origin.removeprefix("http://"), timeout=20)
        connection.request("POST", "/api/session", json.dumps({"link": secret}), {"origin": origin})
        assert connection.getresponse().status == 204
        connection.close()
    finally:
        code = terminal.end()
    assert code == 0


def test_a_browser_is_led_to_the_link_by_a_file_that_nobody_else_can_read() -> None:
    link = 'http://127.0.0.1:7415/open#abc"&<'
    with redirect_to(link) as path:
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert "http://127.0.0.1:7415/open#abc&quot;&amp;&lt;" in path.read_text()
    assert not path.parent.exists()


def test_the_link_is_no_argument_of_the_browser(recording: Path, tmp_path: Path) -> None:
    browser, seen = tmp_path / "browser", tmp_path / "seen"
    browser.write_text(f'#!/bin/sh\necho "$@" > {seen}.new\nmv {seen}.new {seen}\n')
    browser.chmod(0o755)
    command = [sys.executable, "-m", "ringfort", "dash", str(recording), "--port", "0", "--open"]
    environment = {**os.environ, "BROWSER": f"{browser} %s"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=environment) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            secret = child.stdout.readline().decode().strip().partition("#")[2]
            until(seen.exists, "the browser was not started")
            file = Path(seen.read_text().strip().removeprefix("file://"))
            assert len(secret) == 43
            assert secret not in seen.read_text()
            assert secret in file.read_text()
        finally:
            child.send_signal(signal.SIGINT)
            child.wait(20)
    assert not file.exists()


def test_it_works_without_a_keyboard(recording: Path) -> None:
    command = f"exec {sys.executable} -m ringfort dash {recording} --port 0 --no-browser <&-"
    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        said = [child.stdout.readline(), child.stdout.readline()]
        assert b"http://" in said[1]
        assert child.stderr is not None
        assert child.stderr.readline() == b"Ctrl-C ends\n"
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=20)
    assert (child.returncode, errors) == (0, b"")
