"""`Transfers`: each collective of a group as a `Transfer` of tensors on a GPU through the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from ringfort.collectives import landing, movements, reduction, reductions, signature
from ringfort.collectives.operation import Operation
from ringfort.collectives.ops import Op
from ringfort.collectives.reduction import ELEMENT_TYPES, element_type_named
from ringfort.collectives.signature import Collective
from ringfort.context import DistributedContext
from ringfort.errors import InvalidArgumentError
from ringfort.torch.names import torch
from ringfort.torch.staging import Share, Transfer
from ringfort.torch.tensors import to_array

_KNOWN: Final = frozenset(kind.name for kind in ELEMENT_TYPES)


class Transfers:
    """The collectives of one group as transfers. Each takes tensors of one device; raises `InvalidArgumentError`."""

    def __init__(self, context: DistributedContext) -> None:
        self._backend = context.backend

    def all_reduce(self, tensor: Any, op: Op) -> Transfer:
        """In place."""
        flats, backend = _Flats([tensor], written=[tensor]), self._backend
        share = [Share(flats[tensor], 0)]

        def make(parts: list[Any], seconds: float) -> Operation:
            return reductions.all_reduce(backend, to_array(parts[0]), op, timeout=seconds)

        return self._transfer(Collective.ALL_REDUCE, 1, share, share, make, flats, op=op)

    def reduce(self, tensor: Any, root: int, op: Op) -> Transfer:
        """In place at the root."""
        is_root = self._backend.rank == root
        flats = _Flats([tensor], written=[tensor] if is_root else [])
        share = [Share(flats[tensor], 0)]
        return self._transfer(
            Collective.REDUCE,
            1,
            share,
            share if is_root else [],
            lambda parts, seconds: reductions.reduce(self._backend, to_array(parts[0]), root, op, timeout=seconds),
            flats,
            op=op,
            root=root,
        )

    def broadcast(self, tensor: Any, root: int) -> Transfer:
        """In place."""
        is_root = self._backend.rank == root
        flats = _Flats([tensor], written=[] if is_root else [tensor], moved=True)
        share = [Share(flats[tensor], 0)]
        return self._transfer(
            Collective.BROADCAST,
            1,
            share if is_root else [],
            [] if is_root else share,
            lambda parts, seconds: movements.broadcast(self._backend, to_array(parts[0]), root, timeout=seconds),
            flats,
            root=root,
            result=[tensor],
        )

    def all_gather(self, outputs: Sequence[Any], source: Any) -> Transfer:
        """`outputs[r]` becomes rank r's `source`."""
        rank = self._backend.rank
        self._check_parts(outputs, source, "output")
        flats = _Flats([source, *outputs], written=outputs, moved=True)
        return self._transfer(
            Collective.ALL_GATHER,
            self._backend.world_size,
            [Share(flats[source], rank)],
            [Share(flats[output], part) for part, output in enumerate(outputs)],
            lambda parts, seconds: landing.all_gather(
                self._backend, to_array(parts[rank]), [to_array(part) for part in parts], timeout=seconds
            ),
            flats,
        )

    def gather(self, outputs: Sequence[Any] | None, source: Any, root: int) -> Transfer:
        """At the root `outputs[r]` becomes rank r's `source`; the others pass None."""
        rank = self._backend.rank
        places = [] if outputs is None else list(outputs)
        if outputs is not None:
            self._check_parts(places, source, "output")
        flats = _Flats([source, *places], written=places, moved=True)

        def make(parts: list[Any], seconds: float) -> Operation:
            into = None if outputs is None else [to_array(part) for part in parts]
            return landing.gather(self._backend, to_array(parts[rank]), into, root, timeout=seconds)

        return self._transfer(
            Collective.GATHER,
            self._backend.world_size,
            [Share(flats[source], rank)],
            [Share(flats[output], part) for part, output in enumerate(places)],
            make,
            flats,
            root=root,
        )

    def scatter(self, place: Any, inputs: Sequence[Any] | None, root: int) -> Transfer:
        """Every rank's `place` becomes its part of the root's `inputs`; the others pass None."""
        rank = self._backend.rank
        sources = [] if inputs is None else list(inputs)
        if inputs is not None:
            self._check_parts(sources, place, "input")
        flats = _Flats([*sources, place], written=[place], moved=True)

        def make(parts: list[Any], seconds: float) -> Operation:
            given = None if inputs is None else [to_array(part) for part in parts]
            return landing.scatter(self._backend, given, to_array(parts[rank]), root, timeout=seconds)

        return self._transfer(
            Collective.SCATTER,
            self._backend.world_size,
            [Share(flats[source], part) for part, source in enumerate(sources)],
            [Share(flats[place], rank)],
            make,
            flats,
            root=root,
        )

    def reduce_scatter(self, place: Any, inputs: Sequence[Any], op: Op) -> Transfer:
        """`place` becomes the reduction of all ranks' `inputs[rank]`."""
        rank = self._backend.rank
        self._check_parts(inputs, place, "input")
        flats = _Flats([*inputs, place], written=[place])

        def make(parts: list[Any], seconds: float) -> Operation:
            arrays = [to_array(part) for part in parts]
            return landing.reduce_scatter(self._backend, arrays, arrays[rank], op, timeout=seconds)

        return self._transfer(
            Collective.REDUCE_SCATTER,
            self._backend.world_size,
            [Share(flats[source], part) for part, source in enumerate(inputs)],
            [Share(flats[place], rank)],
            make,
            flats,
            op=op,
        )

    def all_to_all(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> Transfer:
        """`outputs[r]` becomes rank r's `inputs[rank]`. Parts may have any sizes, so no rank knows how many chunks
        another would make of its own: it goes in one."""
        n = self._backend.world_size
        for name, tensors in (("input", inputs), ("output", outputs)):
            if len(tensors) != n:
                raise InvalidArgumentError(name, f"list of {len(tensors)}", f"must have one for each of {n} ranks")
        flats = _Flats([*inputs, *outputs], written=outputs, moved=True)

        def make(parts: list[Any], seconds: float) -> Operation:
            arrays = [to_array(part) for part in parts]
            return landing.all_to_all(self._backend, arrays[:n], arrays[n:], timeout=seconds)

        transfer = self._transfer(
            Collective.ALL_TO_ALL_LIST,
            2 * n,
            [Share(flats[source], part) for part, source in enumerate(inputs)],
            [Share(flats[output], n + part) for part, output in enumerate(outputs)],
            make,
            flats,
        )
        transfer.sizes = [flats[tensor].numel() for tensor in (*inputs, *outputs)]
        return transfer

    def _check_parts(self, tensors: Sequence[Any], like: Any, name: str) -> None:
        """One for each rank, of the element type, size and device of `like`."""
        if len(tensors) != self._backend.world_size:
            why = f"must have one tensor for each of {self._backend.world_size} ranks"
            raise InvalidArgumentError(name, f"list of {len(tensors)}", why)
        for index, tensor in enumerate(tensors):
            _check_like(tensor, like, f"{name}[{index}]")

    def _transfer(
        self,
        what: Collective,
        shares: int,
        reads: Sequence[Share],
        writes: Sequence[Share],
        make: Callable[[list[Any], float], Operation],
        flats: _Flats,
        *,
        op: Op | None = None,
        root: int = 0,
        result: Sequence[Any] | None = None,
    ) -> Transfer:
        kind = element_type_named(str((*reads, *writes)[0].flat.dtype).removeprefix("torch.")).code
        code = 0 if op is None else reduction.code_of(op)

        def agree(count: int, seconds: float) -> None:
            call = signature.encode(what, kind=kind, count=count, op=code, root=root)
            self._backend.meet(self._backend.envelope(call, seconds))

        name = what.name.lower()
        written = flats.written if result is None else result
        return Transfer(name, shares, reads, writes, make, agree, written, flats.copies)


class _Flats:
    """Tensors as flat, contiguous ones. Those of an element type that is only `moved` and not known are bytes."""

    def __init__(self, tensors: Sequence[Any], *, written: Sequence[Any], moved: bool = False) -> None:
        self.written = list(written)
        self._flats = {id(tensor): flat(tensor, moved=moved) for tensor in tensors}
        self.copies = [
            (tensor.detach(), self[tensor].view(tensor.dtype).view(tensor.shape))
            for tensor in written
            if not is_plain(tensor)
        ]
        """Of what is written to and is not contiguous: where its copy goes in the end."""

    def __getitem__(self, tensor: Any) -> Any:
        return self._flats[id(tensor)]


def flat(tensor: Any, *, moved: bool) -> Any:
    """The elements of `tensor` in one piece: its own memory where that is possible."""
    if tensor.layout is not torch.strided:
        raise InvalidArgumentError("tensor", f"tensor of {tensor.layout}", "must be dense; pass tensor.to_dense()")
    plain = tensor.detach() if is_plain(tensor) else tensor.detach().resolve_conj().resolve_neg().contiguous()
    is_known = str(tensor.dtype).removeprefix("torch.") in _KNOWN
    return plain.view(-1) if is_known or not moved else plain.view(-1).view(torch.uint8)


def is_plain(tensor: Any) -> bool:
    """Whether the memory of `tensor` is its elements, one after the other."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _check_like(tensor: Any, like: Any, name: str) -> None:
    mine, other = (f"{one.dtype} of {one.numel()} elements on {one.device}" for one in (tensor, like))
    if mine != other:
        raise InvalidArgumentError(name, mine, f"must match the other tensors, {other}")
