"""Cluster nodes in processes of their own, for tests: what they said so far, and waiting for what they should say."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil

from ringfort.identity.namespace import NetworkNamespace
from tests.helpers.namespaces import Host

PATIENCE = 30.0
"""Seconds for something that takes one on an idle machine."""


class Node:
    """A process of `tests.workers.node`, or of another module that takes its commands."""

    module = "tests.workers.node"

    def __init__(self, host: Host, key: str, home: Path) -> None:
        self.host = host
        self.lines: list[dict[str, Any]] = []
        self.peer = ""
        self.epoch: dict[str, Any] | None = None
        """The epoch that it is in."""
        self.key, self.home = key, home
        self._come: queue.Queue[dict[str, Any]] = queue.Queue()
        self._begin()

    def _begin(self) -> None:
        self.process = self.host.start(
            sys.executable, "-m", self.module,
            variables={"RINGFORT_KEY": self.key, "RINGFORT_HOME": str(self.home), "RINGFORT_CLUSTER": ""},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, args=(self.process,))
        self._reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout:
            self._come.put(json.loads(line))

    def do(self, what: str, **more: Any) -> None:
        self.process.stdin.write(json.dumps({"do": what, **more}) + "\n")
        self.process.stdin.flush()

    def ask(self, what: str, answer: str, **more: Any) -> Any:
        """Has it do something; returns the answer. What it fails with fails the test."""
        self.do(what, **more)
        return self.next(answer)[answer]

    def next(self, *answers: str, patience: float = PATIENCE) -> dict[str, Any]:
        """The next line that has one of `answers`."""
        deadline = time.monotonic() + patience
        while True:
            line = self._take(deadline, f"to say {answers}")
            assert "failed" not in line or "failed" in answers, f"{self}: {line['failed']}"
            if any(answer in line for answer in answers):
                return line

    def start(self, **config: Any) -> None:
        line = self.ask_start(**config)
        self.peer, self.started = line["started"], line["at"]

    def ask_start(self, **config: Any) -> dict[str, Any]:
        self.do("start", **config)
        return self.next("started")

    def until(self, what: str, done: Callable[[], bool], patience: float = PATIENCE) -> None:
        """Takes what it says until `done()`."""
        deadline = time.monotonic() + patience
        self.settle()
        while not done():
            self._take(deadline, what)

    def settle(self) -> None:
        while True:
            try:
                self._note(self._come.get_nowait())
            except queue.Empty:
                return

    def _take(self, deadline: float, what: str) -> dict[str, Any]:
        while True:
            left = deadline - time.monotonic()
            assert left > 0, f"{self} waited {what}; the last it said: {self.lines[-12:]}"
            try:
                return self._note(self._come.get(timeout=min(left, 0.2)))
            except queue.Empty:
                assert self.process.poll() is None, f"{self} ended with {self.process.returncode}"

    def _note(self, line: dict[str, Any]) -> dict[str, Any]:
        self.lines.append(line)
        line["who"] = line.get("started", self.peer)
        match line:
            case {"event": "EpochStarted"}:
                self.epoch = line
            case {"event": "EpochEnded"} if self.epoch and self.epoch["key"] == line["key"]:
                self.epoch = None
        return line

    def kill(self, *, word: bool = True) -> None:
        """Kills the process. What it was in it is in no more. Without `word` its control process is killed first, as
        when the machine dies: nobody is told."""
        if not word:
            for child in psutil.Process(self.process.pid).children():
                child.kill()
                child.wait(PATIENCE)
        self.process.kill()
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        self.settle()
        if self.epoch is not None:
            self.lines.append({**self.epoch, "event": "EpochEnded", "at": time.monotonic()})
            self.epoch = None

    def restart(self) -> None:
        """A new process in place of one that was killed."""
        self.process.stdin.close()
        self.process.stdout.close()
        self._come = queue.Queue()
        self.epoch = None
        self._begin()

    def __repr__(self) -> str:
        return f"{self.host.namespace} ({self.peer})"


N = TypeVar("N", bound=Node)


def agree(nodes: list[Node], patience: float = PATIENCE) -> float:
    """Waits until all are in one epoch of exactly them; returns when that was, in seconds of the common clock."""
    wanted = {node.peer for node in nodes}
    deadline = time.monotonic() + patience
    while True:
        for node in nodes:
            node.settle()
        epochs = [node.epoch for node in nodes]
        if all(epoch is not None and set(epoch["peers"]) == wanted for epoch in epochs):
            keys = {tuple(epoch["key"]) for epoch in epochs}
            if len(keys) == 1:
                return max(epoch["at"] for epoch in epochs)
        if time.monotonic() > deadline:
            told = "\n".join(f"{node}: {node.epoch}\n    {node.lines[-10:]}" for node in nodes)
            raise AssertionError(f"no common epoch of {wanted} after {patience} s:\n{told}")
        time.sleep(0.01)


@contextmanager
def nodes_on(hosts: list[Host], *, clusters: int = 1, kind: type[N] = Node) -> Iterator[list[list[N]]]:
    """A process on each host for each of `clusters` clusters, none started yet. A list a cluster."""
    with tempfile.TemporaryDirectory(prefix="ringfort-nodes-") as folder:
        made: list[list[N]] = []
        try:
            for cluster in range(clusters):
                key = NetworkNamespace.generate("home").join_code()
                made.append([kind(host, key, Path(folder) / f"{cluster}-{host.number}") for host in hosts])
            yield made
        finally:
            for host in hosts:
                host.end()
            for node in (node for group in made for node in group):
                node._reader.join(PATIENCE)
