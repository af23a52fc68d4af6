"""`ElasticRun`: the handle of a program on a run that machines join and leave.

    with ringfort.elastic(state, nodes="2:8", checkpoint="run1") as run:
        for step in run.steps(10_000, samples=len(x), batch=512, microbatch=32, seed=0):
            for part in step:
                step.add({"w": gradient(w, x[part])}, count=len(part))
            update(state, step.mean(), lr(step.number))

protocol.py says what happens and keeps it safe; participant.py carries it out on the group of the current epoch.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from ringfort.config import AutoDiscoveryConfig, DistributedConfig
from ringfort.errors import InvalidArgumentError
from ringfort.training.elastic.array_rounds import RoundSource, RoundSum, RoundTree
from ringfort.training.elastic.array_source import ArraySource
from ringfort.training.elastic.dealing import Data, RunEnd
from ringfort.training.elastic.handle import RunHandle, data_of, whole_number
from ringfort.training.elastic.launched import with_launcher
from ringfort.training.elastic.local_sum import LocalSum
from ringfort.training.elastic.options import Nonfinite, Options
from ringfort.training.elastic.rounds import RoundSettings, Sync, round_settings
from ringfort.training.elastic.state_tree import StateTree
from ringfort.training.elastic.step import Done, Source, Step, Turn


class ElasticRun(RunHandle):
    """A run that machines join and leave. Made by `ringfort.elastic`.

    A program that asks for the next step has applied the one before. One that breaks out of the loop leaves the run at
    once; the others continue. After a fork, the run belongs to the parent alone.
    """

    def steps(
        self,
        total: int,
        *,
        samples: int,
        batch: int | None = None,
        batch_per_member: int | None = None,
        microbatch: int | None = None,
        seed: int = 0,
    ) -> Iterator[Step]:
        """Return an iterator over the steps of the run up to number `total`, from wherever the run is. The program
        applies each step before it asks for the next.

        A step has `batch` samples, however many members compute it, or `batch_per_member` for each member: say one of
        the two. It is computed in micro-batches of `microbatch` samples. With local steps it is a round, and `batch`
        the samples of a local step, which is one micro-batch.

        When the last step is applied, or after `leave()`, this machine has left the run, and the loop ends. A machine
        that comes when the run has finished gets the final state, and its loop has no steps.

        SIGTERM and the first Ctrl-C let the machine finish its step and leave after that; then `SystemExit` or
        `KeyboardInterrupt` is raised. A second one acts at once.

        Raises `InvalidArgumentError` for invalid arguments, and if the cluster has a run of this name with other data
        or another state; `GradientLayoutError` and `NonFiniteError` for gradients that the run cannot use.
        """
        total = whole_number("total", total)
        if total < 0:
            raise InvalidArgumentError("total", total, "must be a whole number of at least 0")
        state = self.state
        if isinstance(state, RoundTree):
            data = _rounds_of(state.reduction.settings, samples, batch, batch_per_member, microbatch, seed)
            sums = RoundSum(state)
            self._check_first()
            return self._live(RunEnd(total), data, sums, lambda run, first: _step(RoundSource(run, state, sums), first))
        data, local = data_of(samples, batch, batch_per_member, microbatch, seed), LocalSum()
        self._check_first()
        return self._live(RunEnd(total), data, local, lambda run, first: _step(ArraySource(run, local), first))

    @contextmanager
    def global_weights(self) -> Generator[None]:
        """Have the weights of the last sealed step in the state, for an evaluation or to save them: with local steps
        those that all machines have, in the middle of a round too. In every other run the state has them anyway."""
        if not isinstance(self.state, RoundTree):
            yield
            return
        with self.aside(), self.state.shown():
            yield

    @property
    def step(self) -> int:
        """The number of the last step that was sealed: this program has applied it, or is about to."""
        return self._sealed()


def _step(source: Source, first: Turn | Done) -> Iterator[Step]:
    step = Step(source, first)
    yield step
    step.end()


def _rounds_of(
    settings: RoundSettings, samples: int, batch: int | None, batch_per_member: int | None, microbatch: Any, seed: int
) -> Data:
    """Return the data of a run with local steps."""
    if batch_per_member is not None or batch is None:
        raise InvalidArgumentError("batch", batch, "with local steps, pass batch=: the samples of a local step")
    if microbatch not in (None, batch):
        why = f"must be the batch ({batch}) with local steps: each one is an optimizer step; or leave it out"
        raise InvalidArgumentError("microbatch", microbatch, why)
    plain = data_of(samples, batch, None, batch, seed)
    return Data(
        plain.samples,
        plain.batch * settings.times,
        plain.batch,
        plain.seed,
        sync=str(settings),
        is_planned=settings.is_planned,
    )


def elastic(
    state: Any,
    *,
    nodes: str | int | None = None,
    name: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 100,
    keep: int = 3,
    patience: float | None = None,
    nonfinite: Nonfinite = "error",
    sync: Sync = "every_step",
    every: int | None = None,
    codec: str | None = None,
    outer_rate: float | None = None,
    outer_momentum: float | None = None,
    machine_class: str = "",
    config: AutoDiscoveryConfig | None = None,
    group: DistributedConfig | None = None,
) -> ElasticRun:
    """Return the handle on a run that machines join and leave while it goes on.

    `state` is a dict or a list of arrays and plain values, which the program changes in place: everything that a
    machine needs to continue. `nodes` is the least and the largest number of members, such as `"2:8"` (by default 1 and
    no limit). Programs with the same `name` (by default the script's), state and data are members of one run. With
    `checkpoint`, a folder on this machine's disk, the state is saved every `checkpoint_every` steps, and a run that
    lost all its members continues with the newest. `patience` is how many seconds a silent machine is waited for. What
    is left out of the three comes from `ringfort run --elastic`, if that has started the program.

    Gradients with infinities or NaNs are an error at every member, which names the machine. With `nonfinite="skip"`
    all members skip such a step instead (`Step.skipped`), as programs with a loss scaler need it.

    With `sync="local"` a step is a round: the arrays of floats in `state` are weights, which the program changes for
    each micro-batch, and calls `step.add()` without gradients. At the end of `every` such local steps, of all machines
    together (16), the machines average what has become of the weights, with `codec` (`none`, `int8`, `int4` or
    `sparse`; `int8`). That takes tens to hundreds of times fewer bytes. With `sync="auto"` the machines
    measure links and steps, and decide how many steps a round has and with which codec, again and again. `outer_rate`
    and `outer_momentum` are those of `ringfort.LocalSteps`.

    Machines of one `machine_class` must have the same bits in their state; a difference is damage. By default it is the
    processor, its vector instructions and the versions of NumPy and torch. Say it if your update runs on something
    else, such as a GPU: `machine_class="cuda H200 torch 2.5"`.

    Raises `InvalidArgumentError` and `UnsupportedArrayError` for invalid arguments, and `ConfigError` if they
    contradict the options of `ringfort run --elastic`.

    Examples:
        >>> state = {"w": np.zeros(2)}
        >>> with ringfort.elastic(state, nodes="1:8", name="example") as run:
        ...     for step in run.steps(3, samples=8, batch=8, microbatch=4, seed=0):
        ...         for samples in step:
        ...             step.add({"w": np.ones(2)}, loss=0.5)
        ...         state["w"] -= 0.5 * step.mean()["w"]
        >>> state["w"]
        array([-1.5, -1.5])
    """
    told = with_launcher(nodes, name, patience)
    options = Options(
        name=told.name,
        nodes=told.nodes,
        checkpoint=checkpoint,
        every=checkpoint_every,
        keep=keep,
        patience=told.patience,
        nonfinite=nonfinite,
        config=config,
        group=group,
        machine_class=machine_class,
    )
    settings = round_settings(sync, every, codec, outer_rate, outer_momentum)
    return ElasticRun(StateTree(state) if settings is None else RoundTree(state, settings), options)
