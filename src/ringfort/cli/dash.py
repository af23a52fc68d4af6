"""`ringfort dash`: a run in a browser. It joins as an observer, so no run is disturbed, and serves a page for this
machine alone."""

from __future__ import annotations

import select
import signal
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from html import escape
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Final

from typer import Argument, Option, echo

from ringfort.cli.parameters import Interfaces, Peers
from ringfort.errors import BackendUnavailableError, InvalidArgumentError

if TYPE_CHECKING:
    from ringfort.dashboard.source import Source
    from ringfort.dashboard.web.certificate import Certificate
    from ringfort.dashboard.web.server import DashServer

EXTRA: Final = ("starlette", "uvicorn")
"""What `ringfort[ui]` installs for this command."""
LOOK: Final = 1.0
"""Seconds between two looks whether the server still works."""


def dash(
    recording: Annotated[
        Path | None, Argument(metavar="[FILE]", help="A recording to play.  [default: watch what runs now]")
    ] = None,
    run: Annotated[
        str | None, Option(metavar="NAME", help="The run to show first.  [default: the one in which most happens]")
    ] = None,
    peer: Peers = None,
    interface: Interfaces = None,
    port: Annotated[
        int | None, Option(min=0, max=65535, help="Port of the page.  [default: 7415, or a free one if it is taken]")
    ] = None,
    open_: Annotated[
        bool | None,
        Option("--open/--no-browser", help="Open the page in a browser.  [default: if this machine has a screen]"),
    ] = None,
    record: Annotated[
        Path | None, Option(metavar="FILE", help="Write what is seen to a new file, to play later.")
    ] = None,
    lan: Annotated[
        bool,
        Option("--lan", help="Let other devices on the network open the page too, by TLS; prints a QR code."),
    ] = False,
) -> None:
    """Watch a run in a browser: who waits for whom, curves, machines, events and output. Ends with Ctrl-C."""
    check_extra()
    if recording is not None:
        for name, given in (("peer", peer), ("interface", interface and not lan), ("record", record)):
            if given:
                raise InvalidArgumentError(name, given, "invalid with a recording, which needs no other machine")

    from ringfort.dashboard.web.server import DashServer

    addresses, certificate = _lan(interface or ()) if lan else ((), None)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as a service: it says goodbye to the cluster
    with (
        _source(recording, peer or (), interface or (), record) as source,
        DashServer(source, run=run, port=port, addresses=addresses, certificate=certificate) as server,
        suppress(KeyboardInterrupt),
    ):
        _serve(server, certificate, is_opened=_has_screen(lan) if open_ is None else open_)


def check_extra() -> None:
    """Raise `BackendUnavailableError` if what the page needs is not installed."""
    missing = [name for name in EXTRA if find_spec(name) is None]
    if missing:
        raise BackendUnavailableError(" and ".join(missing), "pip install 'ringfort[ui]'")


def _source(recording: Path | None, peers: Sequence[str], interfaces: Sequence[str], record: Path | None) -> Source:
    from ringfort.config import AutoDiscoveryConfig
    from ringfort.dashboard.recording import RecordedSource
    from ringfort.dashboard.source import LiveSource

    if recording is None:
        return LiveSource(AutoDiscoveryConfig(peers=tuple(peers), interfaces=tuple(interfaces)), record=record)
    return RecordedSource(recording)


def _lan(interfaces: Sequence[str]) -> tuple[tuple[str, ...], Certificate]:
    """The addresses of this machine that others on its network can reach, and the certificate for them."""
    from ringfort.cluster.discovery.interfaces import choose
    from ringfort.cluster.discovery.system import list_interfaces
    from ringfort.config import Environment
    from ringfort.dashboard.web.certificate import certificate_for
    from ringfort.dashboard.web.server import HERE

    chosen = choose(list_interfaces(), interfaces or Environment.from_mapping().interfaces)
    # Addresses with a scope, as fe80::1%eth0, cannot be typed into a browser.
    addresses = tuple(one for one in chosen.addresses if "%" not in one and one not in (HERE, "::1"))
    if not addresses:
        raise InvalidArgumentError("lan", True, "this machine has no address on a network; `ringfort doctor` says more")
    path = Environment.from_mapping().home_folder / "dash-certificate.pem"
    return addresses, certificate_for(path, (HERE, *addresses))


def _serve(server: DashServer, certificate: Certificate | None, *, is_opened: bool) -> None:
    """Print links and wait: for Enter, which asks for another link, or for Ctrl-C."""
    link = _say(server, certificate)
    with ExitStack() as stack:
        if is_opened:
            import webbrowser

            webbrowser.open(stack.enter_context(redirect_to(link)).as_uri())
        is_asked = _has_keyboard()
        while server.is_serving:
            if not is_asked:
                time.sleep(LOOK)
            elif select.select([sys.stdin], [], [], LOOK)[0]:
                is_asked = bool(sys.stdin.readline())  # empty after Ctrl-D
                if is_asked:
                    _say(server, certificate)


@contextmanager
def redirect_to(link: str) -> Generator[Path]:
    """Make a file that only this user can read and that leads a browser to `link`: every user of the machine can read
    the arguments of a program, so the link must not be one."""
    with TemporaryDirectory(prefix="ringfort-dash-") as folder:  # for this user only
        path = Path(folder) / "open.html"
        path.touch(0o600)
        path.write_text(
            '<!doctype html>\n<meta charset="utf-8">\n<title>Ringfort</title>\n'
            '<meta name="referrer" content="no-referrer">\n'
            f'<meta http-equiv="refresh" content="0; url={escape(link)}">\n'
        )
        yield path


def _has_keyboard() -> bool:
    # None if it was closed: `ringfort dash <&-`.
    return sys.stdin is not None and sys.stdin.isatty()  # pyright: ignore[reportUnnecessaryComparison]


def _say(server: DashServer, certificate: Certificate | None) -> str:
    """Print a new link, and how to use it."""
    from ringfort.dashboard.web.security import LINK_SECONDS

    link = server.new_link()
    where = "this machine" if certificate is None else "this network"
    echo(f"open this link in a browser on {where} within {LINK_SECONDS:.0f} s; it works once:")
    echo(f"  {link}")
    if certificate is not None:
        _say_certificate(link, certificate)
    again = "Enter prints a new link, " if _has_keyboard() else ""
    echo(f"{again}Ctrl-C ends", err=True)
    return link


def _say_certificate(link: str, certificate: Certificate) -> None:
    if sys.stdout.isatty():
        import segno

        segno.make(link, error="l", micro=False).terminal(compact=True, border=2)
    echo("the browser warns once, because this machine made the certificate itself; compare its SHA-256 fingerprint:")
    echo(f"  {certificate.fingerprint}")


def _has_screen(lan: bool) -> bool:
    from ringfort.config import has_screen

    return not lan and sys.stdout.isatty() and has_screen()
