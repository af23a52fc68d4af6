"""`GradientCompressor`: a strategy, and for each tensor what was not sent yet.

What a step does not send is added to the next step's gradient (error feedback, Karimireddy et al. 2019,
arXiv:1901.09847): it comes late, and is never lost. Nothing is kept of a step that fails: only `Draft.commit` changes
what is known of a tensor, so a step that is tried again after a lost peer starts from where the failed one did.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import prod
from typing import Any, Final, Literal, NamedTuple, cast, get_args
from zlib import crc32

import numpy as np

from ringfort.collectives.arrays import ArrayView, as_view
from ringfort.compression import encoded, lowrank
from ringfort.compression.floats import count_nonfinite, mend, widen
from ringfort.compression.noise import mix
from ringfort.compression.strategy import CompressionStrategy, Method
from ringfort.errors import InvalidArgumentError, NonFiniteError
from ringfort.transport.reducer import Array

OnNonfinite = Literal["raise", "skip", "clip"]
_STATE_VERSION: Final = 1


class Piece(NamedTuple):
    """One tensor in a row of them."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @classmethod
    def row(cls, tensors: Sequence[tuple[str, tuple[int, ...]]]) -> list[Piece]:
        """Tensors of these names and shapes, one behind the other."""
        pieces: list[Piece] = []
        start = 0
        for name, shape in tensors:
            pieces.append(cls(name, shape, start, start + prod(shape)))
            start = pieces[-1].stop
        return pieces


@dataclass
class Kept:
    """What is known of one tensor."""

    shape: tuple[int, ...]
    residual: Array
    """What was not sent yet; empty where nothing is kept."""
    step: int = 0
    """How many times it was sent: decides what is left to chance."""
    factor: Array | None = None
    """POWER_SGD: where the power method goes on."""


