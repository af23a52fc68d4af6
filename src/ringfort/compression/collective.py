"""The all-reduce that compresses, and its reduce-scatter, on any group."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple
from zlib import crc32

import numpy as np

from ringfort.backends.group import Group
from ringfort.collectives import reduction
from ringfort.collectives.all_gather import all_gather
from ringfort.collectives.all_reduce import all_reduce as all_reduce_exactly
from ringfort.collectives.arrays import ArrayView, as_view
from ringfort.collectives.ops import Op, PremulSum, ReduceOp
from ringfort.collectives.plan import Operation
from ringfort.compression import auto, calls, lowrank
from ringfort.compression.calls import Compressed
from ringfort.compression.compressor import Draft, GradientCompressor, Piece, check_floats
from ringfort.compression.exchange import BasisError, Exchange
from ringfort.compression.floats import count_nonfinite, narrow, widen
from ringfort.compression.noise import mix
from ringfort.compression.quantize import codec_of
from ringfort.compression.sparse import TopK, drawn
from ringfort.compression.strategy import CompressionStrategy, Method, QuantizationType
from ringfort.errors import InvalidArgumentError, NonFiniteError, UnsupportedOpError
from ringfort.telemetry.metrics import DistributedMetrics
from ringfort.transport.messages import Envelope
from ringfort.transport.reducer import Array

Compression = CompressionStrategy | GradientCompressor | str
"""What may be said where compression is asked for."""

_RAW: Final = codec_of(QuantizationType.FP32)


def compressor_of(compression: Compression) -> GradientCompressor:
    """A strategy alone, or its name, keeps nothing from call to call."""
    if isinstance(compression, GradientCompressor):
        return compression
    return GradientCompressor(compression, error_feedback=False)


def all_reduce(
    group: Group,
    x: Any,
    op: Op = ReduceOp.SUM,
    *,
    compression: Compression,
    tensors: Sequence[tuple[str, tuple[int, ...]]] | None = None,
    timeout: float | None = None,
    metrics: DistributedMetrics | None = None,
) -> Operation:
    """Every rank's `x` becomes about the sum or mean of all of them, in place, with the same bits at every rank.

    `tensors` are the names and shapes of those that lie in `x`, one behind the other: a `GradientCompressor` knows by
    the name what of a tensor was not sent yet. Raises `NonFiniteError` at every rank if one has elements that are
    infinite or not a number; then nothing has changed.
    """
    compressor = compressor_of(compression)
    if compressor.strategy == CompressionStrategy.NONE and not isinstance(compression, GradientCompressor):
        return all_reduce_exactly(group, x, op, timeout=timeout)
    view = as_view(x, "x", writable=True)
    check_floats(view, "x")
    factor, divisor = _scales(op, view, group.world_size)
    if tensors is None and compressor.error_feedback:
        raise InvalidArgumentError(
            "name",
            None,
            "missing; a GradientCompressor keeps its error feedback by the name of the tensor: pass name='...'",
        )
    pieces = Piece.row([("", view.shape)] if tensors is None else tensors)
    if (pieces[-1].stop if pieces else 0) != view.flat.size:
        raise InvalidArgumentError("tensors", tensors, f"must have the {view.flat.size} elements of the array")
    strategy = compressor.strategy
    call = calls.encode(
        Compressed.ALL_REDUCE,
        strategy,
        kind=view.kind.code,
        count=view.flat.size,
        op=reduction.code_of(op),
        keeps=compressor.error_feedback,
    )
    group.check_timeout(timeout)

    def run() -> Any:
        begun = group.now()
        chosen = strategy
        if group.world_size == 1:
            chosen = CompressionStrategy.NONE
        elif strategy.method is Method.AUTO:
            chosen = auto.choose(group, strategy, [piece.shape for piece in pieces], call, timeout)
        envelope = group.envelope(call, timeout)
        envelope = envelope._replace(deadline=begun + envelope.timeout)  # to measure first counts too
        if chosen.method is Method.NONE:
            return _plain(group, compressor, view, pieces, op, timeout, metrics)
        draft = compressor.draft(view, pieces, factor, group.rank)
        if not draft.keeps:  # nothing else tells one call from the next
            draft.seed = mix(draft.seed, envelope.operation)
        _run(group, envelope, chosen, draft, view, divisor, metrics)
        return view.finish()

    return Operation("all_reduce", view.flat.nbytes, run)


def _plain(
    group: Group,
    compressor: GradientCompressor,
    view: ArrayView,
    pieces: Sequence[Piece],
    op: Op,
    timeout: float | None,
    metrics: DistributedMetrics | None,
) -> Any:
    """Without compression, but with what was kept while there was some, and as strict with infinities and NaNs: what a
    program is told of them must not depend on what its links are worth."""
    is_odd = count_nonfinite(widen(view, 1.0, copy=False) if view.kind.name == "bfloat16" else view.flat) > 0
    draft = None
    if is_odd or any(compressor.residual(piece.name) is not None for piece in pieces):
        factor, _ = _scales(op, view, group.world_size)
        draft = compressor.draft(view, pieces, factor, group.rank)
    refused = np.array([0 if draft is None else draft.refused])
    counts = all_gather(group, refused, timeout=timeout).run().reshape(-1).tolist()
    if any(counts):
        raise NonFiniteError(_named(pieces), {rank: count for rank, count in enumerate(counts) if count})
    if draft is not None:
        narrow(draft.work, view)
        op = ReduceOp.premul_sum(1) if isinstance(op, PremulSum) else op  # the factor is in already
    result = all_reduce_exactly(group, view, op, timeout=timeout).run()
    for piece in pieces:
        compressor.forget(piece.name)
    if metrics is not None:
        n = group.world_size
        moved = 2 * (n - 1) * view.flat.nbytes // n
        metrics.record_compression("none", nbytes=moved, sent=moved, nonfinite=0 if draft is None else draft.nonfinite)
    return result


def _named(pieces: Sequence[Piece]) -> str:
    return ", ".join(piece.name for piece in pieces)


def _scales(op: Op, view: ArrayView, world_size: int) -> tuple[float, int]:
    """What each rank's elements are multiplied by before, and the sum is divided by afterwards."""
    if isinstance(op, PremulSum):
        reduction.reducer(op, view.kind)  # raises for a factor that cannot be used
        return float(op.factor), 1
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        reduction.reducer(op, view.kind)
        raise UnsupportedOpError(op.name, f"compressed {view.kind.name}", "use SUM, MEAN or PREMUL_SUM")
    return 1.0, world_size if op is ReduceOp.MEAN else 1


