"""The demo: a group of local ranks trains, one process repeats the training, and the two are compared."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console

from ringfort.demo.proof import Outcome, Training
from ringfort.demo.screen import Show, group_name
from ringfort.demo.settings import Framework, Settings
from ringfort.errors import DistributedError
from ringfort.identity.namespace import NetworkNamespace
from ringfort.launch.local_ranks import LocalRanks

WORKER = "ringfort.demo.worker"
MODELS: dict[Framework, str] = {"numpy": "a small model in NumPy", "torch": "a transformer under torch's DDP"}


def run_demo(settings: Settings, console: Console, *, live: bool) -> Outcome:
    """Train twice and compare. Raises `RankFailedError` if a rank fails. Leaves no process behind."""
    show = Show(console, settings, live=live)
    peers = group_name(settings.ranks)
    batch = f"{settings.batch} samples per step"
    title = f"{peers} on this machine find each other and train\n{MODELS[settings.framework]}, {batch}"
    group = _train(settings, settings.ranks, show, title)
    show.after_training(group)
    reference = _train(settings, 1, show, f"The same with one process, {batch}")
    outcome = Outcome(settings, group, reference)
    show.proof(outcome)
    if outcome.passed:
        show.next_steps()
    return outcome


def _train(settings: Settings, ranks: int, show: Show, title: str) -> Training:
    result: dict[str, Any] | None = None
    # A new cluster, so that two demos at the same time do not find each other; on loopback, so that nobody else does.
    cluster = NetworkNamespace.generate("demo")
    told = {
        "RINGFORT_KEY": cluster.join_code(),
        "RINGFORT_INTERFACES": "127.0.0.1",
        # The demo shows encrypted connections, as between machines, though its processes could share memory.
        "RINGFORT_SHM": "off",
        # The processes agree on their ranks themselves.
        "RANK": "",
        "WORLD_SIZE": "",
    }
    arguments = [msgspec.json.encode(settings).decode(), str(ranks)]
    with show.phase(title), LocalRanks(WORKER, ranks, arguments, variables=told) as group:
        for _, message in group.messages():
            if message.pop("kind") == "progress":
                show.progress(message.pop("rank"), message)
            else:
                result = message
    if result is None:
        raise DistributedError("the ranks of the demo ended without a result")
    return Training(**result)
