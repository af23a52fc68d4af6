"""Compares the tickets of all machines: which machine differs from the others, and in what. Pure.

A different script, `--nodes`, `--max-restarts` or different arguments are a usage error and end the run. A different
version or content of the script may be intended, and is a warning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ringfort.launch.agreement_messages import Ticket
from ringfort.launch.failure_report import MAX_LINE_BYTES, Failure

EXIT_USAGE: Final = 2
"""The exit code if the machines were started with different commands."""
MAX_SHOWN: Final = 100
"""Characters of one machine's arguments in an error message."""

_MUST_AGREE: Final[tuple[tuple[str, Callable[[Ticket], object]], ...]] = (
    ("the script", lambda ticket: ticket.script),
    ("the arguments", lambda ticket: f"{ticket.arguments_digest} {ticket.arguments}"),
    ("--nodes", lambda ticket: ticket.nodes),
    ("--max-restarts", lambda ticket: ticket.max_restarts),
)
_SHOULD_AGREE: Final[tuple[tuple[str, Callable[[Ticket], object]], ...]] = (
    ("the version of Ringfort", lambda ticket: ticket.version),
    ("the version of Python", lambda ticket: ticket.python),
    ("--patience", lambda ticket: f"{ticket.patience:g}"),
)


def mistake(tickets: Mapping[str, Ticket]) -> Failure | None:
    """The first usage error in the tickets (by peer): further ones often follow from it."""
    for what, value_of in _MUST_AGREE:
        groups = _groups(tickets, value_of)
        if len(groups) > 1:
            shown = _arguments(list(groups)) if what == "the arguments" else [str(value) for value in groups]
            why = f"{_told_apart(what, shown, list(groups.values()))}. Type the same command on every machine"
            return Failure("", EXIT_USAGE, why=_cut(why), is_final=True)
    return None


def warnings(tickets: Mapping[str, Ticket]) -> tuple[str, ...]:
    """The differences in the tickets (by peer) that may be intended, one line each."""
    found: list[str] = []
    copies = _groups({peer: t for peer, t in tickets.items() if t.script_digest}, lambda ticket: ticket.script_digest)
    if len(copies) > 1:
        latest = {digest: max(t.modified for t in tickets.values() if t.script_digest == digest) for digest in copies}
        shown = [f"changed {_moment(latest[str(digest)])}" for digest in copies]
        script = next(iter(tickets.values())).script
        found.append(f"warning: {_told_apart(f'the content of {script}', shown, list(copies.values()))}")
    for what, value_of in _SHOULD_AGREE:
        groups = _groups(tickets, value_of)
        if len(groups) > 1:
            found.append(
                f"warning: {_told_apart(what, [str(value or 'unknown') for value in groups], list(groups.values()))}"
            )
    return tuple(_cut(line) for line in found)


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


def _groups(tickets: Mapping[str, Ticket], value_of: Callable[[Ticket], object]) -> dict[object, list[str]]:
    """The machines by value, the most common value first."""
    names = machine_names(tickets)
    groups: dict[object, list[str]] = {}
    for peer in sorted(tickets, key=lambda peer: (names[peer], peer)):
        groups.setdefault(value_of(tickets[peer]), []).append(names[peer])
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def _told_apart(what: str, values: Sequence[str], machines: Sequence[Sequence[str]]) -> str:
    values = [value or "none" for value in values]
    if len(values) == 2 and len(machines[0]) > len(machines[1]):
        verb = "differs" if len(machines[1]) == 1 else "differ"
        return f"{listed(machines[1])} {verb} from {listed(machines[0])} in {what}: {values[1]}, not {values[0]}"
    each = "; ".join(f"{value} on {listed(names)}" for value, names in zip(values, machines, strict=True))
    return f"the machines differ in {what}: {each}"


def _arguments(values: Sequence[object]) -> list[str]:
    """The arguments of each; long ones from shortly before the first difference."""
    texts = [str(value).partition(" ")[2] for value in values]
    if max(map(len, texts)) <= MAX_SHOWN:
        return texts
    same = next(
        (i for i, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1), min(map(len, texts))
    )
    begin = texts[0].rfind(" ", 0, max(0, same - MAX_SHOWN // 4)) + 1
    return [("... " if begin else "") + _cut(text[begin:], MAX_SHOWN) for text in texts]


def _cut(text: str, most: int = MAX_LINE_BYTES) -> str:
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
