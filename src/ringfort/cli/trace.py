"""`ringfort trace`: writes the next steps of a running job to a file that Perfetto shows."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from typer import Exit, Option, echo

from ringfort.cli.outcome import EXIT_FAILED
from ringfort.cli.parameters import Interfaces, Peers
from ringfort.errors import DistributedError, InvalidArgumentError

if TYPE_CHECKING:
    from ringfort.dashboard.source import Source
    from ringfort.telemetry.chrome_trace import TraceRecorder

STEPS: Final = 20
TIMEOUT: Final = 60.0
SETTLE_SECONDS: Final = 3.0
"""How long other machines and other runs may take to be seen: peers are found in tenths of a second, and ranks report
each second."""
LOOK_SECONDS: Final = 0.25
"""Between two looks."""
MAX_STEPS: Final = 100_000
"""Per rank: a file of some hundred MB."""
_STANDARD_OUTPUT: Final = Path("-")


def trace(
    steps: Annotated[int, Option(help="Number of steps of each rank.")] = STEPS,
    output: Annotated[
        Path, Option("-o", "--output", metavar="FILE", help="The file to write; - for standard output.")
    ] = Path("trace.json"),
    run: Annotated[
        str | None,
        Option("--run", metavar="NAME", help="The run to look at.  [default: the one in which most happens]"),
    ] = None,
    timeout: Annotated[float, Option(help="Seconds to wait for the steps.")] = TIMEOUT,
    peer: Peers = None,
    interface: Interfaces = None,
) -> None:
    """Write the next steps of a running job as a trace for ui.perfetto.dev or chrome://tracing."""
    if not 1 <= steps <= MAX_STEPS:
        raise InvalidArgumentError("steps", steps, f"must be from 1 to {MAX_STEPS:,}")
    if not 0 < timeout < float("inf"):
        raise InvalidArgumentError("timeout", timeout, "must be a positive, finite number")
    _check(output)

    from ringfort.config import AutoDiscoveryConfig
    from ringfort.dashboard.source import LiveSource

    config = AutoDiscoveryConfig(peers=tuple(peer or ()), interfaces=tuple(interface or ()))
    with LiveSource(config) as source:
        recorder, runs = gather(source, run, steps, timeout)
    if not recorder.has_steps:
        raise DistributedError(_nothing(recorder, runs, run, timeout))
    _write(output, recorder)
    where = "standard output" if output == _STANDARD_OUTPUT else output
    said = f"{recorder.summary()} in {where}; open it at https://ui.perfetto.dev"
    others = [name for name in runs if name != recorder.run]
    if others and run is None:
        said += f". Other runs are {', '.join(map(repr, others))}: see --run"
    if recorder.has_gaps:
        said += ". Steps are short, so some of them are left out"
    echo(said, err=True)
    if not recorder.is_complete:
        echo(f"error: after {timeout:g} s, steps are missing: {'; '.join(recorder.missing())}", err=True)
        raise Exit(EXIT_FAILED)


def gather(
    source: Source,
    run: str | None,
    steps: int,
    timeout: float,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> tuple[TraceRecorder, tuple[str, ...]]:
    """Look until all steps were seen, or the time is up. Returns what was seen, and the names of all runs."""
    from ringfort.telemetry.chrome_trace import TraceRecorder

    recorder, begin = TraceRecorder(steps), clock()
    while True:
        view = source.view(recorder.run if recorder.run and clock() - begin >= SETTLE_SECONDS else run)
        if view.ranks and view.run != recorder.run:
            recorder = TraceRecorder(steps)
        recorder.take(view)
        # A run that was named, and says how many ranks it has, is complete when all of them are.
        is_settled = (run is not None and view.world_size > 0) or clock() - begin >= SETTLE_SECONDS
        if (is_settled and recorder.is_complete) or clock() - begin >= timeout:
            return recorder, view.runs
        wait(LOOK_SECONDS)


def _nothing(recorder: TraceRecorder, runs: tuple[str, ...], run: str | None, timeout: float) -> str:
    said = f"no step was seen in {timeout:g} s"
    if run is not None and run not in runs:
        seen = f"there are {', '.join(map(repr, runs))}" if runs else "no run was seen at all"
        return f"{said}: {seen}, not {run!r}. Look at `ringfort top`"
    missing = recorder.missing()
    return f"{said}: {'; '.join(missing) if missing else 'no rank was found'}. {recorder.notice}".strip()


def _check(output: Path) -> None:
    """Raise an error if the file cannot be written, before anyone waits for it."""
    if output == _STANDARD_OUTPUT:
        return
    is_new = not output.exists()
    try:
        output.open("ab").close()
        if is_new:
            output.unlink()
    except OSError as exc:
        raise InvalidArgumentError("output", str(output), f"cannot be written: {exc.strerror}") from exc


def _write(output: Path, recorder: TraceRecorder) -> None:
    text = json.dumps(recorder.document(), separators=(",", ":"), allow_nan=False)
    try:
        if output == _STANDARD_OUTPUT:
            sys.stdout.write(text + "\n")
        else:
            output.write_text(text + "\n", encoding="utf-8")
    except OSError as exc:
        raise DistributedError(f"cannot write {output}: {exc.strerror}") from exc
