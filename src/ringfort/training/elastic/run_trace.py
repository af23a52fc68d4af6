"""`RunTrace`: what an elastic run writes into the trace of its process, for those who watch it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from time import perf_counter
from typing import Final

from ringfort.cluster.backend import AutoDiscoveryBackend
from ringfort.cluster.core.events import ClusterEvent
from ringfort.cluster.core.peer_messages import Epoch
from ringfort.cluster.shown_events import ShownEvents
from ringfort.compression.auto import codec_seconds
from ringfort.telemetry.group_trace import describe_group
from ringfort.telemetry.step_time import Phase
from ringfort.telemetry.trace import own_trace

_MEMBER: Final = "member"
_LEARNER: Final = "learner"
LOSS: Final = "loss"


class RunTrace:
    """One run. For the program's thread, except `on_event` and `event`."""

    def __init__(self, name: str, total: int) -> None:
        """`total` is the number of the last step; 0 if unknown."""
        self._name = name
        self._total = total
        self._shown = ShownEvents()
        self._reduced_at: float | None = None
        self._samples = 0
        self._is_paused = False

    def formed(self, backend: AutoDiscoveryBackend, epoch: Epoch) -> None:
        """The group of an epoch was formed: what was before it belongs to no step."""
        trace, self._reduced_at = own_trace(), None
        describe_group(trace, backend, epoch=epoch.number, run=self._name, role=_MEMBER, total_steps=self._total)
        trace.codecs_from(codec_seconds)
        trace.restart_step()

    def follows(self) -> None:
        """This program is no member: it copies the state, and follows the run."""
        own_trace().describe(rank=-1, run=self._name, role=_LEARNER, total_steps=self._total)

    def replayed(self, step: int) -> None:
        """It has followed up to `step`. A learner waits for nobody, and nobody for it: its steps have no times."""
        own_trace().set_step(step)

    def reduced(self, samples: int) -> None:
        """The sums of a step were reduced; this member has computed so many samples of it."""
        self._reduced_at, self._samples = perf_counter(), samples

    def has_tokens(self, exchange: float, nbytes: int) -> None:
        """The members have exchanged their tokens, in a collective of `exchange` seconds that has reduced so many
        bytes. Sealing counts from the last byte of the reduction."""
        since, self._reduced_at = self._reduced_at, None
        seconds = exchange if since is None else perf_counter() - since
        own_trace().time.reassign(Phase.SEAL, seconds, exchanged=exchange, reduced=nbytes)

    def sealed(self, step: int, loss: float | None) -> None:
        """The program applies a sealed step next. What it logs meanwhile belongs to that. `loss` is the mean over the
        step, if the program has told its losses; a program that logs a loss itself is believed."""
        trace = own_trace()
        trace.set_step(step)
        if loss is not None and trace.header.rank == 0 and LOSS not in trace.logged:
            trace.show({LOSS: loss}, step)

    def applied(self, step: int, members: int) -> None:
        """The program has applied a sealed step."""
        own_trace().step_done(step, samples=self._samples)
        self._samples = 0
        if self._is_paused:
            self._is_paused = False
            self.event("resumed", f"Training continues from step {step}, with {members} members")

    def left_out(self) -> AbstractContextManager[None]:
        """The time of this block belongs to no step."""
        return own_trace().time.paused()

    def pauses(self, why: str) -> None:
        """No step begins for now."""
        if not self._is_paused:
            self._is_paused = True
            self.event("paused", why)

    def event(self, kind: str, text: str) -> None:
        """Show an event."""
        own_trace().event(kind, text)

    def on_event(self, event: ClusterEvent) -> None:
        """Show an event of the cluster. In the node's callback thread."""
        for kind, text in self._shown.take(event):
            self.event(kind, text)

    def close(self) -> None:
        """The run is over for this process, which may do other steps."""
        trace = own_trace()
        if trace.header.role:
            trace.describe(role="")
