"""`ElasticRun`: the handle of a program on a run that machines join and leave.

    with ringfort.elastic(state, nodes="2:8", checkpoint="run1") as run:
        for step in run.steps(10_000, samples=len(x), batch=512, microbatch=32, seed=0):
            for part in step:
                step.add({"w": gradient(w, x[part])}, count=len(part))
            update(state, step.mean(), lr(step.number))

protocol.py says what happens and keeps it safe; this module carries it out on the group of the current epoch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from hashlib import blake2b
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec
import numpy as np

from ringfort.cluster.core.events import ClusterEvent, PeerLost, Waiting
from ringfort.cluster.core.peer_messages import Epoch
from ringfort.config import AutoDiscoveryConfig, DistributedConfig, HealthConfig
from ringfort.errors import DistributedError, InvalidArgumentError
from ringfort.training.elastic.checkpoint import CheckpointFolder, Saved, Stamp
from ringfort.training.elastic.checkpoint_writer import CheckpointWriter, is_due
from ringfort.training.elastic.dealing import MAX_PARTS, Data
from ringfort.training.elastic.donor import Donor
from ringfort.training.elastic.learner import Fetched, Learner
from ringfort.training.elastic.local_sum import Layout, LocalSum, digest_share, is_finite
from ringfort.training.elastic.membership import Membership
from ringfort.training.elastic.protocol import (
    Apply,
    Compute,
    Fenced,
    Gather,
    Instruction,
    Mark,
    Pause,
    Reduce,
    Replica,
    Report,
    Result,
    Share,
    Standstill,
    Token,
)
from ringfort.training.elastic.sample_order import Array
from ringfort.training.elastic.state_tree import Image, StateTree

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)

_FORM: Final = 20.0
"""Seconds to form the group of an epoch; after a failure it is tried again."""
_PAUSE: Final = 1.0
"""Seconds that members wait at the end of a step for a learner that has caught up."""
_LOOK: Final = 0.2
"""Seconds between two looks of a peer that is in no epoch."""
_FETCH: Final = 600.0
"""Seconds to fetch the state."""
_LAST_WRITE: Final = 60.0
"""Seconds that the last checkpoint may take when the run is closed."""
PATIENCE: Final = 10.0
"""Seconds of silence after which a machine is lost, by default."""
TOTALS: Final = "totals"
"""The name of the array with the number of samples and the sum of the losses. It is a part of the result: a member that
gets the result in recovery gets it without the tokens of the epoch before."""
MAX_STATE: Final = 1 << 40
"""Bytes. What a donor claims to send is compared with this program's own state before memory is taken."""


class _Wire(msgspec.Struct, frozen=True):
    """A result on its way to members that lack it; its arrays follow."""

    branch: str
    step: int
    cursor: int
    is_state: bool
    arrays: tuple[tuple[str, int], ...]
    manifest: bytes = b""


class Done(NamedTuple):
    """A step that is to be applied."""

    result: Result
    tokens: tuple[Token, ...]
    epoch: Epoch | None
    """None for a result that was replayed."""


class Step:
    """One step of a run. Iterate over it to get the micro-batches that this machine computes; it ends when the step is
    sealed. Then apply `mean()`."""

    def __init__(self, run: ElasticRun) -> None:
        self._run = run
        self._part: Array | None = None
        self._is_added = True
        self._done: Done | None = None

    @property
    def number(self) -> int:
        """The number of this step, from 1."""
        return self._run.step + 1 if self._done is None else self._done.result.step

    def __iter__(self) -> Iterator[Array]:
        """Yield the samples of each micro-batch, as indices. Call `add` for each before the next."""
        while self._done is None:
            instruction = self._run.advance()
            if isinstance(instruction, Done):
                self._done = instruction
                return
            self._part, self._is_added = self._run.samples_of(instruction), False
            yield self._part
            if not self._is_added:
                raise InvalidArgumentError("step", self.number, "call step.add(...) once for each micro-batch")

    def add(self, gradients: Any, *, count: float | None = None, loss: float = 0.0) -> None:
        """Add the gradients of the current micro-batch: their means over its samples, in dicts and lists of arrays.
        `count` is their weight, by default the number of samples; `loss` is their mean loss."""
        if self._part is None or self._is_added:
            raise InvalidArgumentError("step", self.number, "step.add(...) belongs into `for part in step`, once")
        self._run.add(gradients, float(len(self._part)) if count is None else float(count), loss)
        self._is_added = True

    def mean(self) -> Any:
        """Return the mean of the gradients over all samples of the step: the same bits at every member."""
        for _ in self:
            raise InvalidArgumentError("step", self.number, "iterate over the step before mean()")
        assert self._done is not None
        return self._run.mean_of(self._done)

    @property
    def loss(self) -> float:
        """The mean loss over all samples of the step, from `add(loss=)`."""
        assert self._done is not None
        count, loss = _totals(self._done.result)
        return loss / count


