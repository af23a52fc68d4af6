"""`ringfort dash` on one host, and another host of the same network that wants to look."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from ringfort.dashboard.known import Reported
from ringfort.dashboard.recording_file import Recorder
from ringfort.telemetry.records import Header
from ringfort.telemetry.report import Report
from tests.helpers.namespaces import Host, lan, needs_namespaces

pytestmark = needs_namespaces

LOOK = """
import http.client, json, ssl, sys
host, port, secret = sys.argv[1:]
try:
    data = ssl.get_server_certificate((host, int(port)), timeout=10)
except OSError as exc:
    sys.exit(print(type(exc).__name__))
trust = ssl.create_default_context(cadata=data)
connection = http.client.HTTPSConnection(host, int(port), context=trust, timeout=10)
connection.request("POST", "/api/session", json.dumps({"link": secret}), {"origin": f"https://{host}:{port}"})
answer = connection.getresponse()
import hashlib
print(hashlib.sha256(ssl.PEM_cert_to_DER_cert(data)).hexdigest(), answer.status, answer.headers["set-cookie"])
"""


def recording_in(home: Path) -> Path:
    recording = home / "run.rec"
    if not recording.exists():
        recorder = Recorder(recording)
        recorder.write(Reported(Report(Header(7, 1e9, 0, 1, run="night"), 1e9, "a", "attic")), 1e9)
        recorder.close()
    return recording


def dash(recording: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "ringfort", "dash", str(recording), "--no-browser", *options]


def variables_of(home: Path) -> dict[str, str]:
    return {"RINGFORT_HOME": str(home), "PYTHONUNBUFFERED": "1"}


def started(host: Host, home: Path, *options: str) -> tuple[str, str]:
    """Start it with a recording, and return what it says up to its link, and the rest up to `Ctrl-C ends`."""
    process = host.start(
        *dash(recording_in(home), *options),
        variables=variables_of(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said = ""
    while "Ctrl-C ends" not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    link = re.search(r"https?://\S+", said)
    assert link
    return link[0], said


def looked(host: Host, address: str, port: str, secret: str) -> list[str]:
    return host.run(sys.executable, "-c", LOOK, address, port, secret).split(maxsplit=2)


def test_only_with_lan_another_machine_gets_in_and_sees_the_fingerprint_that_was_printed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    with lan(2) as net:
        here, there = net.hosts
        link, _ = started(here, home, "--port", "7415")
        assert link.startswith("http://127.0.0.1:7415/open#")
        assert looked(there, here.address(), "7415", "x") == ["ConnectionRefusedError"]

        link, said = started(here, home, "--port", "7416", "--lan")
        address, port, secret = re.fullmatch(r"https://([\d.]+):(\d+)/open#(\S+)", link).groups()
        assert address == here.address()
        fingerprint, status, cookie = looked(there, address, port, secret)
        assert fingerprint.upper() in said.replace(":", "")
        assert status == "204"
        assert cookie.strip().endswith("; Path=/; HttpOnly; SameSite=Strict; Secure")
        assert looked(there, address, port, secret)[1] == "403", "a link lets in once"
        assert (home / "dash-certificate.pem").stat().st_mode & 0o77 == 0


def qr_code_in(said: str) -> str:
    """Read the QR code that a terminal shows in half blocks, two rows of dots in a line."""
    zxing = pytest.importorskip("zxingcpp", reason="needs zxing-cpp: pip install zxing-cpp")
    halves = {" ": (0, 0), "\N{UPPER HALF BLOCK}": (1, 0), "\N{LOWER HALF BLOCK}": (0, 1), "\N{FULL BLOCK}": (1, 1)}
    plain = re.sub(r"\x1b\[[0-9;]*m", "", said)
    lines = [line for line in plain.splitlines() if len(line) > 20 and set(line) <= set(halves)]
    assert len({len(line) for line in lines}) == 1, plain
    rows = [[halves[sign][half] for sign in line] for line in lines for half in range(2)]
    dots = np.kron(np.array(rows, np.uint8) * 255, np.ones((4, 4), np.uint8))
    [found] = zxing.read_barcodes(dots)
    return found.text


def test_the_qr_code_in_a_terminal_is_the_link(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    with lan(2) as net:
        here, there = net.hosts
        ours, terminal = os.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 100, 0, 0))
        command = dash(recording_in(home), "--port", "7416", "--lan")
        here.start(*command, variables=variables_of(home), stdin=terminal, stdout=terminal, stderr=terminal)
        os.close(terminal)
        said = ""
        with suppress(OSError):  # it has ended
            while "Ctrl-C ends" not in said:
                said += os.read(ours, 4096).decode()
        os.close(ours)
        assert "Ctrl-C ends" in said, said
        link = qr_code_in(said)
        assert link in said
        address, port, secret = re.fullmatch(r"https://([\d.]+):(\d+)/open#(\S+)", link).groups()
        assert address == here.address()
        assert looked(there, address, port, secret)[1] == "204", "what the camera of a phone reads lets it in"
