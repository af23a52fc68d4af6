"""`GradientCompressor`: a strategy, and the error feedback of each tensor.

What a step does not send is added to the next step's gradient (error feedback, Karimireddy et al. 2019,
arXiv:1901.09847): it is delayed, never lost. (With `sparse` it decays by a twentieth per step.) A failed step changes
nothing: only `keep` changes the state of a tensor, so a step that is repeated after a lost peer starts from the same
state.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, count, pairwise
from math import prod
from typing import Any, Final, Literal, NamedTuple, cast, get_args
from zlib import crc32

import numpy as np

from ringfort.collectives.arrays import ArrayView, as_view
from ringfort.compression import encoded, lowrank
from ringfort.compression.codec import mix
from ringfort.compression.floats import count_nonfinite, replace_nonfinite, widen
from ringfort.compression.strategy import CompressionStrategy, Method
from ringfort.errors import InvalidArgumentError, NonFiniteError
from ringfort.transport.reducer import Array

OnNonfinite = Literal["raise", "skip", "clip"]
_STATE_VERSION: Final = 1


class Piece(NamedTuple):
    """One of several tensors that lie one after the other in a flat array."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @classmethod
    def row(cls, tensors: Sequence[tuple[str, tuple[int, ...]]]) -> list[Piece]:
        """The pieces for tensors of these names and shapes, one after the other."""
        edges = accumulate((prod(shape) for _, shape in tensors), initial=0)
        return [cls(*tensor, *span) for tensor, span in zip(tensors, pairwise(edges), strict=True)]


@dataclass
class Kept:
    """The state of one tensor."""

    shape: tuple[int, ...]
    residual: Array
    """What has not been sent yet; empty without error feedback."""
    step: int = 0
    """How many times the tensor was sent. Part of the random seed."""
    factor: Array | None = None
    """POWER_SGD: where the power method continues."""


