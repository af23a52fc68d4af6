"""Who may look: links, sessions, Host, Origin, cookies and headers, without a server."""

from __future__ import annotations

from itertools import count

import pytest

from ringfort.dashboard.web.security import (
    HEADERS,
    LINK_SECONDS,
    MAX_LINKS,
    MAX_SESSIONS,
    SESSION_SECONDS,
    Keys,
    LinkError,
    Session,
    Site,
)

SITE = Site(7415)


class Clock:
    """A clock that is set by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def keys(clock: Clock) -> Keys:
    numbers = count()
    return Keys(clock, lambda: f"secret-{next(numbers)}")


def test_a_link_is_exchanged_for_a_session() -> None:
    made = Keys()
    session = made.redeem(made.new_link())
    assert made.admits(session)
    assert not made.admits(Session("", ""))
    assert not made.admits(Session(session.cookie[:-1], session.page))


def test_a_cookie_without_the_key_of_its_page_gets_no_data() -> None:
    made = Keys()
    session, other = made.redeem(made.new_link()), made.redeem(made.new_link())
    for page in ("", session.cookie, session.page[:-1], other.page):
        assert not made.admits(Session(session.cookie, page))
    assert not made.admits(Session("", session.page))
    assert made.knows(Session(session.cookie, ""))
    assert made.admits(session)


def test_a_link_lets_in_once() -> None:
    made = keys(Clock())
    link = made.new_link()
    made.redeem(link)
    with pytest.raises(LinkError, match="was used before"):
        made.redeem(link)


def test_a_link_expires_after_a_minute() -> None:
    clock = Clock()
    made = keys(clock)
    early, late = made.new_link(), made.new_link()
    clock.now += LINK_SECONDS - 0.01
    made.redeem(early)
    clock.now += 0.01
    with pytest.raises(LinkError, match="has expired"):
        made.redeem(late)


def test_a_link_of_another_server_is_unknown() -> None:
    with pytest.raises(LinkError, match="unknown here"):
        keys(Clock()).redeem(Keys().new_link())


def test_a_session_is_no_link_and_a_link_no_session() -> None:
    made = keys(Clock())
    link = made.new_link()
    assert not made.admits(Session(link, link))
    session = made.redeem(link)
    for secret in session:
        with pytest.raises(LinkError):
            made.redeem(secret)


def test_a_session_lasts_while_it_is_used_and_ends_a_day_later() -> None:
    clock = Clock()
    made = keys(clock)
    session = made.redeem(made.new_link())
    for _ in range(10):
        clock.now += SESSION_SECONDS
        assert made.admits(session)
    clock.now += SESSION_SECONDS + 1
    assert not made.admits(session)
    assert not made.admits(session), "a session that has ended does not come back"


def test_links_and_sessions_are_bounded_and_the_oldest_go_first() -> None:
    made = keys(Clock())
    first = made.new_link()
    for _ in range(MAX_LINKS):
        made.new_link()
    with pytest.raises(LinkError, match="unknown"):
        made.redeem(first)
    sessions = [made.redeem(made.new_link()) for _ in range(MAX_SESSIONS)]
    assert made.admits(sessions[0])  # and so is the latest
    made.redeem(made.new_link())
    assert [made.admits(session) for session in sessions[:3]] == [True, False, True]


@pytest.mark.parametrize("host", ["127.0.0.1:7415", "localhost:7415", "LOCALHOST:7415"])
def test_the_page_is_served_at_its_own_names(host: str) -> None:
    assert SITE.refusal("GET", {"host": host}) is None


@pytest.mark.parametrize(("site", "host"), [(Site(80), "127.0.0.1"), (Site(443, ("10.0.0.5",), True), "10.0.0.5")])
def test_browsers_leave_out_the_usual_port(site: Site, host: str) -> None:
    assert site.origin == f"{site.scheme}://{host}"
    for port in ("", f":{site.port}"):
        for origin in ("", f":{site.port}"):
            headers = {"host": host + port, "origin": f"{site.scheme}://{host}{origin}"}
            assert site.refusal("POST", headers) is None
        assert site.refusal("POST", {"host": host + port, "origin": f"{site.scheme}://{host}:7415"}) is not None
    assert site.refusal("GET", {"host": f"{host}:7415"}) is not None
    assert site.refusal("GET", {"host": "evil.example"}) is not None


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "evil.example:7415",
        "127.0.0.1",
        "127.0.0.1:80",
        "127.0.0.1:7415.evil.example",
        "127.0.0.1:7415,evil.example",
        "[::1]:7415",
        "0.0.0.0:7415",
    ],
)
def test_a_foreign_host_is_refused(host: str) -> None:
    refusal = SITE.refusal("GET", {"host": host})
    assert refusal is not None
    assert refusal.status == 403
    assert "http://127.0.0.1:7415" in refusal.why


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "null", "", "http://127.0.0.1:80", "https://127.0.0.1:7415", "http://localhost:7415"],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_foreign_origin_is_refused(method: str, origin: str) -> None:
    refusal = SITE.refusal(method, {"host": "127.0.0.1:7415", "origin": origin})
    assert refusal is not None
    assert refusal.status == 403


def test_a_request_that_changes_something_needs_an_origin() -> None:
    host = {"host": "127.0.0.1:7415"}
    assert SITE.refusal("POST", host) is not None
    assert SITE.refusal("POST", host | {"origin": "http://127.0.0.1:7415"}) is None


@pytest.mark.parametrize("where", ["cross-site", "same-site", "anything"])
def test_another_page_may_open_this_one_and_not_read_it(where: str) -> None:
    told = {"host": "127.0.0.1:7415", "sec-fetch-site": where}
    assert SITE.refusal("GET", told | {"sec-fetch-mode": "no-cors"}) is not None
    assert SITE.refusal("GET", told | {"sec-fetch-mode": "navigate"}) is None
    assert SITE.refusal("POST", told | {"sec-fetch-mode": "navigate", "origin": "null"}) is not None


def test_the_cookie_is_for_this_server_alone_and_no_script_can_read_it() -> None:
    abc = Session("abc", "def")
    assert SITE.set_cookie(abc) == "ringfort-dash-7415=abc; Path=/; HttpOnly; SameSite=Strict"
    secure = Site(443, ("192.168.1.20",), is_secure=True)
    assert secure.set_cookie(abc) == "__Host-ringfort-dash-443=abc; Path=/; HttpOnly; SameSite=Strict; Secure"
    assert SITE.session_of({"cookie": "other=1; ringfort-dash-7415=abc; ringfort-dash-7416=x"}) == Session("abc", "")
    assert SITE.session_of({"cookie": "ringfort-dash-7415=abc", "ringfort-page": "def"}) == abc
    assert SITE.session_of({"cookie": "ringfort-dash-7416=x"}) == SITE.session_of({}) == Session("", "")


def test_the_policy_allows_nothing_from_elsewhere_and_nothing_inline() -> None:
    policy = dict(part.strip().split(" ", 1) for part in HEADERS["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    assert {policy[name] for name in ("base-uri", "form-action", "frame-ancestors", "trusted-types")} == {"'none'"}
    assert "unsafe" not in HEADERS["content-security-policy"]
