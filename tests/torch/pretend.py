"""A pretended GPU: streams are slow threads, and its memory is host memory. It keeps the rules of a real one, also the
inconvenient ones: what no event orders happens in any order, and late."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch


class Event:
    """Happens when the stream that it was recorded in gets there."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def set(self) -> None:
        self._over.set()

    def query(self) -> bool:
        return self._over.is_set()

    def synchronize(self) -> None:
        assert self._over.wait(30), "an event never came"


class Stream:
    """Runs actions in order, in a thread of its own."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._random = random.Random(0)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def put(self, action: Callable[[], object]) -> None:
        self._queue.put(action)

    def wait_event(self, event: Event) -> None:
        self.put(event.synchronize)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (action := self._queue.get()) is not None:
            time.sleep(self._random.choice((0, 0, 0.0005)))
            action()


class PretendDevice:
    """A `CudaDevice` without CUDA: it takes CPU tensors for its own."""

    def __init__(self, device: Any = None) -> None:
        self.device = torch.device("cpu")
        self._here = threading.local()
        self.streams: list[Stream] = []
        self.default = self.stream()
        self.kept: list[tuple[Any, Stream]] = []

    def current(self) -> Stream:
        return getattr(self._here, "stream", self.default)

    def use(self, stream: Stream) -> None:
        """Make `stream` the current one of this thread."""
        self._here.stream = stream

    def check(self) -> None:
        pass

    def stream(self) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def record(self, stream: Stream) -> Event:
        event = Event()
        stream.put(event.set)
        return event

    def pinned(self, size: int) -> torch.Tensor:
        return torch.full((size,), 77, dtype=torch.uint8)

    def copy(self, stream: Stream, into: torch.Tensor, source: torch.Tensor) -> None:
        stream.put(lambda: into.copy_(source))

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.kept.append((tensor, stream))

    def future(self) -> Any:
        return torch.futures.Future()

    def synchronize(self) -> None:
        """Wait for the current stream, as `torch.cuda.synchronize` does."""
        self.record(self.current()).synchronize()

    def close(self) -> None:
        self.synchronize()
        for stream in self.streams:
            stream.close()