class GradientCompressor:
    """Compresses arrays by one strategy and keeps, for each name, what was not sent.

    For `all_reduce(x, compression=compressor, name="layer1.weight")` and `average_gradients(ctx, tree,
    compression=compressor)`; `compress` and `decompress` are the same without a group. A name belongs to one tensor; a
    tensor whose shape changes starts anew. Give `on_nonfinite` to have elements that are infinite or not a number count
    as 0 (`skip`) or as the largest finite one (`clip`; NaN as 0) in place of an error.
    """

    def __init__(
        self,
        strategy: CompressionStrategy | str = CompressionStrategy.AUTO,
        *,
        error_feedback: bool = True,
        on_nonfinite: OnNonfinite = "raise",
        seed: int = 0,
    ) -> None:
        self.strategy = CompressionStrategy.parse(strategy)
        self.error_feedback = error_feedback
        if on_nonfinite not in get_args(OnNonfinite):
            raise InvalidArgumentError(
                "on_nonfinite", on_nonfinite, f"choose one of: {', '.join(get_args(OnNonfinite))}"
            )
        self.on_nonfinite: OnNonfinite = on_nonfinite
        self.seed = seed
        self._kept: dict[str, Kept] = {}
        self._lock = threading.Lock()
        self._drafts = count()

    # --- without a group ------------------------------------------------------------------------------------------

    def compress(self, x: Any, name: str = "") -> bytes:
        """`x` in the wire's form. What is lost is kept under `name` and added to the next `x` of that name.

        Raises `NonFiniteError`, and `UnsupportedArrayError` for what is no array of floats. AUTO has no links to weigh
        here and is an `InvalidArgumentError`.
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
        draft.commit({name: factor} if factor is not None else {})
        return data.tobytes()

    def decompress(self, data: bytes | bytearray | memoryview, count: int | None = None) -> Array:
        """The elements in a row, float32. Raises `ProtocolError` for bytes that `compress` has not made, and for other
        than `count` elements where you know how many there should be."""
        return encoded.read(np.frombuffer(data, np.uint8), count)

    # --- what is kept ---------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Of what is something known."""
        with self._lock:
            return list(self._kept)

    def residual(self, name: str) -> Array | None:
        """What of the tensor `name` was not sent yet, in a row; None where nothing is kept."""
        kept = self._kept.get(name)
        return None if kept is None or not kept.residual.size else kept.residual

    def forget(self, name: str | None = None) -> None:
        """Drops what is known of a tensor that is gone, or of all."""
        with self._lock:
            if name is None:
                self._kept.clear()
            else:
                self._kept.pop(name, None)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, for a checkpoint: numbers, strings and arrays. Each rank has its
        own."""
        with self._lock:
            tensors = {
                name: {
                    "shape": list(kept.shape),
                    "step": kept.step,
                    "residual": kept.residual.copy(),
                    "factor": None if kept.factor is None else kept.factor.copy(),
                }
                for name, kept in self._kept.items()
            }
        return {"version": _STATE_VERSION, "strategy": str(self.strategy), "tensors": tensors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave. Raises `InvalidArgumentError` for anything else, and then nothing has
        changed. A state of another strategy is welcome: what was not sent is still to be sent."""
        try:
            if state["version"] != _STATE_VERSION:
                raise InvalidArgumentError("state", f"version {state['version']}", f"must be {_STATE_VERSION}")
            loaded = {str(name): _load(name, entry) for name, entry in state["tensors"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            if isinstance(exc, InvalidArgumentError):
                raise
            raise InvalidArgumentError("state", type(state).__name__, f"is not from state_dict() ({exc!r})") from exc
        with self._lock:
            self._kept = loaded

    # --- one step -------------------------------------------------------------------------------------------------

    def draft(self, view: ArrayView, pieces: Sequence[Piece], factor: float = 1.0, rank: int = 0) -> Draft:
        """What is to be sent of the tensors that lie in `view`: each element times `factor`, and what was kept."""
        feedback = self.error_feedback
        flat = widen(view, factor, copy=feedback)
        nonfinite = count_nonfinite(flat)
        if nonfinite and self.on_nonfinite != "raise":
            flat = flat if feedback else flat.copy()
            mend(flat, self.on_nonfinite)
        step = 0 if feedback else next(self._drafts)  # nothing is known of a tensor of which nothing is kept
        with self._lock:
            for piece in pieces:
                kept = self._kept.get(piece.name)
                if kept is not None and kept.shape == piece.shape:
                    step = max(step, kept.step) if feedback else step
                    if feedback and kept.residual.size and not (nonfinite and self.on_nonfinite == "raise"):
                        flat[piece.start : piece.stop] += kept.residual
        seed = mix(self.seed, rank, crc32(pieces[0].name.encode()) if pieces else 0, step)
        return Draft(self, flat, pieces, nonfinite, seed, step)

    def factor(self, piece: Piece, rank: int) -> Array | None:
        """POWER_SGD: where the power method goes on for a tensor; None where that is unknown."""
        with self._lock:
            kept = self._kept.get(piece.name)
            shape = lowrank.matrix_shape(piece.shape, rank)
            if kept is None or kept.factor is None or shape is None or kept.shape != piece.shape:
                return None
            return kept.factor if kept.factor.shape == (rank, shape[1]) else None

    def keep(self, draft: Draft, factors: Mapping[str, Array]) -> None:
        """Called by `Draft.commit`."""
        nothing = np.empty(0, np.float32)
        with self._lock:
            for piece in draft.pieces:
                residual = draft.work[piece.start : piece.stop] if draft.keeps else nothing
                self._kept[piece.name] = Kept(piece.shape, residual, draft.step + 1, factors.get(piece.name))

    def __repr__(self) -> str:
        return f"<GradientCompressor {self.strategy}, {len(self._kept)} tensors>"


@dataclass
class Draft:
    """One step that is under way."""

    compressor: GradientCompressor
    work: Array
    """What is to be sent, float32; where the compressor `keeps`, memory of its own that becomes what is kept."""
    pieces: Sequence[Piece]
    nonfinite: int
    """Elements that were infinite or not a number; mended by now if the compressor mends."""
    seed: int
    step: int

    @property
    def keeps(self) -> bool:
        """Whether what is not sent is kept."""
        return self.compressor.error_feedback

    @property
    def refused(self) -> int:
        """Elements that were infinite or not a number, where that is an error."""
        return self.nonfinite if self.compressor.on_nonfinite == "raise" else 0

    def commit(self, factors: Mapping[str, Array] | None = None) -> None:
        """The step has succeeded: from now on `work` is what is kept."""
        if self.keeps or factors:
            self.compressor.keep(self, factors or {})


def check_floats(view: ArrayView, name: str) -> None:
    """Raises unless the elements are real floats."""
    if view.kind.kind != "f":
        raise InvalidArgumentError(
            f"{name}.dtype", view.kind.name, "only float16, bfloat16, float32 and float64 can be compressed"
        )


def _load(name: object, entry: Mapping[str, Any]) -> Kept:
    shape = tuple(int(size) for size in entry["shape"])
    residual = np.array(entry["residual"], np.float32).reshape(-1)
    factor = None if entry["factor"] is None else np.array(entry["factor"], np.float32)
    if residual.size not in (0, prod(shape)) or count_nonfinite(residual):
        raise InvalidArgumentError("state", str(name), f"{residual.size} elements kept do not fit its shape {shape}")
    return Kept(shape, cast("Array", residual), int(entry["step"]), factor)
