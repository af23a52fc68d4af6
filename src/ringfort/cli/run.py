"""`ringfort run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Exit, Option

from ringfort.cli.parameters import Interfaces, Peers
from ringfort.config import MAX_RUN_NAME, Environment
from ringfort.errors import InvalidArgumentError
from ringfort.launch.run_options import ELASTIC_RESTARTS, TIMEOUT, ElasticOptions, RunOptions
from ringfort.launchers import SLURM


def run(
    script: Annotated[
        str, Argument(metavar="SCRIPT", help="The Python file to run, or with -m a module.", show_default=False)
    ],
    arguments: Annotated[list[str] | None, Argument(help="The arguments of the script.", metavar="ARGUMENTS")] = None,
    local: Annotated[int, Option("-n", "--local", help="Number of ranks on this machine.")] = 1,
    nodes: Annotated[
        str | None,
        Option(
            metavar="MIN[:MAX]",
            help="Number of machines: wait for MIN, and a little longer for up to MAX. With --elastic, number of "
            "members: the run pauses below MIN.  [default: 1, or the tasks of srun, or what the script says]",
        ),
    ] = None,
    elastic: Annotated[
        bool,
        Option(
            "--elastic",
            help="For a script that calls ringfort.elastic(): machines join and leave the run at any time, and a rank "
            "that crashes is started again.",
        ),
    ] = False,
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
    timeout: Annotated[
        float | None, Option(help=f"Seconds to wait for the other machines.  [default: {TIMEOUT:g}]")
    ] = None,
    name: Annotated[
        str | None,
        Option(help="Name of the run: machines with the same name run together.  [default: the script's name]"),
    ] = None,
    patience: Annotated[
        float | None,
        Option(help="Seconds without an answer after which a machine is lost.  [default: RINGFORT_PATIENCE or 10]"),
    ] = None,
    max_restarts: Annotated[
        int | None,
        Option(
            metavar="N",
            help="Restart the whole run after a failure, up to N times. With --elastic, restart each rank of this "
            f"machine alone.  [default: 0, or {ELASTIC_RESTARTS} with --elastic]",
        ),
    ] = None,
    torch_backend: Annotated[
        str | None,
        Option(
            metavar="ringfort",
            help="Make torch's default group before the script runs: then whatever the script uses of "
            "torch.distributed goes over Ringfort, without a change in the script.",
        ),
    ] = None,
    log_dir: Annotated[
        str | None, Option(metavar="DIR", help="Keep the output of each rank in this folder, as rank-N.log.")
    ] = None,
    tee: Annotated[
        str, Option(metavar="RANKS", help="Print the output of these ranks only, such as 0,2-3; or all, or none.")
    ] = "all",
    no_status: Annotated[bool, Option("--no-status", help="Show no line about the run in a terminal.")] = False,
    metrics_port: Annotated[
        str | None,
        Option(
            metavar="[ADDRESS:]PORT",
            help="Serve metrics of this machine's ranks for Prometheus.  [default address: 127.0.0.1]",
        ),
    ] = None,
) -> None:
    """Run a program on this machine, or on several: type the same command on each."""
    chosen = {"nodes": nodes, "name": name, "timeout": timeout, "max_restarts": max_restarts}
    given: dict[str, Any] = {option: value for option, value in chosen.items() if value is not None}
    given |= {
        "script": script,
        "arguments": tuple(arguments or ()),
        "module": module,
        "local": local,
        "peers": tuple(peer or ()),
        "interfaces": tuple(interface or ()),
        "restart_without": tuple(restart_without or ()),
        "patience": patience,
        "log_dir": log_dir,
        "tee": tee,
        "status": not no_status,
        "metrics": metrics_port,
    }
    if elastic:
        if timeout is not None:
            why = "invalid with --elastic, which starts at once and waits for members as long as it takes"
            raise InvalidArgumentError("timeout", timeout, why)
        if torch_backend is not None:
            why = "invalid with --elastic, whose members have no common group; see docs/elastic-torch.md"
            raise InvalidArgumentError("torch_backend", torch_backend, why)
        options = ElasticOptions(**given)

        from ringfort.launch.elastic_launcher import run_elastic

        status = run_elastic(options)
    else:
        options = RunOptions(**_of_step(script) | given, torch_backend=torch_backend)

        from ringfort.launch.launcher import run_job

        status = run_job(options)
    if status:
        raise Exit(status)


def _of_step(script: str) -> dict[str, Any]:
    """Return the options that follow from the Slurm step in which `srun` has started the launchers: they wait for each
    other, and for no launcher of another step."""
    told = Environment.from_mapping()
    if told.launcher != SLURM.name or told.step is None or told.world_size is None:
        return {}
    mark = " {}.{}".format(*told.step)
    return {"nodes": str(told.world_size), "name": Path(script).name[: MAX_RUN_NAME - len(mark)] + mark}
