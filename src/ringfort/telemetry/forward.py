"""`Forwarder`: passes what a program logs on to Weights & Biases, MLflow and TensorBoard, if it uses one of them.

Nothing is imported: a tool that the program has not imported is not active. A failure there is a warning, once for each
tool: training continues.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, cast
from weakref import ref

_log = logging.getLogger(__name__)

_LOOK: Final = 30.0
"""Seconds between two searches for an open `SummaryWriter`. One takes tens of milliseconds: it looks at all objects."""

Values = Mapping[str, float]


class Writer(Protocol):
    """A `SummaryWriter` of TensorBoard, or what has its method."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object:
        """Write one value."""
        ...


class Forwarder:
    """Where the values of this process go."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.writer: Writer | None = None
        """What the program has chosen in place of the writer that is found."""
        self._clock = clock
        self._found: ref[Any] | None = None
        self._look_at = 0.0
        self._warned: set[str] = set()

    def send(self, values: Values, step: int) -> None:
        """Pass values on to every tool that is active."""
        for tool, pass_on in (
            ("Weights & Biases", _to_wandb),
            ("MLflow", _to_mlflow),
            ("TensorBoard", self._to_tensorboard),
        ):
            try:
                pass_on(values, step)
            except Exception as exc:
                if tool not in self._warned:
                    self._warned.add(tool)
                    _log.warning("%s did not take what ringfort.log got: %s: %s", tool, type(exc).__name__, exc)

    def _to_tensorboard(self, values: Values, step: int) -> None:
        writer = self.writer or self._open_writer()
        if writer is not None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

    def _open_writer(self) -> Writer | None:
        module = sys.modules.get("torch.utils.tensorboard.writer")
        if module is None:
            return None
        found = None if self._found is None else self._found()
        if _is_open(found):
            return found
        self._found = None
        if self._clock() < self._look_at:
            return None
        self._look_at = self._clock() + _LOOK
        kind: type[Any] = module.SummaryWriter
        # TensorBoard keeps no list of its writers. An object refers to its class.
        writers = [one for one in gc.get_referrers(kind) if isinstance(one, kind) and _is_open(one)]
        if len(writers) == 1:
            self._found = ref(writers[0])
            return cast("Writer", writers[0])
        if writers and "writers" not in self._warned:
            self._warned.add("writers")
            _log.warning(
                "ringfort.log does not know which of %d SummaryWriters to use; call ringfort.log_to(writer)",
                len(writers),
            )
        return None


def _is_open(writer: Any) -> bool:
    return getattr(writer, "all_writers", None) is not None  # None after its close()


def _to_wandb(values: Values, step: int) -> None:
    run: Any = getattr(sys.modules.get("wandb"), "run", None)
    if run is not None:
        # W&B drops what is of an earlier step than its own, which a program's calls without a step count up.
        run.log(dict(values), step=step if step >= run.step else None)


def _to_mlflow(values: Values, step: int) -> None:
    mlflow: Any = sys.modules.get("mlflow")
    if mlflow is not None and mlflow.active_run() is not None:
        mlflow.log_metrics(dict(values), step=step)
