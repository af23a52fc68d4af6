"""The rule for messages that the head of ringfort/errors.py states: capital letters, fragments, and words to avoid."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ringfort import errors
from tests.helpers.source import PACKAGE, parse

TO_COME: Final = ("bench", "cli", "cluster", "demo", "launch", "testing")
"""Folders whose messages are not yet held to the rule."""
FILES: Final = sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in TO_COME)
FRAGMENTS: Final = ("why", "reason", "what", "how", "state")
NAMES: Final = ("PowerSGD", "ringfort")
"""Words that are always written like this."""
LOGS: Final = ("debug", "info", "warning", "error", "exception")
AVOIDED: Final = re.compile(r"\bis no [a-z]|\bthat cannot be\b|\bmakes no sense\b|\bwhoever\b|\bgoes on\b")


def opening(node: ast.expr) -> str:
    """The first characters of a literal, as far as they are known; empty for anything else."""
    if isinstance(node, ast.JoinedStr):
        return opening(node.values[0]) if node.values else ""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def parameters(call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """The arguments of a call of one of Ringfort's errors, with the names of their parameters."""
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    kind = getattr(errors, name, None)
    if not (inspect.isclass(kind) and issubclass(kind, errors.DistributedError)):
        return
    names = list(inspect.signature(kind).parameters)
    yield from zip(names, call.args, strict=False)
    yield from ((keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg is not None)


def texts(path: Path) -> Iterator[tuple[int, bool, str]]:
    """Each text of a message: its line, whether it is a fragment, and its first characters."""
    for node in ast.walk(parse(path)):
        if not isinstance(node, ast.Call):
            continue
        for name, value in parameters(node):
            if name in (*FRAGMENTS, "message"):
                yield value.lineno, name != "message", opening(value)
        function = node.func
        if isinstance(function, ast.Attribute) and ast.unparse(function.value) in ("_log", "logger"):
            assert function.attr in LOGS
            yield node.lineno, False, opening(node.args[0])


def test_messages_start_with_a_capital_letter_and_fragments_do_not() -> None:
    found = 0
    for path in FILES:
        for line, is_fragment, text in texts(path):
            word = re.match(r"[A-Za-z]+", text)
            if word is None or word[0] in NAMES or word[0].isupper():
                continue
            found += 1
            assert word[0][0].isupper() is not is_fragment, f"{path}:{line}: {text}"
            assert not AVOIDED.search(text), f"{path}:{line}: {text}"
    assert found > 200


def test_an_unknown_name_comes_with_the_one_that_was_probably_meant() -> None:
    known = ["nodes", "peers", "timeout"]
    assert str(errors.unknown_keyword("nodess", 3, "join", known)) == (
        "Unknown keyword 'nodess' for join(); did you mean 'nodes'?"
    )
    assert errors.did_you_mean("colour", known) == "use one of: nodes, peers, timeout"


def test_messages_name_the_peer_and_the_remedy() -> None:
    assert str(errors.PeerLostError(1, "connection reset")) == "Lost rank 1: connection reset. Its own log says why."
    assert str(errors.InboxFullError(64 * 2**20, peer=3)) == (
        "The inbox for rank 3 is full (64 MiB of messages that nobody has received); receive those first"
    )
    assert str(errors.FunctionNotFoundError("add", [], peer=2)) == (
        "Rank 2 has no function 'add'; it has none; call barrier() after registering"
    )
