"""`ringfort bench`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

from typer import Option, echo

from ringfort.bench import options
from ringfort.errors import InvalidArgumentError

STDOUT = "-"


def bench(
    op: Annotated[str, Option(help=f"One of: {', '.join(options.OPS)}.")] = "all_reduce",
    sizes: Annotated[
        str, Option(help="Bytes of the largest buffer per rank, with commas; K, M, G are powers of 1024.")
    ] = options.SIZES,
    ranks: Annotated[str, Option(help="World sizes, with commas.")] = options.RANKS,
    dtype: Annotated[str, Option(help=f"One of: {', '.join(options.DTYPES)}.")] = "float32",
    strategy: Annotated[
        str,
        Option(
            help="auto, ring, tree, tree(ARITY), direct, halving_doubling or hierarchical, if the operation has it."
        ),
    ] = "auto",
    against: Annotated[
        str | None,
        Option(
            help="Engines to compare with, with commas: tcp, plain (TCP, encryption off), gloo, openmpi-tcp, "
            "openmpi-shm, mpich-tcp, mpich-shm, mlx, sockets and memcpy (the limits); or all, or none.  "
            "[default: gloo if installed]"
        ),
    ] = None,
    encryption: Annotated[str, Option(help="Encryption: on or off.")] = "on",
    shared_memory: Annotated[str, Option(help="Shared memory between ranks of one host: on or off.")] = "on",
    connections: Annotated[
        str, Option(help="Connections of large arrays between ranks that do not share memory; a number or auto.")
    ] = "auto",
    repeat: Annotated[
        int | None, Option(help="Calls per engine and size.  [default: as many as fit into --min-time]")
    ] = None,
    min_time: Annotated[float, Option(help="Seconds of calls per engine and size.")] = options.MIN_TIME,
    json_: Annotated[
        str | None, Option("--json", metavar="FILE", help="Write the result as JSON; - is standard output.")
    ] = None,
    plot: Annotated[Path | None, Option(metavar="FILE", help="Plot the result into a .png or .svg file.")] = None,
    explain: Annotated[
        bool, Option("--explain", help="Compare the strategies instead of engines: predicted, measured, chosen.")
    ] = False,
) -> None:
    """Measure collectives, and compare them with other engines in the same run."""
    from rich.console import Console

    from ringfort.bench.engines import choose_engines
    from ringfort.bench.explain import check_explainable, explain as explain_choices
    from ringfort.bench.plot import check_plot, write_plot
    from ringfort.bench.results import Report
    from ringfort.bench.runner import run_bench
    from ringfort.bench.tables import Watcher, print_explanation, print_report

    choice = choose_engines("none" if explain else against)
    wanted = options.Options(
        op=op,
        sizes=options.parse_sizes(sizes),
        ranks=options.parse_ranks(ranks),
        dtype=dtype,
        strategy=strategy,
        against=choice.names,
        repeat=repeat,
        min_time=min_time,
        encryption=encryption,
        shared_memory=shared_memory,
        connections=options.parse_connections(connections),
    )
    if explain:
        check_explainable(wanted)  # before a bar is drawn: older versions of rich leave an empty line of it
    if plot is not None:
        check_plot(plot, op)
        _check_writable("plot", plot)
    if json_ not in (None, STDOUT):
        _check_writable("json", Path(json_))
    progress = Console(stderr=True)
    table = progress if json_ == STDOUT else Console()
    for name, how in choice.missing.items():
        echo(f"{name} is not installed and is left out; to install it: {how}", err=True)
    watcher = Watcher(progress)
    with watcher.bar:
        found = explain_choices(wanted, watcher.explained) if explain else run_bench(wanted, watcher.step)
    if isinstance(found, Report):
        print_report(table, found)
        if plot is not None:
            write_plot(found, plot)
    else:
        print_explanation(table, found)
    if json_ is not None:
        text = json.dumps(found.to_dict(), sort_keys=True, indent=2) + "\n"
        sys.stdout.write(text) if json_ == STDOUT else Path(json_).write_text(text, encoding="utf-8")


def _check_writable(name: str, path: Path) -> None:
    """Check before the run, so that minutes of measuring are not lost to a mistyped name."""
    if path.is_dir():
        raise InvalidArgumentError(name, str(path), "is a folder; name a file")
    if not path.parent.is_dir():
        raise InvalidArgumentError(name, str(path), f"the folder {path.parent} does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidArgumentError(name, str(path), "is not writable")
