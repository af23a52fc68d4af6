"""`ringfort run`."""

from __future__ import annotations

from typing import Annotated

import typer

from ringfort.cli.outcome import errors_as_lines
from ringfort.launch.run_options import TIMEOUT, RunOptions


def run(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="The Python file to run, or with -m a module.", show_default=False)
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="What the script is given.", metavar="ARGUMENTS")
    ] = None,
    local: Annotated[int, typer.Option("-n", "--local", help="Ranks on this machine.")] = 1,
    nodes: Annotated[
        str,
        typer.Option(metavar="MIN[:MAX]", help="Machines: wait for MIN of them, and a little longer for up to MAX."),
    ] = "1",
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT names a module, as in python -m.")] = False,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST[:PORT]", help="Where another machine is, if the network hides it. Repeatable."),
    ] = None,
    interface: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|ADDRESS", help="Use this network interface only. Repeatable."),
    ] = None,
    restart_without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Do not wait for this machine of an earlier run: it is gone for good. A machine's name or a peer id. "
            "Repeatable.",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the other machines.")] = TIMEOUT,
    name: Annotated[
        str | None,
        typer.Option(help="The run's name: machines with the same one run together. The script's by default."),
    ] = None,
    patience: Annotated[
        float | None,
        typer.Option(
            help="Seconds for which a machine may be silent before it is lost. Default: RINGFORT_PATIENCE or 10."
        ),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(metavar="N", help="Start the whole run again after a failure, up to N times.")
    ] = 0,
) -> None:
    """Run a program on this machine, or on several: type the same on each."""
    with errors_as_lines():
        options = RunOptions(
            script=script,
            arguments=tuple(arguments or ()),
            module=module,
            local=local,
            nodes=nodes,
            peers=tuple(peer or ()),
            interfaces=tuple(interface or ()),
            restart_without=tuple(restart_without or ()),
            timeout=timeout,
            name=name,
            patience=patience,
            max_restarts=max_restarts,
        )

        from ringfort.launch.launcher import run_job

        status = run_job(options)
        if status:
            raise typer.Exit(status)
