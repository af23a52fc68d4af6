"""The machines of `python -m benchmarks.watching`: network namespaces on this one, that train and are looked at."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from ringfort.identity.namespace import NetworkNamespace
from ringfort.telemetry.view import RunView
from tests.helpers.namespaces import Host, Lan, lan

FIRST_STEPS = 2
"""Steps of all ranks before the clock starts: until then machines meet."""
LIMIT = 60.0
"""Seconds until all ranks train."""
SAMPLES = 48
"""In a batch of each machine, unless they are dealt by speed."""
BURST = 0.002
"""Seconds of traffic that pass at once after a pause: little, for a cable or Wi-Fi lets nothing pass faster."""


@dataclass(frozen=True)
class Machine:
    """One machine, and how fast it is."""

    name: str
    samples: int = SAMPLES
    """In each of its batches."""
    compute: float = 0.4
    """Seconds for `SAMPLES` samples."""
    load: float = 0.0
    """Seconds to load a batch."""
    megabits: float | None = None
    """Of its link, per second; None for as fast as this machine."""


@dataclass(frozen=True)
class Setup:
    """Machines and what they train."""

    machines: tuple[Machine, ...]
    parameters: int = 250_000
    """Of the model: few, so that their gradients hardly take time."""
    compression: str | None = None

    def changed(self, name: str, **changes: Any) -> Setup:
        """Return the same with another machine of this name."""
        machines = (replace(one, **changes) if one.name == name else one for one in self.machines)
        return replace(self, machines=tuple(machines))


class Run:
    """Machines that train."""

    def __init__(self, setup: Setup, net: Lan, homes: Path) -> None:
        self.setup, self.net = setup, net
        self._homes, self._key = homes, NetworkNamespace.generate("watching").join_code()
        for host, machine in zip(net.hosts, setup.machines, strict=True):
            if machine.megabits is not None:
                self.limit(host, machine.megabits)
            options = {
                "--peers": len(setup.machines) - 1, "--parameters": setup.parameters, "--samples": machine.samples,
                "--compute": machine.compute * machine.samples / SAMPLES, "--load": machine.load,
            }  # fmt: skip
            if setup.compression is not None:
                options["--compression"] = setup.compression
            self.start(host, "benchmarks.watching_member", *(str(word) for pair in options.items() for word in pair))

    def start(self, host: Host, *command: str, **options: Any) -> subprocess.Popen[Any]:
        """Start a program on a machine, as its user would."""
        name = self.setup.machines[host.number].name
        own = self._homes / name
        own.mkdir(0o700, exist_ok=True)
        # A runtime folder for each machine: else all would see the traces of all as those of their own.
        variables = {
            "RINGFORT_KEY": self._key, "RINGFORT_CLUSTER": "", "RINGFORT_HOME": str(own), "XDG_RUNTIME_DIR": str(own)
        }  # fmt: skip
        named = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name)
        return host.start(*named, sys.executable, "-m", *command, variables=variables, **options)

    def limit(self, host: Host, megabits: float) -> None:
        """Let so many megabits a second through, each way, between a machine and the others."""
        self.net.limit(host, megabits, burst_seconds=BURST)

    def views(self) -> Iterator[RunView]:
        """Look at the run from its first machine, from now on. Raises `TimeoutError` if not all ranks train."""
        viewer = self.start(self.net.hosts[0], "benchmarks.watching_viewer", stdout=subprocess.PIPE)
        deadline, is_training = time.monotonic() + LIMIT, False
        assert viewer.stdout is not None
        for line in viewer.stdout:
            view = msgspec.json.decode(line, type=RunView)
            training = [rank for rank in view.ranks if rank.state == "training" and rank.step >= FIRST_STEPS]
            is_training = is_training or len(training) == len(self.setup.machines)
            if is_training:
                yield view
            elif time.monotonic() > deadline:
                raise TimeoutError(f"Not all ranks train after {LIMIT:g} s. {view.verdict.sentence} {view.notice}")
        raise ChildProcessError("The viewer has ended. What it printed says why.")


@contextmanager
def running(setup: Setup) -> Iterator[Run]:
    """Train on all machines of `setup`."""
    with (
        tempfile.TemporaryDirectory(prefix="ringfort-watching-") as homes,
        lan(len(setup.machines), machine_ids=True) as net,
    ):
        try:
            yield Run(setup, net, Path(homes))
        finally:
            # All at once: otherwise those that are killed last say that they have lost the others.
            for process in [process for host in net.hosts for process in host.running]:
                process.send_signal(signal.SIGSTOP)


def look(setup: Setup, seconds: float) -> RunView:
    """Return what a viewer sees of a run when it has looked for so many seconds."""
    with running(setup) as run, closing(run.views()) as views:
        end = next(views).now + seconds
        return next(view for view in views if view.now >= end)