class _Step(NamedTuple):
    """What each way of compressing needs; it returns the factors that it wants to go on from, if it has any."""

    exchange: Exchange
    strategy: CompressionStrategy
    draft: Draft
    out: Array
    divisor: int
    lot: int
    """The same number at every rank, another one in every call."""


def _run(
    group: Group,
    envelope: Envelope,
    strategy: CompressionStrategy,
    draft: Draft,
    view: ArrayView,
    divisor: int,
    metrics: DistributedMetrics | None,
) -> None:
    exchange = Exchange(group, envelope, _named(draft.pieces), draft.refused)
    in_place = view.flat.dtype == np.float32
    out = view.flat if in_place else np.empty(view.flat.size, np.float32)
    way = {Method.TOP_K: _top_k, Method.RANDOM_K: _random_k, Method.POWER_SGD: _power_sgd}.get(
        strategy.method, _quantized
    )
    factors = way(_Step(exchange, strategy, draft, out, divisor, envelope.operation))
    if not in_place:
        narrow(out, view)
    if draft.keeps or factors:
        draft.commit(factors)
    if metrics is not None:
        n = group.world_size
        metrics.record_compression(
            str(strategy),
            nbytes=2 * (n - 1) * view.flat.nbytes // n,
            sent=exchange.sent,
            codec_seconds=exchange.codec_seconds,
            residual=float(np.sqrt(np.dot(draft.work, draft.work))) if draft.keeps else 0.0,
            nonfinite=draft.nonfinite,
        )


