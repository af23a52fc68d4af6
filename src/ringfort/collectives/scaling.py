"""Which reducer each step of an algorithm needs, where the op also scales: MEAN and PREMUL_SUM."""

from __future__ import annotations

from ringfort.collectives import reduction
from ringfort.collectives.algorithms import Span, Step
from ringfort.collectives.ops import Op
from ringfort.collectives.reduction import ElementType
from ringfort.transport.reducer import Array, Reducer


class Reducers:
    """Which reducer a step needs. What the op scales is scaled on the way, while it is in the cache: a PREMUL_SUM's
    elements when they are first sent or reduced into, a MEAN's when they are whole."""

    def __init__(self, op: Op, kind: ElementType, flat: Array, world_size: int) -> None:
        self._op, self._kind, self._flat = op, kind, flat
        self._plain = reduction.reducer(op, kind)
        self._closing = reduction.closing_reducer(op, kind, world_size)
        self._opening = reduction.opening_reducer(op, kind)
        self._untouched: list[Span] = [(0, flat.size)] if reduction.needs_scale_before(op) and flat.size else []

    def __call__(self, step: Step) -> Reducer | None:
        if self._untouched and step.out is not None:
            self._scale(self._touch(step.out))
        if not step.reduces or step.into is None:
            return None
        if self._untouched:
            fresh = self._touch(step.into)
            if fresh == [step.into]:
                return self._opening
            self._scale(fresh)
        return self._plain if step.finish is None else self._closing

    def _touch(self, span: Span) -> list[Span]:
        """What of `span` was untouched until now."""
        fresh: list[Span] = []
        left: list[Span] = []
        for start, stop in self._untouched:
            low, high = max(start, span[0]), min(stop, span[1])
            if low >= high:
                left.append((start, stop))
                continue
            fresh.append((low, high))
            left.extend(rest for rest in ((start, low), (high, stop)) if rest[0] < rest[1])
        self._untouched = left
        return fresh

    def _scale(self, spans: list[Span]) -> None:
        for start, stop in spans:
            reduction.scale_before(self._op, self._kind, self._flat[start:stop])
