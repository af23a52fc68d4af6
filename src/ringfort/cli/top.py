"""`ringfort top`: shows runs in a terminal, and who waits for whom. It looks as an observer, or at a recording."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from typer import Argument, Exit, Option, echo

from ringfort.cli.outcome import EXIT_FAILED
from ringfort.cli.parameters import Interfaces, Peers
from ringfort.errors import BackendUnavailableError, DistributedError, InvalidArgumentError

if TYPE_CHECKING:
    from ringfort.dashboard.source import Source

SECONDS: Final = 3.0
"""How long --once looks before it prints: peers are found in tenths of a second, and ranks report each second."""


def top(
    file: Annotated[
        Path | None, Argument(metavar="[FILE]", help="A recording, made with --record.", show_default=False)
    ] = None,
    run: Annotated[
        str | None,
        Option("--run", metavar="NAME", help="The run to show.  [default: the one in which most happens]"),
    ] = None,
    peer: Peers = None,
    interface: Interfaces = None,
    record: Annotated[
        Path | None, Option("--record", metavar="FILE", help="Write what is seen to this new file.")
    ] = None,
    once: Annotated[bool, Option("--once", help="Print one picture as text and exit, for scripts.")] = False,
    json_: Annotated[bool, Option("--json", help="With --once: print one JSON document.")] = False,
) -> None:
    """Show where the time of each rank goes, with links, machines, events and logs; or play a recording."""
    if json_ and not once:
        raise InvalidArgumentError("json", True, "use it together with --once")
    if file is not None:
        for name, value in (("record", record), ("peer", peer), ("interface", interface)):
            if value:
                told = ", ".join(value) if isinstance(value, list) else str(value)
                raise InvalidArgumentError(name, told, f"cannot be used with a recording ({file})")
    if not once:
        _check_terminal()
    with _source(file, peer, interface, record) as source:
        if once:
            _show_once(source, run, json_=json_)
        else:
            _watch(source, run)


def _check_terminal() -> None:
    """Raise an error where no live picture can be shown."""
    if find_spec("textual") is None:
        how = "pip install 'ringfort[ui]'; `ringfort top --once` works without it"
        raise BackendUnavailableError("Textual, which `ringfort top` needs,", how)
    # Textual reads keys from standard input and draws on standard error.
    if not all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):  # pyright: ignore[reportUnnecessaryComparison]
        raise DistributedError("ringfort top needs a terminal; `ringfort top --once` prints one picture as text")


def _source(file: Path | None, peer: list[str] | None, interface: list[str] | None, record: Path | None) -> Source:
    if file is not None:
        from ringfort.dashboard.recording import RecordedSource

        return RecordedSource(file)
    from ringfort.config import AutoDiscoveryConfig
    from ringfort.dashboard.source import LiveSource

    config = AutoDiscoveryConfig(peers=tuple(peer or ()), interfaces=tuple(interface or ()))
    return LiveSource(config, record=record)


def _watch(source: Source, run: str | None) -> None:
    from ringfort.dashboard.drawing import signs_for
    from ringfort.dashboard.terminal import Terminal

    # Without the mouse, people can still select text with it, and their terminal scrolls as ever.
    app = Terminal(source, run, signs_for(sys.stderr.encoding))
    app.run(mouse=False)
    if app.return_code:
        raise Exit(app.return_code)


def _show_once(source: Source, run: str | None, *, json_: bool, wait: Callable[[float], None] = time.sleep) -> None:
    """Print the end of a recording, or a live run after a few seconds."""
    from ringfort.dashboard.drawing import signs_for
    from ringfort.dashboard.picture import whole_picture
    from ringfort.dashboard.playback import Playback
    from ringfort.dashboard.scene import Scene
    from ringfort.dashboard.states import without_replaced

    if isinstance(source, Playback):
        source.seek(source.duration)
    else:
        source.view(run)  # from now on reports come
        wait(SECONDS)
    view = source.view(run)
    if json_:
        import msgspec

        echo(msgspec.json.encode(view).decode())
    else:
        from rich.console import Console

        console = Console(highlight=False, soft_wrap=True)
        found = without_replaced(view)
        scene = Scene(found, wanted=run, waited=2 * SECONDS, signs=signs_for(console.encoding))
        for text in whole_picture(scene, console.width):
            console.print(text, no_wrap=True, overflow="ignore", crop=False)
    if not view.ranks:
        raise Exit(EXIT_FAILED)
