"""`ringfort dash` on one host, and another host of the same network that wants to look."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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


def started(host: Host, home: Path, *options: str) -> tuple[str, str]:
    """Start it with a recording, and return what it says up to its link, and the rest up to `Ctrl-C ends`."""
    recording = home / "run.rec"
    if not recording.exists():
        recorder = Recorder(recording)
        recorder.write(Reported(Report(Header(7, 1e9, 0, 1, run="night"), 1e9, "a", "attic")), 1e9)
        recorder.close()
    command = [sys.executable, "-m", "ringfort", "dash", str(recording), "--no-browser", *options]
    variables = {"RINGFORT_HOME": str(home), "PYTHONUNBUFFERED": "1"}
    process = host.start(*command, variables=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
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
