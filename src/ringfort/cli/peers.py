"""`ringfort peers`: who is in the cluster, seen from this machine. It joins as an observer, so nobody is disturbed."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ringfort.cli.outcome import EXIT_FAILED, errors_as_lines

if TYPE_CHECKING:
    from rich.table import Table

    from ringfort.cluster.health import HealthSummary
    from ringfort.cluster.node import ClusterNode
    from ringfort.cluster.topology import ClusterTopology
    from ringfort.cluster.view import PeerView

SECONDS = 3.0
"""How long to look before the table is printed: peers are found in tenths of a second, and measured in another."""
REFRESH_SECONDS = 0.5
"""Between two looks with --watch. Round trips change with every heartbeat, five times a second."""

NOBODY = "nobody else is here (yet); `ringfort doctor` says what may be wrong"


def peers(
    watch: Annotated[bool, typer.Option("--watch", help="Keep the table up to date until Ctrl-C.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON document; with --watch, one a line.")] = False,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST[:PORT]", help="Where a machine is, if the network hides it. Repeatable."),
    ] = None,
    interface: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|ADDRESS", help="Use this network interface only. Repeatable."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long to look, without --watch.")] = SECONDS,
) -> None:
    """Show who is in the cluster, and how far away."""
    with errors_as_lines():
        from ringfort.cluster.node import ClusterNode
        from ringfort.config import AutoDiscoveryConfig, check_timeout

        check_timeout(seconds, "seconds")
        config = AutoDiscoveryConfig(peers=tuple(peer or ()), interfaces=tuple(interface or ()))
        with ClusterNode(config, slots=0) as node:
            if watch:
                _watch(node, json_=json_)
                return
            time.sleep(seconds)
            seen = Seen.by(node)
            why = node.why_alone()
        _print(seen, json_=json_)
        if not seen.views:
            typer.echo("nobody else is here\n" + indent(why, "  "), err=True)
            raise typer.Exit(EXIT_FAILED)


class Seen(NamedTuple):
    """The cluster at one moment."""

    views: Sequence[PeerView]
    health: HealthSummary
    topology: ClusterTopology

    @classmethod
    def by(cls, node: ClusterNode) -> Seen:
        """By this process, which is not among them."""
        views = [view for view in node.snapshot() if not view.is_self]
        return cls(views, node.health_summary(), node.topology())


def _print(seen: Seen, *, json_: bool) -> None:
    if json_:
        import json

        typer.echo(json.dumps(document(seen), sort_keys=True))
    elif seen.views:
        from rich.console import Console

        console = Console()
        console.print(table(seen.views))
        console.print(summary(seen.health), style="dim", highlight=False)


def _watch(node: ClusterNode, *, json_: bool) -> None:
    """Until Ctrl-C, which is how one ends this and so no failure."""
    with suppress(KeyboardInterrupt), _shown(json_=json_) as show:
        while True:
            show(Seen.by(node))
            time.sleep(REFRESH_SECONDS)


@contextmanager
def _shown(*, json_: bool) -> Generator[Callable[[Seen], None], None, None]:
    """A table that is drawn over itself; where there is no terminal, a new one after the other."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console()
    if json_ or not console.is_terminal:
        yield lambda seen: _print(seen, json_=json_)
        return
    with Live(console=console, auto_refresh=False, transient=False) as live:

        def show(seen: Seen) -> None:
            rows = Group(table(seen.views), Text(summary(seen.health), style="dim")) if seen.views else Text(NOBODY)
            live.update(rows, refresh=True)

        yield show


def document(seen: Seen) -> dict[str, Any]:
    """For JSON."""
    links = [
        {
            "peer": peer,
            "other": other,
            "kind": link.kind.value,
            "latency_seconds": link.latency,
            "bandwidth_out_bytes_per_second": link.bandwidth_out,
            "bandwidth_in_bytes_per_second": link.bandwidth_in,
        }
        for peer, other, link in seen.topology.links()
    ]
    health = seen.health
    numbers = {
        "total": health.total,
        "healthy": health.healthy,
        "degraded": health.degraded,
        "unhealthy": health.unhealthy,
        "unknown": health.unknown,
        "round_trip_seconds": health.round_trip,
        "uptime": health.uptime,
    }
    return {"peers": [as_dict(view) for view in seen.views], "summary": numbers, "links": links}


def summary(health: HealthSummary) -> str:
    """In one line, for people."""
    counts = ("healthy", "degraded", "unhealthy", "unknown")
    parts = [f"{getattr(health, name)} {name}" for name in counts if getattr(health, name)]
    trip = "" if health.round_trip is None else f"; mean round trip {round_trip(health.round_trip)}"
    return f"{health.total} peer{'' if health.total == 1 else 's'}: {', '.join(parts)}{trip}"


def as_dict(view: PeerView) -> dict[str, Any]:
    """For JSON: seconds and bytes a second, and nothing rounded."""
    return {
        "peer": view.peer,
        "name": view.name,
        "host": view.host,
        "address": view.address,
        "interface": view.interface,
        "kind": view.kind.value,
        "round_trip_seconds": view.round_trip,
        "bandwidth_bytes_per_second": view.bandwidth,
        "health": view.health.value,
        "role": view.role,
        "slots": view.slots,
        "ranks": list(view.ranks),
        "version": view.version,
    }


def table(views: Sequence[PeerView]) -> Table:
    """For people."""
    from rich.table import Table
    from rich.text import Text

    colours = {"healthy": "green", "degraded": "yellow", "unhealthy": "red", "unknown": "dim"}
    columns = ("host", "peer", "role", "ranks", "address", "interface", "round trip", "bandwidth", "health", "version")
    found = Table(*columns, box=None, pad_edge=False)
    for view in views:
        health = view.health.value
        # Text, not str: rich would read what another machine calls itself as instructions.
        found.add_row(
            Text(view.name),
            Text(short_id(view.peer)),
            view.role,
            ranks(view.ranks),
            Text(view.address),
            Text(f"{view.interface} ({view.kind.value})" if view.interface else view.kind.value),
            round_trip(view.round_trip),
            bandwidth(view.bandwidth),
            Text(health, style=colours[health]),
            Text(view.version),
        )
    return found


def short_id(peer: str) -> str:
    """Enough of the node's key and of the process's name to tell peers apart."""
    node, _, instance = peer.rpartition(".")
    return f"{node[:8]}.{instance[:4]}"


def ranks(numbers: Sequence[int]) -> str:
    """Such as 0, or 4-7."""
    if not numbers:
        return ""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def round_trip(seconds: float | None) -> str:
    """In milliseconds, to three digits."""
    return "" if seconds is None else f"{seconds * 1000:.3g} ms"


def bandwidth(bytes_per_second: float | None) -> str:
    """In bits, as networks are sold."""
    if bytes_per_second is None:
        return ""
    bits = bytes_per_second * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