class GradientCompressor:
    """Compresses gradients with one strategy and keeps, for each tensor, what has not been sent (error feedback).

    `compress` and `decompress` do the same without a group. Each name belongs to one tensor; a tensor whose shape
    changes starts anew.

    Examples:
        >>> compressor = GradientCompressor("int8")
        >>> with ringfort.init() as ctx:
        ...     gradients = average_gradients(ctx, {"w": np.ones(2)}, compression=compressor)
        ...     x = ctx.all_reduce(np.ones(2), compression=compressor, name="layer1.weight")
        >>> compressor.decompress(compressor.compress(np.ones(2), name="bias"))
        array([1., 1.], dtype=float32)
    """

    def __init__(
        self,
        strategy: CompressionStrategy | str = CompressionStrategy.AUTO,
        *,
        error_feedback: bool = True,
        on_nonfinite: OnNonfinite = "raise",
        seed: int = 0,
    ) -> None:
        """Create a compressor without any state.

        Args:
            strategy: a `CompressionStrategy` or its name.
            error_feedback: whether to add what a step does not send to the next step. Costs one float32 per element.
            on_nonfinite: what to do with infinities and NaNs: `raise` a `NonFiniteError`; `skip` counts them as 0;
                `clip` counts infinities as the largest finite magnitude in the array, and NaNs as 0.
            seed: for stochastic rounding and random selection.

        Raises `InvalidArgumentError` for an unknown strategy or option.
        """
        self.strategy = CompressionStrategy.parse(strategy)
        self.error_feedback = error_feedback
        if on_nonfinite not in get_args(OnNonfinite):
            why = f"must be one of: {', '.join(get_args(OnNonfinite))}"
            raise InvalidArgumentError("on_nonfinite", on_nonfinite, why)
        self.on_nonfinite: OnNonfinite = on_nonfinite
        self.seed = seed
        self._kept: dict[str, Kept] = {}
        self._lock = threading.Lock()
        self._drafts = count()

    # --- without a group ------------------------------------------------------------------------------------------

    def compress(self, x: Any, name: str = "") -> bytes:
        """Encode `x`. The error is kept under `name` and added to the next array of that name.

        Raises `NonFiniteError`; `UnsupportedArrayError` and `InvalidArgumentError` if `x` is not an array of floats;
        and `InvalidArgumentError` for AUTO, which has no links to measure here.
        """
        view = as_view(x, "x")
        check_floats(view, "x")
        if self.strategy.method is Method.AUTO:
            raise InvalidArgumentError("strategy", "auto", "needs links to measure; name a strategy, such as int8")
        draft = self.draft(view, Piece.row([(name, view.shape)]))
        if draft.refused:
            raise NonFiniteError(name, {0: draft.refused})
        factor = self.factor(draft.pieces[0], self.strategy.rank)
        data, factor = encoded.write(self.strategy, draft.work, view.shape, factor, draft.seed, draft.keeps)
        self.keep(draft, {name: factor} if factor is not None else {})
        return data.tobytes()

    def decompress(self, data: bytes | bytearray | memoryview, count: int | None = None) -> Array:
        """Decode what `compress` returned, as a flat float32 array.

        Raises `ProtocolError` for invalid bytes, and if they do not hold `count` elements where that is given.
        """
        return encoded.read(np.frombuffer(data, np.uint8), count)

    # --- state ----------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The tensors that have a state."""
        with self._lock:
            return list(self._kept)

    def residual(self, name: str) -> Array | None:
        """Return what has not been sent of the tensor `name`, as a flat array; None if there is nothing."""
        kept = self._kept.get(name)
        return None if kept is None or not kept.residual.size else kept.residual

    def forget(self, name: str | None = None) -> None:
        """Drop the state of one tensor, or of all."""
        with self._lock:
            if name is None:
                self._kept.clear()
            else:
                self._kept.pop(name, None)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state for a checkpoint: numbers, strings and arrays. Each rank has its own state."""
        with self._lock:
            tensors = {name: {**asdict(kept), "shape": list(kept.shape)} for name, kept in self._kept.items()}
        return {"version": _STATE_VERSION, "strategy": str(self.strategy), "tensors": tensors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, also if it was another strategy's.

        Raises `InvalidArgumentError` for anything else; the state has not changed then.
        """
        try:
            if state["version"] != _STATE_VERSION:
                raise InvalidArgumentError("state", f"version {state['version']}", f"must be {_STATE_VERSION}")
            loaded = {str(name): _load(name, entry) for name, entry in state["tensors"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            if isinstance(exc, InvalidArgumentError):
                raise
            raise InvalidArgumentError("state", type(state).__name__, f"must come from state_dict() ({exc!r})") from exc
        with self._lock:
            self._kept = loaded

    # --- one step -------------------------------------------------------------------------------------------------

    def draft(self, view: ArrayView, pieces: Sequence[Piece], factor: float = 1.0, rank: int = 0) -> Draft:
        """Begin a step: what to send of the tensors in `view`, each element times `factor` plus its residual."""
        feedback = self.error_feedback
        flat = widen(view, factor, copy=False)
        is_own = flat is not view.flat
        nonfinite = count_nonfinite(flat)
        if nonfinite and self.on_nonfinite != "raise":
            flat, is_own = flat if is_own else flat.copy(), True
            replace_nonfinite(flat, self.on_nonfinite)
        step = 0 if feedback else next(self._drafts)  # without error feedback a tensor has no state
        # What is read and what is kept are added in one pass, into memory that may become what is kept next.
        work = flat if is_own or not feedback else np.empty_like(flat)
        with self._lock:
            for piece in pieces:
                kept, span = self._kept.get(piece.name), slice(piece.start, piece.stop)
                residual = None
                if kept is not None and kept.shape == piece.shape:
                    step = max(step, kept.step) if feedback else step
                    if feedback and kept.residual.size and not (nonfinite and self.on_nonfinite == "raise"):
                        residual = kept.residual
                if residual is not None:
                    decay = self.strategy.decay
                    np.add(flat[span], residual if decay == 1 else decay * residual, out=work[span])
                elif work is not flat:
                    work[span] = flat[span]
        seed = mix(self.seed, rank, crc32(pieces[0].name.encode()) if pieces else 0, step)
        return Draft(self, work, pieces, nonfinite, seed, step)

    def factor(self, piece: Piece, rank: int) -> Array | None:
        """Return where the power method of POWER_SGD continues for a tensor; None if it starts."""
        with self._lock:
            kept = self._kept.get(piece.name)
            shape = lowrank.matrix_shape(piece.shape, rank)
            if kept is None or kept.factor is None or shape is None or kept.shape != piece.shape:
                return None
            return kept.factor if kept.factor.shape == (rank, shape[1]) else None

    def keep(self, draft: Draft, factors: Mapping[str, Array]) -> None:
        """Store the new state: the step has succeeded, and `draft.work` is the residual."""
        if not draft.keeps and not factors:
            return
        nothing = np.empty(0, np.float32)
        with self._lock:
            for piece in draft.pieces:
                residual = draft.work[piece.start : piece.stop] if draft.keeps else nothing
                self._kept[piece.name] = Kept(piece.shape, residual, draft.step + 1, factors.get(piece.name))

    def __repr__(self) -> str:
        return f"<GradientCompressor {self.strategy}, {len(self._kept)} tensors>"


@dataclass
class Draft:
    """One step, until it has succeeded."""

    compressor: GradientCompressor
    work: Array
    """What to send, float32. With error feedback: memory of its own, which becomes the residual."""
    pieces: Sequence[Piece]
    nonfinite: int
    """How many elements were infinite or NaN; replaced by now if the compressor does so."""
    seed: int
    step: int

    @property
    def name(self) -> str:
        """The names of all tensors."""
        return ", ".join(piece.name for piece in self.pieces)

    @property
    def keeps(self) -> bool:
        """Whether what is not sent is kept (error feedback)."""
        return self.compressor.error_feedback

    @property
    def refused(self) -> int:
        """How many elements were infinite or NaN, if that is an error."""
        return self.nonfinite if self.compressor.on_nonfinite == "raise" else 0


def check_floats(view: ArrayView, name: str) -> None:
    """Raise `InvalidArgumentError` unless the elements are real floats."""
    if view.kind.kind != "f":
        why = "only float16, bfloat16, float32 and float64 can be compressed"
        raise InvalidArgumentError(f"{name}.dtype", view.kind.name, why)


def _load(name: object, entry: Mapping[str, Any]) -> Kept:
    shape = tuple(int(size) for size in entry["shape"])
    residual = np.array(entry["residual"], np.float32).reshape(-1)
    factor = None if entry["factor"] is None else np.array(entry["factor"], np.float32)
    if residual.size not in (0, prod(shape)) or count_nonfinite(residual):
        why = f"a residual of {residual.size} elements does not fit the shape {shape}"
        raise InvalidArgumentError("state", str(name), why)
    return Kept(shape, cast("Array", residual), int(entry["step"]), factor)
