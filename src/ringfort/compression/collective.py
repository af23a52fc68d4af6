"""The all-reduce that compresses, and its reduce-scatter, on any group."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final
from zlib import crc32

import numpy as np

from ringfort.backends.group import Group
from ringfort.collectives import reduction
from ringfort.collectives.all_gather import all_gather
from ringfort.collectives.all_reduce import all_reduce as all_reduce_exactly
from ringfort.collectives.arrays import ArrayView, as_view
from ringfort.collectives.ops import Op, PremulSum, ReduceOp
from ringfort.collectives.plan import Operation, unplanned
from ringfort.compression import auto, calls, lowrank
from ringfort.compression.calls import Compressed
from ringfort.compression.chunked import ChunkedTopK
from ringfort.compression.codec import mix
from ringfort.compression.compressor import GradientCompressor, Piece, check_floats
from ringfort.compression.exchange import BasisError, Exchange
from ringfort.compression.floats import count_nonfinite, narrow, widen
from ringfort.compression.quantize import codec_of
from ringfort.compression.sparse import TopK, drawn
from ringfort.compression.strategy import CompressionStrategy, Method, QuantizationType
from ringfort.errors import InvalidArgumentError, NonFiniteError, UnsupportedOpError
from ringfort.telemetry.metrics import DistributedMetrics
from ringfort.telemetry.trace import own_trace
from ringfort.transport.messages import Envelope
from ringfort.transport.reducer import Array

Compression = CompressionStrategy | GradientCompressor | str
"""What may be said where compression is asked for."""

_RAW: Final = codec_of(QuantizationType.FP32)


def compressor_of(compression: Compression, *, error_feedback: bool = False) -> GradientCompressor:
    """A strategy alone, or its name, keeps nothing from call to call."""
    if isinstance(compression, GradientCompressor):
        return compression
    return GradientCompressor(compression, error_feedback=error_feedback)


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
        why = "missing; a GradientCompressor keeps its error feedback by the name of the tensor: pass name='...'"
        raise InvalidArgumentError("name", None, why)
    pieces = Piece.row([("", view.shape)] if tensors is None else tensors)
    if (pieces[-1].stop if pieces else 0) != view.flat.size:
        raise InvalidArgumentError("tensors", tensors, f"must have the {view.flat.size} elements of the array")
    strategy = compressor.strategy
    call = _call(Compressed.ALL_REDUCE, compressor, view, op)
    group.check_timeout(timeout)

    def run() -> Any:
        begun, start = group.now(), time.perf_counter()
        chosen = strategy
        if group.world_size == 1:
            chosen = CompressionStrategy.NONE
        elif strategy.method is Method.AUTO:
            chosen = auto.choose(group, strategy, [piece.shape for piece in pieces], call, timeout).strategy
        envelope = group.envelope(call, timeout)
        envelope = envelope._replace(deadline=begun + envelope.timeout)  # to measure first counts too
        if chosen.method is Method.NONE:
            return _plain(group, compressor, view, pieces, op, timeout, metrics)
        draft = compressor.draft(view, pieces, factor, group.rank)
        if not draft.keeps:  # nothing else tells one call from the next
            draft.seed = mix(draft.seed, envelope.operation)
        out = view.flat if view.flat.dtype == np.float32 else np.empty(view.flat.size, np.float32)
        exchange = Exchange(group, envelope, chosen, draft)
        factors = _WAYS[chosen.method](exchange, out, divisor)
        narrow(out, view)
        compressor.keep(draft, factors)
        exchange.report(metrics, exchange.ring_bytes(view.flat.nbytes))
        own_trace().compressed(str(chosen), exchange.codec_seconds, time.perf_counter() - start)
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
    found = {rank: count for rank, count in enumerate(counts) if count}
    if found:
        raise NonFiniteError(", ".join(piece.name for piece in pieces), found)
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
    own_trace().compressed("none", 0.0, 0.0)
    return result


def _call(what: Compressed, compressor: GradientCompressor, view: ArrayView, op: Op) -> bytes:
    code, keeps = reduction.code_of(op), compressor.error_feedback
    return calls.encode(what, compressor.strategy, kind=view.kind.code, count=view.flat.size, op=code, keeps=keeps)


def _scales(op: Op, view: ArrayView, world_size: int) -> tuple[float, int]:
    """What each rank's elements are multiplied by before, and the sum is divided by afterwards."""
    if isinstance(op, PremulSum):
        reduction.reducer(op, view.kind)  # raises for a factor that cannot be used
        return float(op.factor), 1
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        reduction.reducer(op, view.kind)
        raise UnsupportedOpError(op.name, f"compressed {view.kind.name}", "use SUM, MEAN or PREMUL_SUM")
    return 1.0, world_size if op is ReduceOp.MEAN else 1


# --- the ways to compress ---------------------------------------------------------------------------------------------
#
# In each, `out` becomes the sum of all ranks' drafts, divided by `divisor`. The result is the factor that PowerSGD
# continues from, of each tensor.


def _quantized(exchange: Exchange, out: Array, divisor: int) -> dict[str, Array]:
    draft, codec = exchange.draft, codec_of(exchange.strategy.values)
    exchange.reduce(draft.work, out, codec, keep_error=draft.keeps, divisor=divisor)
    return {}


def _top_k(exchange: Exchange, out: Array, divisor: int) -> dict[str, Array]:
    strategy = exchange.strategy
    exchange.gather(out, lambda count: TopK(strategy.kept(count), codec_of(strategy.values)), divisor)
    return {}


