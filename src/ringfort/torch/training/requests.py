"""What this machine was dealt, as requests to a loader: of a data set with indices, or of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ringfort.torch.training.part_loader import PartLoader
from ringfort.torch.training.prefetch_plan import Request
from ringfort.torch.training.share import Share
from ringfort.torch.training.stream_loader import StreamLoader, StreamRequest
from ringfort.training.elastic.dealing import Data, Span
from ringfort.training.elastic.participant import Participant
from ringfort.training.elastic.sample_order import random_key
from ringfort.training.elastic.step import Turn


class IndexedBatches:
    """The batches of a data set whose samples have indices."""

    def __init__(self, dataset: Any, data: Data, share: Share, **options: Any) -> None:
        self._data = data
        self._share = share
        self._run: Participant | None = None
        self._loader = PartLoader(dataset, self._upcoming, **options)

    def get(self, run: Participant, turn: Turn) -> Any:
        """Return the batch of a micro-batch."""
        self._run = run
        return self._loader.get(self._request(turn.compute.step, turn.compute.part, turn.compute.span))

    def close(self) -> None:
        """End the workers."""
        self._loader.close()

    def _upcoming(self) -> Iterator[Request]:
        run = self._run
        assert run is not None
        for mark, span, parts in run.replica.deals:
            for part in parts:
                if mark.step > run.replica.mark.step or part not in run.replica.covered:
                    yield self._request(mark.step + 1, part, span)

    def _request(self, step: int, part: int, span: Span) -> Request:
        data = self._data
        indices = tuple(data.part(span, part).tolist())
        mine = indices[self._share.loaded(len(indices))]
        return Request(step, part, mine, self._share.key(random_key(data.seed, step, part)))


class StreamBatches:
    """The batches of a stream: places in its order, which all members read."""

    def __init__(self, dataset: Any, data: Data, share: Share, **options: Any) -> None:
        self._data = data
        self._share = share
        self._loader = StreamLoader(dataset, seed=data.seed, **options)

    def get(self, run: Participant, turn: Turn) -> Any:
        """Return the batch of a micro-batch."""
        data, (step, part) = self._data, (turn.compute.step, turn.compute.part)
        span = turn.compute.span
        begin = span.begin + part * data.microbatch
        mine = self._share.loaded(min(data.microbatch, span.end - begin))
        key = self._share.key(random_key(data.seed, step, part))
        return self._loader.get(StreamRequest(step, part, span, begin + mine.start, begin + mine.stop, key))

    def close(self) -> None:
        """End the worker."""
        self._loader.close()
