"""`ShardedState`: the state of a model that is sharded over the local ranks of a machine.

An image has whole tensors: it is that of the unsharded model. The local ranks write it together into shared memory, and
each takes its shards from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np

from ringfort.collectives.arrays import ArrayView, as_view
from ringfort.collectives.reduction import element_type_named
from ringfort.errors import InvalidArgumentError
from ringfort.torch.names import torch
from ringfort.torch.training.local_link import Leader, Link
from ringfort.torch.training.local_orders import GatherState, LoadState
from ringfort.torch.training.model_state import ModelState
from ringfort.torch.training.shards import is_owner, is_sharded, local_part, place_of, sharded_like, whole_in
from ringfort.training.elastic.sample_order import Array
from ringfort.training.elastic.state_tree import Entry, Image, Manifest, Plain, Slot
from ringfort.transport.segment import Segment


class ShardedState(ModelState):
    """What all local ranks of a machine have together. Local rank 0 is asked, and the others help."""

    is_copied_between = False  # the other local ranks compute then, and take no orders

    def __init__(self, link: Link, *parts: Any) -> None:
        self._link = link
        super().__init__(*parts)

    # --- at local rank 0 ----------------------------------------------------------------------------------------------

    def image(self) -> Image:
        """Copy the state."""
        assert isinstance(self._link, Leader)
        manifest = self.manifest()
        segment = Segment.create(manifest.nbytes)
        self._link.tell(GatherState(segment.offer, manifest.nbytes, _digest(manifest)), segment)
        data = _array(segment)
        self._write(manifest, data)
        self._link.wait()
        return Image(manifest, data)

    def leaves(self) -> Iterator[tuple[str, Array | Plain]]:
        """Yield each leaf with its path."""
        image = self.image()
        for entry in image.manifest.entries:
            yield entry.path, image.data[entry.place] if entry.kind else entry.plain()

    def load(self, image: Image) -> None:
        """Make the state that of an image, at all local ranks."""
        if isinstance(self._link, Leader) and self._link.size > 1:
            why = self.misfit(image.manifest)
            if not why:  # else the error below
                segment = Segment.create(image.data.size)
                _array(segment)[...] = image.data
                self._link.tell(LoadState(image.manifest, segment.offer, image.data.size), segment)
        super().load(image)
        if isinstance(self._link, Leader):
            self._link.wait()

    # --- at the others ------------------------------------------------------------------------------------------------

    def contribute(self, order: GatherState) -> None:
        """Write this rank's shards into the image of local rank 0."""
        manifest = self.manifest()
        if _digest(manifest) != order.digest:
            why = "has other leaves than that of local rank 0; all local ranks must run the same program"
            raise InvalidArgumentError("state", f"that of local rank {self._link.rank}", why)
        self._write(manifest, self._opened(order.offer, order.size))

    def follow(self, order: LoadState) -> None:
        """Take this rank's shards from the image of local rank 0."""
        self.load(Image(order.manifest, self._opened(order.offer, order.size)))

    def _opened(self, offer: Any, size: int) -> Array:
        return _array(Segment.open(offer, size))

    # --- leaves -------------------------------------------------------------------------------------------------------

    def _write(self, manifest: Manifest, data: Array) -> None:
        """Write this rank's shards into an image; local rank 0 also writes what is not sharded."""
        for entry, slot in zip(manifest.entries, self._slots(self._root()), strict=True):
            if is_sharded(slot.child):
                if is_owner(slot.child) and entry.nbytes:
                    whole = whole_in(data[entry.place], entry.shape, entry.kind)
                    whole[place_of(slot.child)].copy_(local_part(slot.child))
            elif entry.kind and isinstance(self._link, Leader):
                leaf = self._leaf(slot)
                assert isinstance(leaf, ArrayView)
                data[entry.place] = leaf.flat.view(np.uint8)

    def _leaf(self, slot: Slot, *, needs_data: bool = True) -> ArrayView | Plain:
        tensor = slot.child
        if not is_sharded(tensor):
            return super()._leaf(slot, needs_data=needs_data)
        if not needs_data:
            kind = element_type_named(str(tensor.dtype).removeprefix("torch."))
            nothing = np.broadcast_to(np.zeros(1, kind.storage), tensor.numel())
            return ArrayView(nothing, kind, tuple(tensor.shape), finish=lambda: tensor)
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        view = as_view(whole, slot.path)

        def finish() -> Any:
            local_part(tensor).copy_(whole[place_of(tensor)])
            return tensor

        return ArrayView(view.flat, view.kind, view.shape, finish=finish)

    def _made(self, entry: Entry) -> Any:
        """Return a new leaf. What an optimizer has created for a parameter is sharded like that."""
        parameter = self._optimized.get(entry.path.rpartition("[")[0])
        if parameter is None or entry.shape != tuple(parameter.shape):
            return super()._made(entry)
        return sharded_like(parameter, torch.empty_like(local_part(parameter), dtype=getattr(torch, entry.kind)))

    @cached_property
    def _optimized(self) -> dict[str, Any]:
        """The parameter to which each part of the optimizer's state belongs, by its path."""
        return {
            f"state['optimizer']['state'][{name!r}]": parameter
            for name, parameter in self._by_name.items()
            if is_sharded(parameter)
        }


def _array(segment: Segment) -> Array:
    """Return the memory of a segment. It lives as long as the array."""
    return np.frombuffer(segment.memory, np.uint8)


def _digest(manifest: Manifest) -> bytes:
    """Return a digest of what leaves there are and where."""
    text = repr([(one.path, one.kind, one.shape, one.offset) for one in manifest.entries])
    return blake2b(text.encode(), digest_size=16).digest()
