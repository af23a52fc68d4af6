"""`Gradients`: how many bytes of gradients a step has, how they are compressed, and what codecs would take for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringfort.telemetry.records import Header

Price = Callable[[int, int], dict[str, float]]
"""Takes the bytes of the gradients and the number of ranks. Returns the seconds that each codec would take."""


class Gradients:
    """What is known of the gradients of this process. Pure."""

    def __init__(self) -> None:
        self.price: Price | None = None
        self.codec: str | None = None
        """The last strategy of this step; None if no collective was asked to compress."""
        self._last = 0
        """Bytes that the step before has reduced."""

    def step_done(self, reduced: int, header: Header) -> dict[str, Any] | None:
        """Return what of the header has changed with a step that has reduced so many bytes; None if nothing has.

        Two steps in a row with the same number of bytes are what a step has: others have an evaluation in them.
        """
        changes: dict[str, Any] = {}
        codec, self.codec = self.codec, None
        if codec is not None and (codec := "" if codec == "none" else codec) != header.codec:
            changes["codec"] = codec
        last, self._last = self._last, reduced
        if reduced and reduced == last != header.gradient_bytes:
            changes["gradient_bytes"] = reduced
            if self.price is not None:
                changes["codec_seconds"] = self.price(reduced, header.world_size)
        return changes or None