def _sparse(exchange: Exchange, out: Array, divisor: int) -> dict[str, Array]:
    exchange.gather(out, lambda _: ChunkedTopK(), divisor)
    return {}


def _random_k(exchange: Exchange, out: Array, divisor: int) -> dict[str, Array]:
    """All ranks draw the same places, by the number of the operation; so only values travel, and are added."""
    draft, lot = exchange.draft, exchange.envelope.operation
    places, lengths = drawn(out.size, exchange.strategy.kept(out.size), mix(lot))
    values = draft.work[places]
    if not draft.keeps:
        values *= lengths.astype(np.float32)
    added, codec = np.empty_like(values), codec_of(exchange.strategy.values)
    exchange.reduce(values, added, codec, keep_error=draft.keeps, divisor=divisor, basis=lot)
    if draft.keeps:
        draft.work[places] = values
    out.fill(0)
    out[places] = added
    return {}


def _power_sgd(exchange: Exchange, out: Array, divisor: int) -> dict[str, Array]:
    """Two all-reduces of thin matrices, and in the first also the tensors that are no matrices."""
    draft, rank = exchange.draft, exchange.strategy.rank
    matrices: dict[str, Array] = {}
    results: dict[str, Array] = {}
    vectors: list[slice] = []
    for name, tensor_shape, start, stop in draft.pieces:
        shape = lowrank.matrix_shape(tensor_shape, rank)
        if shape is None:
            vectors.append(slice(start, stop))
        else:
            matrices[name], results[name] = draft.work[start:stop].reshape(shape), out[start:stop].reshape(shape)
    firsts = {name: lowrank.first_factor(rank, m.shape[1], name) for name, m in matrices.items()}
    known = {piece.name: draft.compressor.factor(piece, rank) for piece in draft.pieces}
    factors = {name: first if (last := known[name]) is None else last for name, first in firsts.items()}
    plain = [draft.work[span] for span in vectors]
    try:
        added = _first_factors(exchange, matrices, factors, plain)
    except BasisError:
        # A rank that has come later, or has loaded another state: all begin anew.
        added = _first_factors(exchange, matrices, firsts, plain)
    p = {name: lowrank.orthonormal(factor) for name, factor in zip(matrices, added, strict=False)}
    q = {name: p[name] @ matrix for name, matrix in matrices.items()}
    sums = dict(zip(matrices, _add_up(exchange, list(q.values())), strict=True))
    for name, matrix in matrices.items():
        if draft.keeps:
            lowrank.product(p[name], q[name], matrix, np.subtract)
        lowrank.product(p[name], sums[name], results[name])
    for span, total in zip(vectors, added[len(matrices) :], strict=True):
        out[span] = total
        if draft.keeps:
            draft.work[span] = 0
    if divisor != 1:
        out /= np.float32(divisor)
    return {name: lowrank.unit_rows(total) for name, total in sums.items()}


def _first_factors(
    exchange: Exchange, matrices: dict[str, Array], factors: dict[str, Array], plain: Sequence[Array]
) -> list[Array]:
    """The sums of the matrices times their factors, and of the `plain` arrays."""
    basis = 0
    for factor in factors.values():
        basis = crc32(factor.tobytes(), basis)
    return _add_up(exchange, [*(factors[name] @ matrix.T for name, matrix in matrices.items()), *plain], basis)


def _add_up(exchange: Exchange, arrays: Sequence[Array], basis: int = 0) -> list[Array]:
    """The sums over all ranks of some small arrays, in one go and exact but for rounding."""
    packed = np.concatenate([array.reshape(-1) for array in arrays]) if arrays else np.empty(0, np.float32)
    exchange.reduce(packed, packed, _RAW, keep_error=False, basis=basis)
    edges = np.cumsum([array.size for array in arrays])[:-1]
    return [total.reshape(array.shape) for total, array in zip(np.split(packed, edges), arrays, strict=False)]


_WAYS: Final = {
    Method.QUANTIZE: _quantized,
    Method.TOP_K: _top_k,
    Method.RANDOM_K: _random_k,
    Method.POWER_SGD: _power_sgd,
    Method.SPARSE: _sparse,
}


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
        why = "a reduce-scatter can only quantize: fp16, bf16, int8, int4, onebit"
        raise InvalidArgumentError("compression", str(strategy), why)
    view, place = as_view(x, "x"), as_view(into, "into", writable=True)
    check_floats(view, "x")
    check_floats(place, "into")
    n = group.world_size
    if view.flat.size != n * place.flat.size:
        why = f"must have {n} times the {place.flat.size} elements of the result, one part per rank"
        raise InvalidArgumentError("x", f"array of {view.flat.size} elements", why)
    factor, divisor = _scales(op, view, n)
    pieces = Piece.row([(name or "", view.shape)])
    call = _call(Compressed.REDUCE_SCATTER, compressor, view, op)

    def run(envelope: Envelope) -> Any:
        start = time.perf_counter()
        draft = compressor.draft(view, pieces, factor, group.rank)
        exchange = Exchange(group, envelope, strategy, draft)
        out = np.empty(place.flat.size, np.float32)
        exchange.reduce_part(out, codec_of(strategy.values), divisor)
        narrow(out, place)
        compressor.keep(draft, {})
        exchange.report(metrics, exchange.ring_bytes(view.flat.nbytes) // 2)  # half of a ring's all-reduce
        own_trace().compressed(str(strategy), exchange.codec_seconds, time.perf_counter() - start)
        return place.finish()

    return unplanned(group, "reduce_scatter", view.flat.nbytes, call, timeout, run)
