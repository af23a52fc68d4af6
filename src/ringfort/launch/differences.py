"""Compares the tickets of all machines: which machine differs from the others, and in what. Pure.

A different script, `--nodes`, `--max-restarts`, `--torch-backend` or different arguments are a usage error and end the
run. A different version or content of the script may be intended, and is a warning.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ringfort.launch.agreement_messages import Ticket
from ringfort.launch.failure_report import MAX_LINE_BYTES, USAGE_ERROR, Failure

MAX_SHOWN: Final = 100
"""Characters of one machine's arguments in an error message."""


def mistake(tickets: Mapping[str, Ticket]) -> Failure | None:
    """The first usage error in the tickets (by peer): further ones often follow from it."""
    why = (
        _difference(tickets, "the script", lambda ticket: ticket.script)
        or _difference(tickets, "the arguments", lambda t: (t.arguments_digest, t.arguments), _show_arguments)
        or _difference(tickets, "--nodes", lambda ticket: ticket.nodes)
        or _difference(tickets, "--max-restarts", lambda ticket: str(ticket.max_restarts))
        or _difference(tickets, "--torch-backend", lambda ticket: ticket.torch_backend or "none")
    )
    if not why:
        return None
    return Failure("", USAGE_ERROR, why=_cut(f"{why}. Type the same command on every machine"), is_final=True)


def warnings(tickets: Mapping[str, Ticket]) -> tuple[str, ...]:
    """The differences in the tickets (by peer) that may be intended, one line each."""
    files = {peer: ticket for peer, ticket in tickets.items() if ticket.script_digest}
    script = next(iter(tickets.values())).script
    found = (
        _difference(files, f"the content of {script}", lambda ticket: ticket.script_digest, _show_times),
        _difference(tickets, "the version of Ringfort", lambda ticket: ticket.version or "unknown"),
        _difference(tickets, "the version of Python", lambda ticket: ticket.python or "unknown"),
        _difference(tickets, "--patience", lambda ticket: f"{ticket.patience:g}"),
    )
    return tuple(_cut(f"warning: {words}") for words in found if words)


def most_nodes(ticket: Ticket) -> int:
    """The most machines that the launcher waits for."""
    most = ticket.nodes.rpartition(":")[2]
    return int(most) if most.isascii() and most.isdigit() else 1


def machine_names(tickets: Mapping[str, Ticket]) -> dict[str, str]:
    """A name per peer: that of its host, with a part of the peer id if two hosts have the same name."""
    hosts = [ticket.host for ticket in tickets.values()]
    return {
        peer: ticket.host if hosts.count(ticket.host) == 1 else f"{ticket.host} ({peer.rpartition('.')[2][:4]})"
        for peer, ticket in tickets.items()
    }


def listed(names: Sequence[str]) -> str:
    """Such as `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _difference(
    tickets: Mapping[str, Ticket],
    what: str,
    value_of: Callable[[Ticket], object],
    show: Callable[[Sequence[Sequence[Ticket]]], Sequence[str]] | None = None,
) -> str:
    """Which machines differ in `what`, in words; empty if none do. `show` has the words for the value of each group."""
    names = machine_names(tickets)
    groups: dict[object, list[str]] = {}
    for peer in sorted(tickets, key=lambda peer: (names[peer], peer)):
        groups.setdefault(value_of(tickets[peer]), []).append(peer)
    if len(groups) < 2:
        return ""
    peers = sorted(groups.values(), key=len, reverse=True)
    members = [[tickets[peer] for peer in group] for group in peers]
    values = show(members) if show else [str(value_of(group[0])) for group in members]
    values = [value or "none" for value in values]
    machines = [listed([names[peer] for peer in group]) for group in peers]
    if len(peers) == 2 and len(peers[0]) > len(peers[1]):
        verb = "differs" if len(peers[1]) == 1 else "differ"
        return f"{machines[1]} {verb} from {machines[0]} in {what}: {values[1]}, not {values[0]}"
    each = "; ".join(f"{value} on {names}" for value, names in zip(values, machines, strict=True))
    return f"the machines differ in {what}: {each}"


def _show_arguments(groups: Sequence[Sequence[Ticket]]) -> list[str]:
    """The arguments of each group; long ones from shortly before the first difference."""
    texts = [group[0].arguments for group in groups]
    if max(map(len, texts)) <= MAX_SHOWN:
        return texts
    same = len(os.path.commonprefix(texts))  # noqa: RUF071  # of characters, as is meant here
    begin = texts[0].rfind(" ", 0, max(0, same - MAX_SHOWN // 4)) + 1
    return [("... " if begin else "") + _cut(text[begin:], MAX_SHOWN) for text in texts]


def _show_times(groups: Sequence[Sequence[Ticket]]) -> list[str]:
    """When the script of each group was last changed."""
    latest = (time.localtime(max(ticket.modified for ticket in group)) for group in groups)
    return [f"changed {time.strftime('%Y-%m-%d %H:%M:%S', moment)}" for moment in latest]


def _cut(text: str, most: int = MAX_LINE_BYTES) -> str:
    return text if len(text) <= most else f"{text[: most - 4]} ..."
