"""Who may look at the page: one-time links, sessions, Host, Origin and the headers of every answer. Pure.

A page on 127.0.0.1 is not private by itself. Other users of the machine can open it, and so can each page of the
internet that is open in the same browser, by requests across origins or by a name that it lets point to 127.0.0.1 (DNS
rebinding). So a link lets in once and for a minute, and everything behind it needs what the link was exchanged for, the
right Host, and no foreign Origin.

A link is exchanged for two secrets. The cookie cannot be read by scripts, but browsers send it to all ports of a host,
so also to a server of another user of this machine. The page's key is in storage that belongs to this port alone, and
the page sends it with each request for data. Neither is of use without the other.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from hmac import compare_digest
from typing import Final, NamedTuple

USUAL_PORTS: Final = {"http": 80, "https": 443}
PAGE_HEADER: Final = "ringfort-page"
"""The header with the page's key, of requests and of the answer to a link."""
LINK_SECONDS: Final = 60.0
"""How long a link waits to be opened."""
SESSION_SECONDS: Final = 24 * 3600.0
"""How long a browser may be away. While a page is open its session does not end."""
MAX_LINKS: Final = 16
"""Links that are remembered, used and expired ones included, so that the page can say which of both it is."""
MAX_SESSIONS: Final = 32
"""Browsers that are let in. The one that was away for longest is forgotten first."""

# The last two: text of other machines cannot become HTML even by mistake, because assigning to innerHTML is an error.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Also for files: after an upgrade no browser may mix old and new ones.
    "cache-control": "no-store",
}
"""On every answer."""


@dataclass(frozen=True)
class Refusal:
    """A request that is not answered, and why, in words for the person at the browser."""

    status: int
    why: str


class Session(NamedTuple):
    """What a browser has to show."""

    cookie: str
    page: str


class LinkError(Exception):
    """A link does not let in. The message is for the person who opened it."""


@dataclass(frozen=True)
class Site:
    """Where the page is."""

    port: int
    hosts: tuple[str, ...] = ("127.0.0.1", "localhost")
    """Names and addresses that may stand in the address line. Of any other name somebody else may decide where it
    points to."""
    is_secure: bool = False
    """Whether it is served by TLS."""

    @property
    def scheme(self) -> str:
        """http or https."""
        return "https" if self.is_secure else "http"

    @property
    def origin(self) -> str:
        """The usual origin of the page."""
        return f"{self.scheme}://{self._at_port(self.hosts[0])}"

    def _at_port(self, host: str) -> str:
        """A host with the port, as browsers write it: without the usual one."""
        return host if self.port == USUAL_PORTS[self.scheme] else f"{host}:{self.port}"

    def _as_browsers(self, address: str) -> str:
        return address.lower().removesuffix(f":{USUAL_PORTS[self.scheme]}")

    @property
    def cookie(self) -> str:
        """The name of its cookie. Browsers keep cookies by host and not by port, so the port is part of it."""
        return f"{'__Host-' if self.is_secure else ''}ringfort-dash-{self.port}"

    def refusal(self, method: str, headers: Mapping[str, str]) -> Refusal | None:
        """Return why a request is refused by its Host, Origin or Sec-Fetch-Site; None if it is not. Several headers of
        one name are given as one, joined by commas, and so are refused."""
        host = self._as_browsers(headers.get("host", ""))
        if host not in map(self._at_port, self.hosts):
            return Refusal(403, f"This page is at {self.origin} only, and the browser asked for {host[:200]!r}.")
        origin = headers.get("origin")
        if origin is None and method not in ("GET", "HEAD"):
            return Refusal(403, "The browser did not say which page sends this request.")
        if origin is not None and self._as_browsers(origin) != f"{self.scheme}://{host}":
            return Refusal(403, f"The page {origin[:200]!r} may not use this one.")
        is_opened = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
        if not is_opened and headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return Refusal(403, "Another page may not use this one.")
        return None

    def session_of(self, headers: Mapping[str, str]) -> Session:
        """Return what a request shows; empty if it shows nothing."""
        cookies = (cookie.strip().partition("=") for cookie in headers.get("cookie", "").split(";"))
        mine = next((value for name, _, value in cookies if name == self.cookie), "")
        return Session(mine, headers.get(PAGE_HEADER, ""))

    def set_cookie(self, session: Session) -> str:
        """Return the header that gives a browser its cookie. It ends with the browser."""
        secure = "; Secure" if self.is_secure else ""
        return f"{self.cookie}={session.cookie}; Path=/; HttpOnly; SameSite=Strict{secure}"


class Keys:
    """Links and sessions. Only their hashes are kept."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        new_secret: Callable[[], str] = lambda: secrets.token_urlsafe(32),
    ) -> None:
        self._clock, self._new_secret = clock, new_secret
        self._links: OrderedDict[bytes, float | None] = OrderedDict()
        """When each ends; None if it was used."""
        self._sessions: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()
        """The page's key of each cookie, and when it was last used, in this order."""

    def new_link(self) -> str:
        """Return the secret of a new link."""
        secret = self._new_secret()
        self._links[_hash(secret)] = self._clock() + LINK_SECONDS
        while len(self._links) > MAX_LINKS:
            self._links.popitem(last=False)
        return secret

    def redeem(self, link: str) -> Session:
        """Return a new session for the secret of a link, once. Raises `LinkError`."""
        known = _hash(link)
        if known not in self._links:
            raise LinkError("This link is unknown here: it is incomplete, or of another `ringfort dash`.")
        end = self._links[known]
        if end is None:
            raise LinkError("This link was used before. Each link lets in once.")
        if self._clock() >= end:
            raise LinkError(f"This link has expired. Each link is for {LINK_SECONDS:.0f} seconds.")
        self._links[known] = None
        session = Session(self._new_secret(), self._new_secret())
        self._sessions[_hash(session.cookie)] = _hash(session.page), self._clock()
        while len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return session

    def knows(self, session: Session) -> bool:
        """Return whether a browser may have the page, in which there is no data yet: whether its cookie is valid."""
        _, used_at = self._sessions.get(_hash(session.cookie), (b"", -math.inf))
        return self._clock() - used_at <= SESSION_SECONDS

    def admits(self, session: Session) -> bool:
        """Return whether a browser is let in, and note that it was here."""
        known = _hash(session.cookie)
        page, _ = self._sessions.get(known, (b"", 0.0))
        if not self.knows(session) or not compare_digest(page, _hash(session.page)):
            return False
        self._sessions[known] = page, self._clock()
        self._sessions.move_to_end(known)
        return True


def _hash(secret: str) -> bytes:
    return sha256(secret.encode()).digest()