def _quantized(step: _Step) -> dict[str, Array]:
    exchange, strategy, draft, out, divisor, _ = step
    codec = codec_of(strategy.values)
    exchange.reduce(draft.work, out, codec, strategy, draft.seed, keep_error=draft.keeps, divisor=divisor)
    return {}


def _top_k(step: _Step) -> dict[str, Array]:
    exchange, strategy, draft, out, divisor, _ = step
    k = strategy.kept(out.size)
    codec = TopK(k, codec_of(strategy.values))
    messages = exchange.gather(
        codec.nbytes(out.size), codec, strategy, draft.work, draft.seed, keep_error=draft.keeps, rows=k
    )
    start = time.perf_counter()
    out.fill(0)
    for message in messages:  # in the order of the ranks, so that all add alike
        codec.decode(message, out, add=True)
    if divisor != 1:
        out /= np.float32(divisor)
    exchange.codec_seconds += time.perf_counter() - start
    return {}


def _random_k(step: _Step) -> dict[str, Array]:
    """All ranks draw the same places, by the number of the operation; so only values travel, and they can be added."""
    exchange, strategy, draft, out, divisor, lot = step
    places, lengths = drawn(out.size, strategy.kept(out.size), mix(lot))
    values = draft.work[places]
    if not draft.keeps:
        values *= lengths.astype(np.float32)
    added = np.empty_like(values)
    codec = codec_of(strategy.values)
    exchange.reduce(values, added, codec, strategy, draft.seed, keep_error=draft.keeps, divisor=divisor, basis=lot)
    if draft.keeps:
        draft.work[places] = values
    out.fill(0)
    out[places] = added
    return {}


def _power_sgd(step: _Step) -> dict[str, Array]:
    """Two all-reduces of thin matrices, and in the first also the tensors that are no matrices."""
    exchange, strategy, draft, out, divisor, _ = step
    matrices: dict[str, tuple[Array, Array]] = {}
    vectors: list[Piece] = []
    for piece in draft.pieces:
        shape = lowrank.matrix_shape(piece.shape, strategy.rank)
        if shape is None:
            vectors.append(piece)
        else:
            matrices[piece.name] = draft.work[piece.start : piece.stop].reshape(shape), out[piece.start : piece.stop]
    firsts = {name: lowrank.first_factor(strategy.rank, m.shape[1], name) for name, (m, _) in matrices.items()}
    known = {piece.name: draft.compressor.factor(piece, strategy.rank) for piece in draft.pieces}
    factors = {name: first if (last := known[name]) is None else last for name, first in firsts.items()}
    try:
        thin, plain = _first_factors(exchange, strategy, matrices, vectors, factors, draft)
    except BasisError:
        # A rank that has come later, or has loaded another state: all begin anew.
        thin, plain = _first_factors(exchange, strategy, matrices, vectors, firsts, draft)
    p = {name: lowrank.orthonormal(factor) for name, factor in thin.items()}
    q = {name: p[name] @ matrix for name, (matrix, _) in matrices.items()}
    added = _add_up(exchange, strategy, list(q.values()), draft)
    for (name, (matrix, result)), total in zip(matrices.items(), added, strict=True):
        if draft.keeps:
            lowrank.product(p[name], q[name], matrix, subtract=True)
        lowrank.product(p[name], total, result.reshape(matrix.shape))
    for piece, total in zip(vectors, plain, strict=True):
        out[piece.start : piece.stop] = total
        if draft.keeps:
            draft.work[piece.start : piece.stop] = 0
    if divisor != 1:
        out /= np.float32(divisor)
    return {name: lowrank.unit_rows(total) for name, total in zip(matrices, added, strict=True)}


