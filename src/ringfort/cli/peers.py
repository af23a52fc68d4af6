"""`ringfort peers`: lists the peers of the cluster. It joins as an observer, so no run is disturbed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from typer import Exit, Option, echo

from ringfort.cli.columns import fit
from ringfort.cli.outcome import EXIT_FAILED, print_json
from ringfort.cli.parameters import Interfaces, Peers
from ringfort.cluster.core.versions import differ, upgrade_advice
from ringfort.telemetry.words import bandwidth, clean, round_trip, uptime

if TYPE_CHECKING:
    from rich.text import Text

    from ringfort.cluster.core.health import HealthSummary
    from ringfort.cluster.core.topology import ClusterTopology
    from ringfort.cluster.node import ClusterNode
    from ringfort.cluster.view import PeerView

SECONDS = 3.0
"""How long to look before the table is printed: peers are found and measured in tenths of a second."""
REFRESH_SECONDS = 0.5
"""Between two updates with --watch. Round trips change with every heartbeat, five times a second."""

NOBODY = "no other peer has been found yet; `ringfort doctor` says what may be wrong"


def peers(
    watch: Annotated[bool, Option("--watch", help="Update the table until Ctrl-C.")] = False,
    json_: Annotated[bool, Option("--json", help="Print one JSON document; with --watch, one per line.")] = False,
    peer: Peers = None,
    interface: Interfaces = None,
    seconds: Annotated[float, Option(help="How long to look, without --watch.")] = SECONDS,
) -> None:
    """List the peers of the cluster, with their health, round trip and bandwidth."""
    from ringfort.cluster.node import ClusterNode
    from ringfort.config import AutoDiscoveryConfig, check_timeout

    check_timeout(seconds, "seconds")
    config = AutoDiscoveryConfig(peers=tuple(peer or ()), interfaces=tuple(interface or ()))
    with ClusterNode(config, slots=0, listens=False) as node:
        if watch:
            _watch(node, json_=json_)
            return
        time.sleep(seconds)
        seen = Seen.by(node)
        why = node.why_alone()
    _print(seen, json_=json_)
    if not seen.views:
        echo(why, err=True)
        raise Exit(EXIT_FAILED)


class Seen(NamedTuple):
    """The cluster at one moment."""

    views: Sequence[PeerView]
    health: HealthSummary
    topology: ClusterTopology
    here: str = ""
    """The machine that looks, as in `PeerView.host`."""
    version: str = ""
    """The version of Ringfort on it."""

    @classmethod
    def by(cls, node: ClusterNode) -> Seen:
        """What this process sees, without itself."""
        everybody = node.snapshot()
        own = next(view for view in everybody if view.is_self)
        others = [view for view in everybody if not view.is_self]
        return cls(others, node.health_summary(), node.topology(), own.host, own.version)


def _print(seen: Seen, *, json_: bool) -> None:
    if json_:
        print_json(document(seen))
    elif seen.views:
        from rich.console import Console

        console = Console()
        if console.is_terminal:
            console.print(drawn(seen, console.width))
        else:
            echo("\n".join(lines(seen, None)))


def _watch(node: ClusterNode, *, json_: bool) -> None:
    """Show the peers until Ctrl-C, which is not a failure: in a table that is updated in place, or one per line."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    updated = nullcontext() if json_ or not console.is_terminal else Live(console=console, auto_refresh=False)
    with suppress(KeyboardInterrupt), updated as live:
        while True:
            seen = Seen.by(node)
            if live is None:
                _print(seen, json_=json_)
            else:
                live.update(drawn(seen, console.width) if seen.views else NOBODY, refresh=True)
            time.sleep(REFRESH_SECONDS)


def drawn(seen: Seen, width: int) -> Text:
    """The lines with colours that are legible on light and dark backgrounds."""
    from rich.text import Text

    text = Text("\n".join(lines(seen, width)), no_wrap=True, overflow="ignore", end="\n")
    heading, _, _ = text.plain.partition("\n")
    text.stylize("bold", 0, len(heading))
    for health, colour in {"healthy": "green", "degraded": "yellow", "unhealthy": "bold red"}.items():
        text.highlight_regex(rf"(?<=\s){health}(?=\s)", colour)
    return text


