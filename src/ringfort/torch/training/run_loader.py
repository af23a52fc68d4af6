"""`RunLoader`: what `TorchRun.loader` returns, which looks like a `DataLoader`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from ringfort.errors import InvalidArgumentError
from ringfort.torch.training.passes import Counted, Passes
from ringfort.training.elastic.dealing import Data, RunEnd

For = Literal["run", "pass"]
"""What one `for` over a loader is."""


class RunLoader:
    """The micro-batches of a run that this machine computes.

    With `per="run"` one `for` is the whole run, and a program that breaks out of it leaves the run. With `per="pass"`
    one `for` is a pass, or the rest of the pass in which the last `for` was left; after the last pass there is nothing.
    """

    def __init__(
        self, run: Counted, batches: Iterator[Any], dataset: Any, data: Data, end: RunEnd, *, per: For = "run"
    ) -> None:
        """`end` is that of the run."""
        if per not in ("run", "pass"):
            raise InvalidArgumentError("per", per, "must be run or pass: what one for loop over the loader is")
        self.dataset = dataset
        self.batch_size = data.microbatch
        """Samples per micro-batch."""
        self._batches = batches
        self._passes = Passes(run, batches) if per == "pass" else None
        self._length = _parts(data, RunEnd(cursor=data.samples) if per == "pass" else end)
        self._has_begun = False

    def __len__(self) -> int:
        """Return the micro-batches of one `for`, of all machines together: so many come if this machine is alone.
        Raise `TypeError` if nobody knows: the steps of the run are planned rounds."""
        if self._length is None:
            raise TypeError("a run of planned rounds that ends after a number of them has no length; pass epochs=")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return self._whole() if self._passes is None else iter(self._passes)

    def _whole(self) -> Iterator[Any]:
        if self._has_begun:
            why = (
                'the first one was the whole run, with all its passes; pass per="pass" to loader() for one pass per for'
            )
            raise InvalidArgumentError("run.loader()", "a second for loop", why)
        self._has_begun = True
        yield from self._batches


def _parts(data: Data, end: RunEnd) -> int | None:
    """Return the micro-batches of a run up to its end; None if that depends on its rounds."""
    if end.step and data.is_planned:
        return None
    per_pass = -(-data.samples // data.batch)
    passes, rest = divmod(end.step or data.steps_to(end.cursor), per_pass)
    full, last = -(-data.batch // data.microbatch), data.samples - (per_pass - 1) * data.batch
    return passes * ((per_pass - 1) * full - (-last // data.microbatch)) + rest * full