def _first_factors(
    exchange: Exchange,
    strategy: CompressionStrategy,
    matrices: dict[str, tuple[Array, Array]],
    vectors: list[Piece],
    factors: dict[str, Array],
    draft: Draft,
) -> tuple[dict[str, Array], list[Array]]:
    thin = [factors[name] @ matrix.T for name, (matrix, _) in matrices.items()]
    plain = [draft.work[piece.start : piece.stop] for piece in vectors]
    basis = 0
    for factor in factors.values():
        basis = crc32(factor.tobytes(), basis)
    added = _add_up(exchange, strategy, [*thin, *plain], draft, basis)
    return dict(zip(matrices, added[: len(thin)], strict=True)), added[len(thin) :]


def _add_up(
    exchange: Exchange, strategy: CompressionStrategy, arrays: Sequence[Array], draft: Draft, basis: int = 0
) -> list[Array]:
    """The sums over all ranks of some small arrays, in one go and exact but for rounding."""
    packed = np.concatenate([array.reshape(-1) for array in arrays]) if arrays else np.empty(0, np.float32)
    exchange.reduce(packed, packed, _RAW, strategy, draft.seed, keep_error=False, basis=basis)
    sums: list[Array] = []
    start = 0
    for array in arrays:
        sums.append(packed[start : start + array.size].reshape(array.shape))
        start += array.size
    return sums


def reduce_scatter(
    group: Group,
    x: Any,
    into: Any,
    op: Op = ReduceOp.SUM,
    *,
    compression: Compression,
    name: str | None = None,
    timeout: float | None = None,
    metrics: DistributedMetrics | None = None,
) -> Operation:
    """`x` has a part for each rank along its first axis; `into` becomes about the sum or mean of this rank's parts.

    For strategies that quantize, whose parts do not depend on each other. `x` is kept.
    """
    compressor = compressor_of(compression)
    strategy = compressor.strategy
    if strategy.method not in (Method.NONE, Method.QUANTIZE):
        raise InvalidArgumentError(
            "compression", str(strategy), "a reduce-scatter can only quantize: fp16, bf16, int8, int4, onebit"
        )
    view, place = as_view(x, "x"), as_view(into, "into", writable=True)
    check_floats(view, "x")
    check_floats(place, "into")
    n = group.world_size
    if view.flat.size != n * place.flat.size:
        why = f"must have {n} times the {place.flat.size} elements of the result, one part per rank"
        raise InvalidArgumentError("x", f"array of {view.flat.size} elements", why)
    factor, divisor = _scales(op, view, n)
    pieces = Piece.row([(name or "", view.shape)])
    code = reduction.code_of(op)
    call = calls.encode(
        Compressed.REDUCE_SCATTER, strategy, kind=view.kind.code, count=view.flat.size, op=code,
        keeps=compressor.error_feedback,
    )  # fmt: skip
    group.check_timeout(timeout)

    def run() -> Any:
        envelope = group.envelope(call, timeout)
        draft = compressor.draft(view, pieces, factor, group.rank)
        if n == 1 and draft.refused:
            raise NonFiniteError(name or "", {0: draft.refused})
        exchange = Exchange(group, envelope, name or "", draft.refused)
        out = np.empty(place.flat.size, np.float32)
        codec = codec_of(strategy.values)
        exchange.reduce_part(draft.work, out, codec, strategy, draft.seed, keep_error=draft.keeps, divisor=divisor)
        narrow(out, place)
        draft.commit()
        if metrics is not None:
            metrics.record_compression(
                str(strategy),
                nbytes=(n - 1) * view.flat.nbytes // n,
                sent=exchange.sent,
                codec_seconds=exchange.codec_seconds,
                residual=float(np.sqrt(np.dot(draft.work, draft.work))) if draft.keeps else 0.0,
                nonfinite=draft.nonfinite,
            )
        return place.finish()

    return Operation("reduce_scatter", view.flat.nbytes, run)
