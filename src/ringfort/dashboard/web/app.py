"""What the page asks for: an ASGI application behind `Guard`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Annotated, Final, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ringfort.cluster.net.waiting import within
from ringfort.dashboard.recording import RecordedSource
from ringfort.dashboard.web.connections import Connections
from ringfort.dashboard.web.hub import Hub, Viewer
from ringfort.dashboard.web.pages import pages
from ringfort.dashboard.web.security import HEADERS, PAGE_HEADER, Keys, LinkError, Refusal, Site

MAX_BODY: Final = 1024
"""Bytes of a request. The longest has about 60."""
BODY_SECONDS: Final = 10.0
"""Seconds within which all of a request must be here."""
MAX_LINES: Final = 1000
"""Lines of a log in one answer."""
RETRY: Final = b"retry: 1000\n\n"
"""Milliseconds after which a browser connects again."""
PUBLIC: Final = ("/open", "/static/")
"""What needs no session: the page that exchanges a link, and files that every copy of Ringfort has."""

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class _Link(msgspec.Struct):
    link: Annotated[str, msgspec.Meta(max_length=200)]


class _Wish(msgspec.Struct):
    """What to do with a recording."""

    playing: bool | None = None
    position: Annotated[float, msgspec.Meta(ge=0)] | None = None
    speed: Annotated[float, msgspec.Meta(ge=0.1, le=1000)] | None = None


class Guard:
    """Refuses what `security` refuses, puts its headers on every answer, and lets no error end the server."""

    def __init__(self, app: ASGIApp, site: Site, keys: Keys, connections: Connections) -> None:
        self._app, self._site, self._keys, self._connections = app, site, keys, connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_answered = False

        async def with_headers(message: Message) -> None:
            nonlocal is_answered
            if message["type"] == "http.response.start":
                is_answered = True
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer = self._refused(scope)
        try:
            await (answer or self._app)(scope, receive, with_headers)
        except ClientDisconnect:
            pass  # in the middle of its request: nobody waits for an answer
        except Exception:
            _log.exception("Failed to answer %s", scope["path"])
            if not is_answered:
                await _text(500, "ringfort dash failed to answer; its terminal says why.")(scope, receive, with_headers)

    def _refused(self, scope: Scope) -> Response | None:
        headers = _joined(Headers(scope=scope))
        path, method = scope["path"], scope["method"]
        refusal = self._site.refusal(method, headers)
        if refusal is not None:
            return _text(refusal.status, refusal.why)
        is_exchange = path == "/api/session" and method == "POST"
        session = self._site.session_of(headers)
        if self._keys.admits(session):
            self._connections.proved(scope["client"])
            return None
        if is_exchange or path.startswith(PUBLIC):
            return None
        if path == "/" and method in ("GET", "HEAD"):
            return None if self._keys.knows(session) else _page("closed.html", 401)
        return _text(401, "This browser has no access, or no longer. Open a new link of `ringfort dash`.")


class EventStream(Response):
    """The messages for one page, as server-sent events, until the page is closed or too far behind."""

    def __init__(self, hub: Hub, viewer: Viewer, is_admitted: Callable[[], bool]) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self._hub, self._viewer, self._is_admitted = hub, viewer, is_admitted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = [self._send(send), _until_gone(receive), self._viewer.closed.wait()]
        tasks = [asyncio.ensure_future(part) for part in parts]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._hub.leave(self._viewer)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": RETRY, "more_body": True})
        while self._is_admitted():  # which also says that the page is still here
            message = await self._viewer.messages.get()
            await send({"type": "http.response.body", "body": b"data: " + message + b"\n\n", "more_body": True})


def application(hub: Hub, site: Site, keys: Keys, connections: Connections) -> ASGIApp:
    """Return the application that shows what `hub` has."""
    answers = _Answers(hub, site, keys)
    routes = [
        Route("/", answers.index),
        Route("/open", answers.open),
        Route("/static/{path:path}", answers.static),
        Route("/api/session", answers.session, methods=["GET", "POST"]),
        Route("/api/events", answers.events),
        Route("/api/log", answers.log),
        Route("/api/playback", answers.playback, methods=["POST"]),
    ]
    return Guard(Starlette(routes=routes), site, keys, connections)


class _Answers:
    """One method per address."""

    def __init__(self, hub: Hub, site: Site, keys: Keys) -> None:
        self._hub, self._site, self._keys = hub, site, keys

    async def index(self, request: Request) -> Response:
        return _page("index.html")

    async def open(self, request: Request) -> Response:
        # The secret of the link is behind the # of its address: it is in no request, and so in no log of a proxy.
        return _page("open.html")

    async def static(self, request: Request) -> Response:
        return _page(request.path_params["path"])

    async def session(self, request: Request) -> Response:
        """Exchange a link (POST), or say that the session is valid (GET, behind the guard)."""
        if request.method != "POST":
            return Response(status_code=204)
        wish = await _body(request, _Link)
        if isinstance(wish, Refusal):
            return _text(wish.status, wish.why)
        try:
            session = self._keys.redeem(wish.link)
        except LinkError as exc:
            return _text(403, str(exc))
        headers = {"set-cookie": self._site.set_cookie(session), PAGE_HEADER: session.page}
        return Response(status_code=204, headers=headers)

    async def events(self, request: Request) -> Response:
        session = self._site.session_of(_joined(request.headers))
        viewer = self._hub.join(request.query_params.get("run"))
        return EventStream(self._hub, viewer, partial(self._keys.admits, session))

    async def log(self, request: Request) -> Response:
        """The last lines of a rank."""
        rank = request.query_params.get("rank", "")
        if not (rank.isdecimal() and len(rank) < 6):
            return _text(400, "rank: must be a number")
        run = request.query_params.get("run")
        lines = await self._hub.ask(partial(self._hub.source.log, int(rank), run))
        return Response(msgspec.json.encode({"lines": lines[-MAX_LINES:]}), media_type="application/json")

    async def playback(self, request: Request) -> Response:
        """Play, pause, seek, or change the speed of a recording."""
        source = self._hub.source
        if not isinstance(source, RecordedSource):
            return _text(409, "This is not a recording.")
        wish = await _body(request, _Wish)
        if isinstance(wish, Refusal):
            return _text(wish.status, wish.why)
        await self._hub.ask(partial(_play, source, wish))
        self._hub.look_now()
        return Response(status_code=204)


def _play(source: RecordedSource, wish: _Wish) -> None:
    if wish.speed is not None:
        source.speed = wish.speed
    if wish.position is not None:
        source.seek(wish.position)
    if wish.playing is not None:
        source.playing = wish.playing


async def _body(request: Request, kind: type[_T]) -> _T | Refusal:
    """The JSON in a request, of the type `kind`, or why it is refused."""
    try:
        data = await within(BODY_SECONDS, _read(request))
    except TimeoutError:
        return Refusal(408, f"A request takes at most {BODY_SECONDS:.0f} seconds.")
    if len(data) > MAX_BODY:
        return Refusal(413, f"A request has at most {MAX_BODY} bytes.")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        return Refusal(400, f"Malformed request: {exc}")


async def _read(request: Request) -> bytes:
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > MAX_BODY:
            break
    return data


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _joined(headers: Headers) -> dict[str, str]:
    """Headers by name; those that occur several times are joined, as HTTP says."""
    return {name: ",".join(headers.getlist(name)) for name in headers}


def _page(path: str, status: int = 200) -> Response:
    page = pages().get(path)
    if page is None:
        return _text(404, "There is no such page.")
    return Response(page.data, status, media_type=page.media_type)


def _text(status: int, text: str) -> Response:
    return PlainTextResponse(f"{text}\n", status)
