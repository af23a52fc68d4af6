"""`ringfort run`."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Exit, Option

from ringfort.cli.parameters import Interfaces, Peers
from ringfort.launch.run_options import TIMEOUT, RunOptions


def run(
    script: Annotated[
        str, Argument(metavar="SCRIPT", help="The Python file to run, or with -m a module.", show_default=False)
    ],
    arguments: Annotated[list[str] | None, Argument(help="The arguments of the script.", metavar="ARGUMENTS")] = None,
    local: Annotated[int, Option("-n", "--local", help="Number of ranks on this machine.")] = 1,
    nodes: Annotated[
        str, Option(metavar="MIN[:MAX]", help="Number of machines: wait for MIN, and a little longer for up to MAX.")
    ] = "1",
    module: Annotated[bool, Option("-m", "--module", help="SCRIPT is the name of a module, as in python -m.")] = False,
    peer: Peers = None,
    interface: Interfaces = None,
    restart_without: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="Do not wait for this machine of an earlier run, which will not come back: its name or a peer id. "
            "Repeatable.",
        ),
    ] = None,
    timeout: Annotated[float, Option(help="Seconds to wait for the other machines.")] = TIMEOUT,
    name: Annotated[
        str | None,
        Option(help="Name of the run: machines with the same name run together.  [default: the script's name]"),
    ] = None,
    patience: Annotated[
        float | None,
        Option(help="Seconds without an answer after which a machine is lost.  [default: RINGFORT_PATIENCE or 10]"),
    ] = None,
    max_restarts: Annotated[int, Option(metavar="N", help="Restart the whole run after a failure, up to N times.")] = 0,
) -> None:
    """Run a program on this machine, or on several: type the same command on each."""
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
        raise Exit(status)