class ElasticRun:
    """A run that machines join and leave. Made by `ringfort.elastic`."""

    def __init__(
        self,
        state: Any,
        *,
        nodes: tuple[int, int | None],
        name: str,
        checkpoint: str | None,
        checkpoint_every: int,
        keep: int,
        config: AutoDiscoveryConfig | None,
        group: DistributedConfig | None,
        patience: float | None,
    ) -> None:
        self.state = StateTree(state)
        self.events: list[str] = []
        """What happened, in words, newest last."""
        self._nodes = nodes
        self._name = name
        self._every = checkpoint_every
        self._folder = None if checkpoint is None else CheckpointFolder(checkpoint, keep)
        self._config = config or AutoDiscoveryConfig()
        self._patience = patience
        self._group = group or DistributedConfig()
        self._sum = LocalSum()
        self._spare: list[dict[str, Array]] = []
        self._saved: Saved | None = None
        self._fork: tuple[int, int] | None = None
        """Step and cursor of a state in memory whose run has ended."""
        self._loss = 0.0
        self._computed: tuple[int, float] = (0, 0.0)
        self._is_leaving = False
        self._members: Membership | None = None
        self._writer: CheckpointWriter | None = None
        self._donor: Donor | None = None

    # --- what people use --------------------------------------------------------------------------------------------

    def steps(self, total: int, *, samples: int, batch: int, microbatch: int, seed: int = 0) -> Iterator[Step]:
        """Yield the steps of the run up to number `total`, from wherever the run is. The program applies each one
        before it asks for the next."""
        self._data = _check_data(Data(samples, batch, microbatch, seed))
        self._replica = Replica(self._data, self._found, _digest)
        self._open()
        self._events = self._live()
        while self.step < total:
            step = Step(self)
            yield step
            for _ in step:
                raise InvalidArgumentError("step", step.number, "iterate over every micro-batch of each step")
            if self._is_leaving:
                return

    @property
    def step(self) -> int:
        """The number of steps that this program has applied or is about to apply."""
        return max(self._replica.mark.step, 0)

    @property
    def members(self) -> tuple[str, ...]:
        """The names of the machines in the current epoch."""
        epoch = None if self._members is None else self._members.epoch
        return () if epoch is None else tuple(m.name or m.peer for m in epoch.members if m.slots)

    @property
    def is_first(self) -> bool:
        """Whether this is the one member that reports and saves for all."""
        members = self._members
        epoch = None if members is None else members.epoch
        return members is not None and epoch is not None and epoch.peers[0] == members.node.peer_id

    def leave(self) -> None:
        """Leave the run after the current step. The others continue."""
        self._is_leaving = True

    def close(self) -> None:
        """Leave the cluster now. Idempotent."""
        if self._donor is not None:
            self._donor.close()
        if self._members is not None:
            self._members.close("it has finished")
        if self._writer is not None:
            self._writer.close(_LAST_WRITE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- called by `Step` -------------------------------------------------------------------------------------------

    def advance(self) -> Compute | Done:
        """Return what the program has to do next."""
        return next(self._events)

    def samples_of(self, compute: Compute) -> Array:
        """Return the samples of a micro-batch."""
        self._computing = (compute, time.perf_counter())
        return self._data.part(self._data.span(self._replica.mark.cursor), compute.part)

    def add(self, gradients: Any, count: float, loss: float) -> None:
        """Add the gradients of the micro-batch that was computed."""
        compute, start = self._computing
        if not self._replica.covered:
            self._sum.clear()
            self._loss = 0.0
        self._sum.add(gradients, count)
        self._loss += count * loss
        self._replica.add(compute.part)
        samples, seconds = self._computed
        self._computed = (samples + int(count), seconds + time.perf_counter() - start)

    def mean_of(self, done: Done) -> Any:
        """Return the mean gradients of a sealed step."""
        count, _ = _totals(done.result)
        return self._sum.mean(done.result.payload, count)

    # --- the life of the run ----------------------------------------------------------------------------------------

    def _open(self) -> None:
        fewest, most = self._nodes
        shapes = [(entry.path, entry.kind, entry.shape) for entry in self.state.manifest().entries]
        settings = f"{asdict(self._data)} {shapes}"
        self._settings = f"{self._data}"
        self._find_checkpoint()
        config = replace(
            self._config,
            elastic=True,
            min_peers=fewest - 1,
            max_peers=None if most is None else most - 1,
            run=f"{self._name}/{blake2b(settings.encode(), digest_size=4).hexdigest()}",
            health=HealthConfig(patience=self._patience or PATIENCE),
        )
        if self._folder is not None:
            self._writer = CheckpointWriter(self._folder, "local")
        self._donor = Donor(lambda: self._sum.layout)
        self._members = Membership(config, self._group, self._fence, self._donor.serve, self._note)

    def _find_checkpoint(self) -> None:
        if self._folder is not None:
            self._saved = self._folder.newest(
                lambda stamp: stamp.run == self._name and stamp.settings == self._settings
            )
        if self._saved is not None:
            self._replica.saved = self._saved.stamp.step

    def _live(self) -> Iterator[Compute | Done]:
        """Take part in one epoch after the other; copy the state of the run when it goes on without this peer."""
        while True:
            assert self._members is not None
            epoch = self._members.epoch
            if epoch is None:
                yield from self._learn()
                continue
            try:
                epoch = self._members.form(_FORM)
                me = epoch.peers.index(self._members.node.peer_id)
                size = len(epoch.holders)
                script = self._replica.epoch(epoch.number, me, size, epoch.lineages[0], self._nodes[0])
                self._is_agreed = False
                yield from self._follow(script, epoch)
            except (Fenced, DistributedError) as exc:
                if not (isinstance(exc, Fenced) or self._members.has_ended(epoch) or exc.is_peer_failure):
                    raise
                _log.info("%s has ended here: %s", epoch, exc)
                self._members.wait_for_end(epoch, 5.0)
                self._members.tell(self._replica.fence(0), is_ready=False)

    def _follow(self, script: Any, epoch: Epoch) -> Iterator[Compute | Done]:
        value: Any = None
        while True:
            instruction: Instruction = script.send(value)
            value = None
            match instruction:
                case Compute():
                    if self._members is not None and self._members.has_ended(epoch):
                        raise Fenced(f"{epoch} has ended")
                    yield instruction
                case Gather(value=mine):
                    value = self._gather(mine)
                case Reduce():
                    value = self._reduce()
                case Share(root=root, result=result):
                    value = self._share(root, result)
                case Apply(result=result, tokens=tokens):
                    yield from self._apply(result, tokens, epoch)
                case Pause():
                    self._pause(epoch)

    def _apply(self, result: Result, tokens: tuple[Token, ...], epoch: Epoch) -> Iterator[Done]:
        before, _ = self._replica.history[-1]
        digest = sum(token.digest for token in tokens) % 2**64
        assert self._donor is not None
        if result.is_state:
            self.state.load(result.payload)
            self._fork, self._saved = None, None
        else:
            self._donor.sealed(before, result, digest, sums=_totals(result), is_finite=True)
            yield Done(result, tokens, epoch)
        # The program has applied it: the state is that of the mark.
        self._replica.wants_image = self._donor.wants_image
        self._replica.wants_pause = self._donor.has_caught_up
        if any(token.wants_image for token in tokens):
            self._donor.offer(self.state.image(), self._replica.mark, epoch)
        self._save(epoch)

    def _pause(self, epoch: Epoch) -> None:
        """Wait at the end of a step for learners to be seated."""
        assert self._members is not None
        self._members.tell(self._replica.fence(0), is_ready=True)
        if self._members.wait_for_end(epoch, _PAUSE):
            raise Fenced(f"{epoch} has ended")
        self._members.tell(self._replica.fence(0), is_ready=False)
        assert self._donor is not None
        self._replica.wants_pause = self._donor.has_caught_up

    # --- the group --------------------------------------------------------------------------------------------------

    def _gather(self, mine: Report | Token) -> list[Any]:
        assert self._members is not None
        kind = type(mine)
        values = self._members.context.all_gather_object(msgspec.msgpack.encode(mine))
        return [_DECODERS[kind].decode(value) for value in values]

    def _reduce(self) -> dict[str, Array]:
        assert self._members is not None
        context, local = self._members.context, self._sum
        if not self._replica.covered:
            local.clear()
            self._loss = 0.0
        if not self._is_agreed:
            layouts = context.all_gather_object(msgspec.msgpack.encode(local.layout))
            for raw in layouts:
                layout = msgspec.msgpack.decode(raw, type=Layout | None)
                if layout is not None:
                    local.prepare(layout)
            self._is_agreed = True
        self._replica.is_finite = is_finite(local.buffers)
        samples, seconds = self._computed
        self._replica.speed = int(samples / seconds) if seconds > 0 else 0
        held = self._replica.history[-1][1].payload if self._replica.history else None
        spare = next((one for one in self._spare if one is not held and one.keys() == {*local.buffers, TOTALS}), None)
        if spare is None:
            spare = {kind: np.empty_like(buffer) for kind, buffer in local.buffers.items()} | {TOTALS: np.empty(2)}
            self._spare = [*self._spare[-1:], spare]
        for kind, buffer in local.buffers.items():
            np.copyto(spare[kind], buffer)
            context.all_reduce(spare[kind])
        spare[TOTALS][:] = local.count, self._loss
        context.all_reduce(spare[TOTALS])
        return spare

    def _share(self, root: int, result: Result | None) -> Result:
        assert self._members is not None
        context = self._members.context
        wire, arrays = (b"", dict[str, Array]()) if result is None else _packed(result)
        head = msgspec.msgpack.decode(context.broadcast_object(wire, root), type=_Wire)
        for name, size in head.arrays:
            kind = "uint8" if head.is_state else "float64" if name == TOTALS else name
            arrays[name] = context.broadcast(arrays[name] if result is not None else np.empty(size, kind), root)
        if result is not None:
            return result
        if head.is_state:
            manifest = msgspec.msgpack.decode(head.manifest, type=type(self.state.manifest()))
            return Result(head.branch, head.step, head.cursor, Image(manifest, arrays["state"]), is_state=True)
        return Result(head.branch, head.step, head.cursor, arrays)

    # --- the state --------------------------------------------------------------------------------------------------

    def _found(self, branch: str) -> Result:
        """Return the first state of a branch: that of a run that has ended, the newest checkpoint, or what the program
        began with."""
        saved = self._saved
        if self._fork is not None and (saved is None or self._fork[0] >= saved.stamp.step):
            step, cursor = self._fork
            image = self.state.image()
        elif saved is not None:
            step, cursor, image = saved.stamp.step, saved.stamp.cursor, saved.read()
            _log.info("The run continues with %s", saved.path)
        else:
            step, cursor, image = 0, 0, self.state.image()
        return Result(branch, step, cursor, image, is_state=True)

    def _fence(self, epoch: int, ended: tuple[str, ...]) -> Standstill:
        """In the node's callback thread."""
        stands = self._replica.fence(epoch)
        if stands.lineage and stands.lineage in ended:
            mark = stands.mark
            if mark.branch:
                self._fork = (mark.step, mark.cursor)
                self._replica.saved = max(self._replica.saved, mark.step)
            self._replica.learn(Mark(), ())
            stands = self._replica.fence(epoch)
        return stands

    def _learn(self) -> Iterator[Done]:
        """Copy the state of a run that goes on without this peer, until an epoch seats it."""
        members = self._members
        assert members is not None
        if self._wait_for_epoch(_LOOK):
            return
        donors = members.donors()
        if not donors:
            return
        learner = Learner(donors, limit=MAX_STATE)
        try:
            fetched = learner.fetch(self._check_image, timeout=_FETCH)
            if members.epoch is not None:
                return
            self.state.load(fetched.image)
            if fetched.layout is not None:
                self._sum.prepare(fetched.layout)
            self._replica.learn(fetched.mark, ())
            mark, is_told = fetched.mark, False
            while members.epoch is None:
                replayed = learner.next_result(mark, timeout=0.0 if not is_told else _LOOK)
                if replayed is None:
                    if not is_told:
                        members.learned(fetched.epoch, self._replica.fence(0))
                        is_told = True
                    continue
                mark, is_told = replayed.after, False
                self._replica.learn(mark, [(replayed.before, replayed.result)])
                yield Done(replayed.result, (), None)
        except DistributedError as exc:
            _log.info("Copying the state of the run failed: %s", exc)
        finally:
            learner.close()

    def _check_image(self, fetched: Fetched) -> None:
        why = self.state.manifest().differences(fetched.image.manifest)
        if why:
            raise InvalidArgumentError("state", "the run's", f"differs from this program's: {why}")

    def _wait_for_epoch(self, seconds: float) -> bool:
        """Wait for an epoch that this peer is in, for a moment."""
        members = self._members
        assert members is not None
        try:
            members.node.wait_for_epoch(0, seconds)
        except DistributedError:
            members.node.epoch  # noqa: B018  # raises if the node has ended
        return members.epoch is not None

    def _save(self, epoch: Epoch) -> None:
        mark, writer = self._replica.mark, self._writer
        assert self._members is not None
        me = epoch.peers.index(self._members.node.peer_id)
        if writer is not None and mark.step and is_due(mark.step, me, len(epoch.holders), self._every):
            stamp = Stamp(self._name, mark.branch, epoch.number, mark.step, mark.cursor, mark.chain, self._settings)
            writer.submit(stamp, self.state.image())

    def _note(self, event: ClusterEvent) -> None:
        if isinstance(event, (PeerLost, Waiting)):
            self.events.append(str(event))


_DECODERS: Final[dict[type, Any]] = {kind: msgspec.msgpack.Decoder(kind) for kind in (Report, Token)}


def _digest(result: Result, me: int, size: int) -> int:
    if result.is_state:
        return digest_share({"state": cast("Image", result.payload).data}, me, size)
    return digest_share(result.payload, me, size)


def _totals(result: Result) -> tuple[float, float]:
    """Return the weight and the weighted loss of a step."""
    count, loss = result.payload[TOTALS].tolist()
    return count, loss


def _packed(result: Result) -> tuple[bytes, dict[str, Array]]:
    manifest = b""
    if result.is_state:
        image = cast("Image", result.payload)
        arrays, manifest = {"state": image.data}, msgspec.msgpack.encode(image.manifest)
    else:
        arrays = dict(result.payload)
    sizes = tuple((name, array.size) for name, array in arrays.items())
    wire = _Wire(result.branch, result.step, result.cursor, result.is_state, sizes, manifest)
    return msgspec.msgpack.encode(wire), arrays


def _check_data(data: Data) -> Data:
    for name, value in asdict(data).items():
        if name != "seed" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InvalidArgumentError(name, value, "must be a whole number of at least 1")
    if data.parts(data.span(0)) > MAX_PARTS:
        raise InvalidArgumentError("microbatch", data.microbatch, f"cuts a batch into more than {MAX_PARTS} parts")
    return data


def elastic(
    state: Any,
    *,
    nodes: str | int = "1:",
    name: str = "elastic",
    checkpoint: str | None = None,
    checkpoint_every: int = 100,
    keep: int = 3,
    patience: float | None = None,
    config: AutoDiscoveryConfig | None = None,
    group: DistributedConfig | None = None,
) -> ElasticRun:
    """Return the handle on a run that machines join and leave while it goes on.

    `state` is a dict or a list of arrays and plain values, which the program changes in place: everything that a
    machine needs to continue. `nodes` is the least and the largest number of members, such as `"2:8"`. Programs with
    the same `name`, state and data are members of one run. With `checkpoint`, a folder on this machine's disk, the
    state is saved every `checkpoint_every` steps, and a run that lost all its members continues with the newest.
    `patience` is how many seconds a silent machine is waited for.

    Raises `InvalidArgumentError` and `UnsupportedArrayError` for invalid arguments.
    """
    if isinstance(checkpoint_every, bool) or checkpoint_every < 1:
        raise InvalidArgumentError("checkpoint_every", checkpoint_every, "must be a whole number of at least 1")
    return ElasticRun(
        state,
        nodes=_node_range(nodes),
        name=name,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        keep=keep,
        config=config,
        group=group,
        patience=patience,
    )


def _node_range(nodes: str | int) -> tuple[int, int | None]:
    first, colon, last = str(nodes).partition(":")
    try:
        fewest = int(first)
        most = (int(last) if last else None) if colon else fewest
    except ValueError:
        raise InvalidArgumentError("nodes", nodes, "must be MIN:MAX, such as 2:8, or one number") from None
    if fewest < 1 or (most is not None and most < fewest):
        raise InvalidArgumentError("nodes", nodes, "must be MIN:MAX with 1 <= MIN <= MAX")
    return fewest, most
