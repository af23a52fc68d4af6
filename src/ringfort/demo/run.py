"""The demo: peers train and lose one of them, one process repeats the training, and the two are compared."""

from __future__ import annotations

from contextlib import closing

from rich.console import Console

from ringfort.demo.peers import train
from ringfort.demo.proof import Outcome, Training
from ringfort.demo.screen import Show, group_name
from ringfort.demo.settings import Framework, Settings
from ringfort.demo.story import Story
from ringfort.demo.worker import Role
from ringfort.errors import DistributedError

MODELS: dict[Framework, str] = {"numpy": "a small model in NumPy", "torch": "a transformer in torch"}


def run_demo(settings: Settings, console: Console, *, live: bool) -> Outcome:
    """Train twice and compare. Raises `RankFailedError` if a peer fails. Leaves no process behind."""
    show = Show(console, settings, live=live)
    batch = f"{settings.batch} samples per step"
    title = (
        f"{group_name(settings.ranks)} on this machine find each other and train\n{MODELS[settings.framework]}, {batch}"
    )
    if settings.kill_at is not None:
        title += "; one is killed on the way"
    group = _train(settings, "peer", show, title)
    show.after_training(group)
    reference = _train(settings, "alone", show, f"The same with one process and a plain loop, {batch}")
    outcome = Outcome(settings, group, reference)
    show.proof(outcome)
    if outcome.passed:
        show.next_steps()
    return outcome


def _train(settings: Settings, role: Role, show: Show, title: str) -> Training:
    count = 1 if role == "alone" else settings.ranks
    story = Story(count)
    with show.phase(title, story), closing(train(settings, role)) as messages:
        for number, message in messages:
            show.happened(story.add(number, message))
    if len(story.results) != count:
        raise DistributedError("the peers of the demo ended without a result")
    return Training.of(story)
