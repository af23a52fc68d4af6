"""`ringfort bench`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ringfort.bench.options import (
    DTYPES,
    MIN_TIME,
    OPS,
    RANKS,
    SIZES,
    Options,
    parse_connections,
    parse_ranks,
    parse_sizes,
)
from ringfort.errors import InvalidArgumentError

STDOUT = "-"


def bench(
    op: Annotated[str, typer.Option(help=f"One of: {', '.join(OPS)}.")] = "all_reduce",
    sizes: Annotated[
        str, typer.Option(help="Bytes of the largest buffer per rank, with commas; K, M, G are powers of 1024.")
    ] = SIZES,
    ranks: Annotated[str, typer.Option(help="World sizes, with commas.")] = RANKS,
    dtype: Annotated[str, typer.Option(help=f"One of: {', '.join(DTYPES)}.")] = "float32",
    strategy: Annotated[
        str,
        typer.Option(
            help="auto, ring, tree, tree(ARITY), direct, halving_doubling or hierarchical, if the operation has it."
        ),
    ] = "auto",
    against: Annotated[
        str | None,
        typer.Option(
            help="Engines to compare with, with commas: tcp, plain (TCP, encryption off), gloo, openmpi-tcp, "
            "openmpi-shm, mpich-tcp, mpich-shm, mlx, sockets and memcpy (the limits); or all, or none.  "
            "[default: gloo if installed]"
        ),
    ] = None,
    encryption: Annotated[str, typer.Option(help="Encryption: on or off.")] = "on",
    shared_memory: Annotated[str, typer.Option(help="Shared memory between ranks of one host: on or off.")] = "on",
    connections: Annotated[
        str, typer.Option(help="Connections per link between ranks that do not share memory; a number or auto.")
    ] = "1",
    repeat: Annotated[
        int | None, typer.Option(help="Calls per engine and size.  [default: as many as fit into --min-time]")
    ] = None,
    min_time: Annotated[float, typer.Option(help="Seconds of calls per engine and size.")] = MIN_TIME,
    json_: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - is standard output.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Plot the result into a .png or .svg file.")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Compare the strategies instead of engines: predicted, measured, chosen.")
    ] = False,
) -> None:
    """Measure collectives, and compare them with other engines in the same run."""
    from rich.console import Console

    from ringfort.bench.engines import choose_engines
    from ringfort.bench.explain import explain as explain_choices
    from ringfort.bench.plot import check_plot, write_plot
    from ringfort.bench.results import Report
    from ringfort.bench.runner import run_bench
    from ringfort.bench.tables import Watcher, print_explanation, print_report

    choice = choose_engines("none" if explain else against)
    options = Options(
        op=op,
        sizes=parse_sizes(sizes),
        ranks=parse_ranks(ranks),
        dtype=dtype,
        strategy=strategy,
        against=choice.names,
        repeat=repeat,
        min_time=min_time,
        encryption=encryption,
        shared_memory=shared_memory,
        connections=parse_connections(connections),
    )
    if plot is not None:
        check_plot(plot, op)
        _check_writable("plot", plot)
    if json_ not in (None, STDOUT):
        _check_writable("json", Path(json_))
    progress = Console(stderr=True)
    table = progress if json_ == STDOUT else Console()
    for name, how in choice.missing.items():
        typer.echo(f"{name} is not installed and is left out; to install it: {how}", err=True)
    watcher = Watcher(progress)
    with watcher.shown():
        found = explain_choices(options, watcher.explained) if explain else run_bench(options, watcher.step)
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
