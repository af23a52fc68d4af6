"""`Peers`: the processes of the demo, one of which is killed and started again."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Generator, Iterator
from signal import SIGKILL
from typing import Any, cast

import msgspec

from ringfort.demo.settings import Settings
from ringfort.demo.worker import Role
from ringfort.identity.namespace import NetworkNamespace
from ringfort.launch.local_ranks import ONE_THREAD, RankFailedError
from ringfort.launch.processes import Child, Children, Output

WORKER = "ringfort.demo.worker"
MAX_RESTARTS = 5
"""Peers that are started again after SIGKILL: the one that the demo kills, and a few that a person kills."""

Message = dict[str, Any]


class Peers:
    """A context manager that ends every process on exit. For use by one thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._children = Children()
        self._current: dict[int, Child] = {}
        self._killed_at: dict[int, float] = {}
        # A new cluster, so that two demos at the same time do not find each other; on loopback, so that nobody does.
        self._variables = {
            **ONE_THREAD,
            "RINGFORT_KEY": NetworkNamespace.generate("demo").join_code(),
            "RINGFORT_INTERFACES": "127.0.0.1",
            # The demo shows encrypted connections, as between machines, though its processes could share memory.
            "RINGFORT_SHM": "off",
        }

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *_: object) -> None:
        self._children.close()

    def start(self, number: int, role: Role) -> None:
        """Start a process."""
        settings = msgspec.json.encode(self._settings).decode()
        command = [sys.executable, "-m", "ringfort.launch.local_ranks", WORKER, settings, role]
        self._current[number] = self._children.start(number, command, self._variables)

    def kill(self, number: int) -> None:
        """Kill a process by SIGKILL, as a power cut does: it cannot say goodbye."""
        self._killed_at[number] = time.monotonic()
        self._current[number].process.send_signal(SIGKILL)

    def messages(self) -> Iterator[tuple[int, Message]]:
        """Yield what the processes report, as (number, message), until all have ended. A message of the kind
        `killed` says that one was killed by SIGKILL, and when; start it again.

        Raises `RankFailedError` if one fails in another way, or if too many are killed.
        """
        over = list[Child]()
        while not self._children.is_over:
            for output in self._children.poll():
                yield from ((output.child.number, message) for message in _messages(output))
            for child in self._children.failed[len(over) :]:
                over.append(child)
                if child.exit_code != -SIGKILL or len(self._current) == 1 or len(over) > MAX_RESTARTS:
                    raise RankFailedError(child.number, child.exit_code or 0, child.tail)
                yield child.number, {"kind": "killed", "at": self._killed_at.get(child.number, time.monotonic())}


def _messages(output: Output) -> Iterator[Message]:
    """The messages in what a process wrote. Other lines go to the tail."""
    for line in output.lines():
        try:
            value = None if output.is_error else json.loads(line)
        except ValueError:
            value = None  # a library printed something
        if isinstance(value, dict):
            yield cast("Message", value)
        else:
            output.child.keep([line])


def train(settings: Settings, role: Role) -> Generator[tuple[int, Message]]:
    """Start the processes of a training, and yield what they report. Kill one at the step that the settings say, and
    start it again; start again also those that a person kills."""
    count = 1 if role == "alone" else settings.ranks
    kill_at = None if role == "alone" else settings.kill_at
    with Peers(settings) as peers:
        for number in range(count):
            peers.start(number, role)
        for number, message in peers.messages():
            yield number, message
            if message["kind"] == "killed":
                peers.start(number, "again")
            elif kill_at is not None and message.get("step", 0) >= kill_at and message["members"] == settings.ranks:
                peers.kill(number)
                kill_at = None
