"""The page over HTTP, as a browser and as others ask for it: a real server on loopback."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from ringfort.dashboard.web.certificate import certificate_for
from ringfort.dashboard.web.connections import MAX_CONNECTIONS, MAX_OF_ADDRESS, MAX_UNPROVED, Connections
from ringfort.dashboard.web.hub import MAX_WAITING
from ringfort.dashboard.web.security import HEADERS, LINK_SECONDS, PAGE_HEADER, SESSION_SECONDS, Keys
from ringfort.dashboard.web.server import DashServer
from ringfort.errors import InvalidArgumentError
from ringfort.telemetry.view import RunView
from tests.helpers.agents import until
from tests.helpers.dash_source import ShownSource, three_machines


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


@pytest.fixture(scope="module")
def server() -> Iterator[DashServer]:
    source = ShownSource(three_machines, {1: ["a line", "<script>alert(1)</script>"]})
    with DashServer(source, port=0, interval=0.02, keys=Keys(CLOCK)) as running:
        # Its second thread starts with the first question, and must not count as left behind by one of the tests.
        assert ask(running, "/api/log?rank=1", **access(running)).status == 200
        yield running


class Answer:
    """What came back."""

    def __init__(self, found: http.client.HTTPResponse) -> None:
        self.status, self.headers = found.status, found.headers
        self.text = found.read().decode()


def ask(server: DashServer, path: str, method: str = "GET", body: Any = None, **headers: str) -> Answer:
    """Ask for exactly this path, with these headers: nothing is put in order before it is sent."""
    connection = http.client.HTTPConnection("127.0.0.1", server.site.port, timeout=10)
    try:
        connection.putrequest(method, path, skip_host="host" in headers)
        if method == "POST" and "origin" not in headers:
            headers["origin"] = server.site.origin
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        for name, value in {**headers, "content-length": str(len(data))}.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders(data)
        return Answer(connection.getresponse())
    finally:
        connection.close()


def secret(server: DashServer) -> str:
    return server.new_link().partition("#")[2]


def access(server: DashServer) -> dict[str, str]:
    """Be let in: the headers of requests from then on."""
    answer = ask(server, "/api/session", "POST", {"link": secret(server)})
    assert answer.status == 204
    return {"cookie": answer.headers["set-cookie"].partition(";")[0], PAGE_HEADER: answer.headers[PAGE_HEADER]}


def test_a_link_leads_to_the_page(server: DashServer) -> None:
    link = server.new_link()
    assert link.startswith(f"http://127.0.0.1:{server.site.port}/open#")
    assert ask(server, "/open").status == 200
    answer = ask(server, "/api/session", "POST", {"link": link.partition("#")[2]})
    assert answer.headers["set-cookie"].endswith("; Path=/; HttpOnly; SameSite=Strict")
    page = ask(server, "/", cookie=answer.headers["set-cookie"].partition(";")[0])
    assert page.status == 200
    assert '<script src="/static/app.js" type="module">' in page.text


def test_a_used_an_expired_and_an_unknown_link_say_what_they_are(server: DashServer) -> None:
    link = secret(server)
    assert ask(server, "/api/session", "POST", {"link": link}).status == 204
    used = ask(server, "/api/session", "POST", {"link": link})
    late = secret(server)
    CLOCK.now += LINK_SECONDS
    expired = ask(server, "/api/session", "POST", {"link": late})
    unknown = ask(server, "/api/session", "POST", {"link": "x"})
    assert [used.status, expired.status, unknown.status] == [403, 403, 403]
    assert "was used before" in used.text
    assert "has expired" in expired.text
    assert "unknown here" in unknown.text
    assert "set-cookie" not in used.headers


PRIVATE = ["/", "/api/session", "/api/events", "/api/log?rank=0", "/api/playback", "/nowhere"]


@pytest.mark.parametrize("path", PRIVATE)
def test_without_a_cookie_nothing_is_shown(server: DashServer, path: str) -> None:
    for headers in ({}, {"cookie": f"{server.site.cookie}=guess"}):
        answer = ask(server, path, **headers)
        assert answer.status == 401
        assert "ringfort dash" in answer.text


@pytest.mark.parametrize("path", ["/api/session", "/api/events", "/api/log?rank=0"])
def test_a_cookie_that_another_server_of_this_machine_got_is_of_no_use(server: DashServer, path: str) -> None:
    mine = access(server)
    assert ask(server, path, cookie=mine["cookie"]).status == 401
    assert ask(server, path, cookie=mine["cookie"], **{PAGE_HEADER: "guess"}).status == 401
    assert ask(server, "/", cookie=mine["cookie"]).status == 200  # the page, without data


def test_connections_that_say_nothing_or_little_lock_nobody_out(
    server: DashServer, caplog: pytest.LogCaptureFixture
) -> None:
    address = "127.0.0.1", server.site.port
    head = f"POST /api/session HTTP/1.1\r\nHost: 127.0.0.1:{address[1]}\r\nOrigin: {server.site.origin}\r\n"
    with ExitStack() as stack:
        for number in range(2 * MAX_CONNECTIONS):
            idle = stack.enter_context(socket.create_connection(address))
            if number % 2:  # it begins a request, and never ends it
                idle.sendall(f"{head}Content-Length: 50\r\n\r\n".encode())
        mine = access(server)
        assert ask(server, "/api/log?rank=1", **mine).status == 200
        assert ask(server, "/", **mine).status == 200
    until(lambda: server.connections <= 1, "closed connections are still counted")
    assert caplog.messages == [], "the terminal is for people"


def test_a_connection_without_a_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfort.dashboard.web.connections.FIRST_REQUEST", 0.2)
    monkeypatch.setattr("ringfort.dashboard.web.app.BODY_SECONDS", 0.2)
    with DashServer(ShownSource(three_machines), port=0) as server:
        address = "127.0.0.1", server.site.port
        with socket.create_connection(address, 10) as silent, socket.create_connection(address, 10) as slow:
            head = f"POST /api/session HTTP/1.1\r\nHost: 127.0.0.1:{address[1]}\r\nOrigin: {server.site.origin}\r\n"
            slow.sendall(f"{head}Content-Length: 50\r\n\r\n".encode())
            assert slow.recv(12) == b"HTTP/1.1 408"
            with suppress(ConnectionResetError):
                assert silent.recv(1) == b""


def test_another_machine_has_a_part_of_the_connections() -> None:
    connections, closed = Connections(), list[str]()

    def opened(host: str, port: int) -> None:
        connections.opened((host, port), MagicMock(fileno=lambda: 9, shutdown=lambda _: closed.append(host)))

    for port in range(200):
        opened("10.0.0.9", port)
    opened("10.0.0.5", 1)
    opened("127.0.0.1", 1)
    assert len(connections) == MAX_OF_ADDRESS + 2
    assert set(closed) == {"10.0.0.9"}
    connections.proved(("127.0.0.1", 1))
    assert len(connections) == MAX_OF_ADDRESS + 1


def test_an_expired_cookie_leads_to_a_page_that_says_what_to_type(server: DashServer) -> None:
    mine = access(server)
    CLOCK.now += SESSION_SECONDS + 1
    answer = ask(server, "/", **mine)
    assert answer.status == 401
    assert answer.headers["content-type"].startswith("text/html")
    assert "type <code>ringfort dash</code>" in answer.text
    assert "press <kbd>Enter</kbd>" in answer.text


@pytest.mark.parametrize("path", ["/", "/open", "/static/app.js", "/api/log?rank=0"])
def test_a_foreign_host_is_refused_everywhere(server: DashServer, path: str) -> None:
    mine = access(server)
    assert ask(server, path, **mine, host=f"evil.example:{server.site.port}").status == 403
    assert ask(server, path, **mine, host=f"localhost:{server.site.port}").status == 200


def test_a_foreign_origin_is_refused_and_exchanges_no_link(server: DashServer) -> None:
    link, mine = secret(server), access(server)
    for origin in ("https://evil.example", "null"):
        assert ask(server, "/api/session", "POST", {"link": link}, origin=origin).status == 403
        assert ask(server, "/api/events", **mine, origin=origin).status == 403
    assert ask(server, "/api/log?rank=0", **mine, sec_fetch_site="cross-site").status == 403
    assert ask(server, "/api/session", "POST", {"link": link}).status == 204


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/../../source.py",
        "/static/..%2fserver.py",
        "/static/%2e%2e/server.py",
        "/static//etc/passwd",
        "/static/uplot/../../server.py",
        "/static/uplot",
        "/static/uplot/LICENSE",
        "/static/",
        "/static/app.js%00.html",
    ],
)
def test_only_the_files_of_the_page_are_served(server: DashServer, path: str) -> None:
    answer = ask(server, path, **access(server))
    assert answer.status == 404
    assert "import" not in answer.text


def test_every_answer_has_the_headers(server: DashServer) -> None:
    mine = access(server)
    answers = [
        ask(server, "/", **mine),
        ask(server, "/"),
        ask(server, "/open"),
        ask(server, "/static/app.js"),
        ask(server, "/static/nothing"),
        ask(server, "/api/log?rank=0", **mine),
        ask(server, "/", host="evil.example"),
        ask(server, "/", "DELETE", origin=server.site.origin, **mine),
    ]
    assert [answer.status for answer in answers] == [200, 401, 200, 200, 404, 200, 403, 405]
    for answer in answers:
        assert {name: answer.headers[name] for name in HEADERS} == dict(HEADERS)
        assert "server" not in answer.headers
        assert "access-control-allow-origin" not in answer.headers


def test_pages_have_nothing_inline_and_no_address_of_another_host(server: DashServer) -> None:
    for name in ("index.html", "open.html", "closed.html"):
        text = ask(server, f"/static/{name}").text
        assert "<style" not in text
        assert " style=" not in text
        assert "<script>" not in text
        assert "://" not in text


def test_events_begin_with_everything(server: DashServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.site.port, timeout=10)
    try:
        connection.request("GET", "/api/events", headers=access(server))
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [answer.readline() for _ in range(7)]
    finally:
        connection.close()
    assert lines[0].startswith(b"retry:")
    first, second = json.loads(lines[2].removeprefix(b"data: ")), json.loads(lines[4].removeprefix(b"data: "))
    assert first["full"]
    assert [rank["name"] for rank in first["ranks"]] == ["study", "attic", "laptop"]
    assert second["seq"] == first["seq"] + 1


def test_output_of_a_rank_is_data(server: DashServer) -> None:
    mine = access(server)
    answer = ask(server, "/api/log?rank=1", **mine)
    assert answer.headers["content-type"] == "application/json"
    assert json.loads(answer.text) == {"lines": ["a line", "<script>alert(1)</script>"]}
    for rank in ("", "x", "-1", "999999999", "%C2%B2"):
        assert ask(server, f"/api/log?rank={rank}", **mine).status == 400


def test_malformed_and_long_requests_are_refused(server: DashServer) -> None:
    for body in (b"", b"{", b"[]", b'{"link": 5}', b"\xff\xfe", b'{"link": "' + b"x" * 300 + b'"}'):
        assert ask(server, "/api/session", "POST", body).status == 400
    assert ask(server, "/api/session", "POST", b"x" * 5000).status == 413


def test_what_runs_now_cannot_be_wound_back(server: DashServer) -> None:
    answer = ask(server, "/api/playback", "POST", {"position": 1}, **access(server))
    assert (answer.status, answer.text) == (409, "This is not a recording.\n")


def test_a_browser_that_does_not_read_is_dropped() -> None:
    """A page that the system has frozen: its connection stays open, and nothing is read any more."""
    made: list[int] = []

    def large(now: float) -> RunView:
        made.append(1)
        return RunView(now, notice=str(now) + "x" * 4_000_000)

    with DashServer(ShownSource(large), port=0, interval=0.001) as server, socket.socket() as frozen:
        frozen.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        frozen.settimeout(20)
        frozen.connect(("127.0.0.1", server.site.port))
        headers = {"Host": f"127.0.0.1:{server.site.port}", **access(server)}
        lines = ["GET /api/events HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        frozen.sendall("\r\n".join(lines).encode())
        assert frozen.recv(12) == b"HTTP/1.1 200"
        until(lambda: server.viewers == 0, "it is still served")
        assert len(made) < 4 * MAX_WAITING


def test_a_port_that_is_taken_is_told() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(InvalidArgumentError, match="in use"),
        DashServer(ShownSource(three_machines), port=taken.getsockname()[1]),
    ):
        pass


def test_other_machines_may_look_only_by_tls(tmp_path: Path) -> None:
    source = ShownSource(three_machines)
    with pytest.raises(InvalidArgumentError, match="certificate"):
        DashServer(source, addresses=["127.0.0.2"])
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    certificate = certificate_for(home / "certificate.pem", ["127.0.0.1", "127.0.0.2"])
    with DashServer(source, port=0, addresses=["127.0.0.2"], certificate=certificate) as server:
        assert server.new_link().startswith(f"https://127.0.0.2:{server.site.port}/open#")
        trust = ssl.create_default_context(cafile=str(certificate.path))
        connection = http.client.HTTPSConnection("127.0.0.2", server.site.port, context=trust, timeout=10)
        try:
            body = json.dumps({"link": secret(server)})
            connection.request("POST", "/api/session", body, {"origin": server.site.origin})
            answer = connection.getresponse()
            assert answer.status == 204
            assert answer.headers["set-cookie"].startswith("__Host-ringfort-dash-")
            assert answer.headers["set-cookie"].endswith("; Secure")
        finally:
            connection.close()


def test_connections_that_never_begin_tls_lock_nobody_out(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    certificate = certificate_for(home / "certificate.pem", ["127.0.0.1"])
    with DashServer(ShownSource(three_machines), port=0, certificate=certificate) as server, ExitStack() as stack:
        address = "127.0.0.1", server.site.port
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(2 * MAX_CONNECTIONS)]
        for one in silent:
            one.setblocking(False)
        until(lambda: sum(map(_is_open, silent)) <= MAX_UNPROVED, "they stay open")
        trust = ssl.create_default_context(cafile=str(certificate.path))
        connection = http.client.HTTPSConnection(*address, context=trust, timeout=10)
        connection.request("GET", "/open")
        assert connection.getresponse().status == 200
        connection.close()
        assert server.connections <= MAX_UNPROVED


def _is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
