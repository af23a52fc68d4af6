"""Who may look at the page: one-time links, sessions, Host, Origin and the headers of every answer. Pure.

A page on 127.0.0.1 is not private by itself. Other users of the machine can open it, and so can each page of the
internet that is open in the same browser, by requests across origins or by a name that it lets point to 127.0.0.1 (DNS
rebinding). So a link lets in once and for a minute, and everything behind it needs the cookie that the link was
exchanged for, the right Host, and no foreign Origin.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

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
        return f"{self.scheme}://{self.hosts[0]}:{self.port}"

    @property
    def cookie(self) -> str:
        """The name of its cookie. Browsers keep cookies by host and not by port, so the port is part of it."""
        return f"{'__Host-' if self.is_secure else ''}ringfort-dash-{self.port}"

    def refusal(self, method: str, headers: Mapping[str, str]) -> Refusal | None:
        """Return why a request is refused by its Host, Origin or Sec-Fetch-Site; None if it is not. Several headers of
        one name are given as one, joined by commas, and so are refused."""
        host = headers.get("host", "").lower()
        if host not in {f"{name}:{self.port}" for name in self.hosts}:
            return Refusal(403, f"This page is at {self.origin} only, and the browser asked for {host[:200]!r}.")
        origin = headers.get("origin")
        if origin is None and method not in ("GET", "HEAD"):
            return Refusal(403, "The browser did not say which page sends this request.")
        if origin is not None and origin.lower() != f"{self.scheme}://{host}":
            return Refusal(403, f"The page {origin[:200]!r} may not use this one.")
        is_opened = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
        if not is_opened and headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return Refusal(403, "Another page may not use this one.")
        return None

    def session_of(self, headers: Mapping[str, str]) -> str:
        """Return the session in the cookies of a request; empty if there is none."""
        for cookie in headers.get("cookie", "").split(";"):
            name, _, value = cookie.strip().partition("=")
            if name == self.cookie:
                return value
        return ""

    def set_cookie(self, session: str) -> str:
        """Return the header that gives a browser its session. It ends with the browser."""
        return f"{self.cookie}={session}; Path=/; HttpOnly; SameSite=Strict{'; Secure' if self.is_secure else ''}"


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
        self._sessions: OrderedDict[bytes, float] = OrderedDict()
        """When each was last used, in this order."""

    def new_link(self) -> str:
        """Return the secret of a new link."""
        secret = self._new_secret()
        self._links[_hash(secret)] = self._clock() + LINK_SECONDS
        while len(self._links) > MAX_LINKS:
            self._links.popitem(last=False)
        return secret

    def redeem(self, link: str) -> str:
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
        session = self._new_secret()
        self._sessions[_hash(session)] = self._clock()
        while len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return session

    def admits(self, session: str) -> bool:
        """Return whether a browser is let in, and note that it was here."""
        known, now = _hash(session), self._clock()
        used_at = self._sessions.pop(known, None)
        if used_at is None or now - used_at > SESSION_SECONDS:
            return False
        self._sessions[known] = now
        return True


def _hash(secret: str) -> bytes:
    return sha256(secret.encode()).digest()
