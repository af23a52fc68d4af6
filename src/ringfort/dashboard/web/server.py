"""`DashServer`: the page of `ringfort dash`, served by uvicorn in a thread."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import uvicorn

from ringfort.dashboard.web.app import application
from ringfort.dashboard.web.connections import MAX_CONNECTIONS, Connections, listener, protocol_for
from ringfort.dashboard.web.hub import INTERVAL, Hub
from ringfort.dashboard.web.security import Keys, Site
from ringfort.errors import InvalidArgumentError

if TYPE_CHECKING:
    from typing_extensions import Self

    from ringfort.dashboard.source import Source
    from ringfort.dashboard.web.certificate import Certificate

PORT: Final = 7415
"""Where the page is if nobody says otherwise and the port is free: below the ports that systems give out themselves."""
HERE: Final = "127.0.0.1"
PATIENCE: Final = 5
"""Seconds that the server waits for its last answers when it ends. Streams have ended before."""


class DashServer:
    """A context manager: inside, the page is served. Only this machine can reach it, unless `addresses` has more.

    with DashServer(source) as server:
        print(server.new_link())
    """

    def __init__(
        self,
        source: Source,
        *,
        run: str | None = None,
        port: int | None = None,
        addresses: Sequence[str] = (),
        certificate: Certificate | None = None,
        interval: float = INTERVAL,
        keys: Keys | None = None,
    ) -> None:
        """`run` is what a page shows at first; None for the run in which most happens. `port` None is `PORT` or, if it
        is taken, any free one. `addresses` are those of this machine on which the page is served beside 127.0.0.1.
        Raises `InvalidArgumentError` if there are any and no certificate."""
        if addresses and certificate is None:
            raise InvalidArgumentError("addresses", addresses, "other machines may look only with a certificate")
        self.keys = Keys() if keys is None else keys
        self._port, self._addresses, self._certificate = port, addresses, certificate
        self._hub = Hub(source, run, interval)
        self._end = asyncio.Event()
        self._has_loop = threading.Event()

    def __enter__(self) -> Self:
        """Begin to serve. Raises `InvalidArgumentError` if the port is taken."""
        self._connections = connections = Connections()
        sockets = _listen((HERE, *self._addresses), self._port, connections)
        hosts = (*map(in_address, self._addresses), HERE, "localhost")
        self.site = Site(sockets[0].getsockname()[1], hosts, self._certificate is not None)
        config = uvicorn.Config(
            application(self._hub, self.site, self.keys, connections),
            loop="asyncio",
            http=protocol_for(connections),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # what matters is logged by `Guard`
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=PATIENCE,
            ssl_certfile=None if self._certificate is None else self._certificate.path,
        )
        config.load()
        work = self._serve(uvicorn.Server(config), sockets)
        self._thread = threading.Thread(target=asyncio.run, args=(work,), name="ringfort-dash")
        self._thread.start()
        self._has_loop.wait()
        return self

    def __exit__(self, *exc: object) -> None:
        """End: pages say that the connection is lost, and wait."""
        with suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    @property
    def is_serving(self) -> bool:
        """Whether it still works; if not, its thread has said why."""
        return self._thread.is_alive()

    @property
    def connections(self) -> int:
        """How many connections have not shown that they have access."""
        return len(self._connections)

    @property
    def viewers(self) -> int:
        """How many pages are open."""
        return self._hub.viewers

    @property
    def has_viewer(self) -> bool:
        """Whether a page is open."""
        return self._hub.viewers > 0

    def new_link(self) -> str:
        """Return an address that lets one browser in, once, within a minute."""
        # The loop uses the keys too.
        made = asyncio.run_coroutine_threadsafe(self._new_link(), self._loop)
        return made.result()

    async def _new_link(self) -> str:
        return f"{self.site.origin}/open#{self.keys.new_link()}"

    async def _serve(self, server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        self._loop = asyncio.get_running_loop()
        self._has_loop.set()
        sending = asyncio.ensure_future(self._hub.serve())
        serving = asyncio.ensure_future(server.serve(sockets))
        end = asyncio.ensure_future(self._end.wait())
        await asyncio.wait({sending, serving, end}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        self._hub.close()
        end.cancel()
        await serving
        sending.cancel()
        with suppress(asyncio.CancelledError):
            await sending


def in_address(host: str) -> str:
    """A host as it stands in an address."""
    return f"[{host}]" if ":" in host else host


def _listen(addresses: Sequence[str], port: int | None, connections: Connections) -> list[socket.socket]:
    """Listening sockets on all addresses, with the same port."""
    failure: OSError | None = None
    for wish in (PORT, 0, 0, 0) if port is None else (port,):
        sockets: list[socket.socket] = []
        found = wish
        try:
            for address in addresses:
                sockets.append(listener(address, found, connections))
                found = sockets[0].getsockname()[1]
        except OSError as exc:
            failure = exc
            for one in sockets:
                one.close()
        else:
            return sockets
    raise InvalidArgumentError("port", port, f"{failure}; choose another one, or none") from failure