def document(seen: Seen) -> dict[str, Any]:
    """The peers, links and health for JSON."""
    links = [{"peer": peer, "other": other, **_with_units(link)} for peer, other, link in seen.topology.links()]
    return {"peers": [as_dict(view) for view in seen.views], "summary": _with_units(seen.health), "links": links}


def summary(health: HealthSummary) -> str:
    """The health of the cluster in one line."""
    counts = ("healthy", "degraded", "unhealthy", "unknown")
    parts = [f"{getattr(health, name)} {name}" for name in counts if getattr(health, name)]
    trip = "" if health.round_trip is None else f"; mean round trip {round_trip(health.round_trip)}"
    return f"{health.total} peer{'' if health.total == 1 else 's'}: {', '.join(parts)}{trip}"


def as_dict(view: PeerView) -> dict[str, Any]:
    """A peer for JSON: seconds and bytes per second, nothing rounded."""
    found = _with_units(view) | {"role": view.role, "step": view.step or None, "uptime_seconds": view.uptime}
    return {name: value for name, value in found.items() if name != "uptime" and not name.startswith("is_")}


def _with_units(item: object) -> dict[str, Any]:
    """The fields of a dataclass, with the units in their names."""
    units = dict.fromkeys(("latency", "round_trip"), "seconds")
    units |= dict.fromkeys(("bandwidth", "bandwidth_range", "bandwidth_in", "bandwidth_out"), "bytes_per_second")
    fields: dict[str, Any] = msgspec.to_builtins(item)
    return {f"{name}_{units[name]}" if name in units else name: value for name, value in fields.items()}


LABELS = {name: name for name in ("ranks", "step", "run", "up", "round trip", "peer")} | {"version": "Ringfort"}
"""Put before the values of these columns where they are not below their heading."""


def row(view: PeerView, here: str) -> dict[str, str]:
    """The values of a peer by column, in order of importance. `here` is the machine that looks."""
    found = {
        "host": f"{view.name or short_id(view.peer)}{' (here)' if here and view.host == here else ''}",
        "role": view.role,
        "ranks": ranks(view.ranks),
        "health": view.health.value,
        "program": view.program,
        "step": f"{view.step:,}" if view.step else "",
        "run": view.run if view.run != view.program else "",
        "up": uptime(view.uptime),
        "round trip": round_trip(view.round_trip),
        "bandwidth": bandwidth(view.bandwidth, view.bandwidth_range),
        "address": view.address,
        "gpu": gpus(view.accelerators),
        "interface": f"{view.interface} ({view.kind.value})" if view.interface else "",
        "version": view.version,
        "peer": short_id(view.peer),
    }
    return {name: clean(text) for name, text in found.items()}


def lines(seen: Seen, width: int | None) -> list[str]:
    """The table, the summary and advice, for a terminal of `width` columns; None for a file."""
    different = [view for view in seen.views if differ(seen.version, view.version)]
    advice = dict.fromkeys(
        "; ".join(upgrade_advice(seen.version, clean(view.name), clean(view.version))) for view in different
    )
    return [*fit([row(view, seen.here) for view in seen.views], LABELS, width), "", summary(seen.health), *advice]


def short_id(peer: str) -> str:
    """A peer id, short but long enough to tell peers apart."""
    node, _, instance = peer.rpartition(".")
    return f"{node[:8]}.{instance[:4]}"


def ranks(numbers: Sequence[int]) -> str:
    """Ranks as a range, such as 0 or 4-7."""
    if not numbers:
        return ""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def gpus(names: Sequence[str]) -> str:
    """GPUs, such as `2 x NVIDIA H200`."""
    counted = {name: list(names).count(name) for name in names}
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counted.items())
