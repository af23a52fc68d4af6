"""`ringfort key`: the secrets of this machine's clusters.

Only `show` prints a secret, and only to standard output: `ringfort key show | ssh other ringfort key join` works.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ringfort.config import Environment

if TYPE_CHECKING:
    from ringfort.identity.store import ClusterStore

key = typer.Typer(
    help="Create, show and join clusters: machines that share a secret.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_MAX_CODE_CHARACTERS = 1024
"""The most to read from standard input; a code has at most 116."""

Name = Annotated[str, typer.Argument(metavar="[NAME]", help="Name of the cluster.")]


@key.command()
def new(name: Name = "default") -> None:
    """Create a cluster with a new secret."""
    _store().create(name)
    typer.echo(f"created the cluster {name!r}")
    _say_how_to_join(name)


@key.command()
def show(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Name of the cluster.  [default: the one in use]")
    ] = None,
    qr: Annotated[bool, typer.Option("--qr/--no-qr", help="In a terminal, show the code also as a QR code.")] = True,
) -> None:
    """Print the join code that lets another machine in."""
    from ringfort.identity.store import current_namespace

    namespace = current_namespace() if name is None else _store().load(name)
    typer.echo("anyone who has this code can join the cluster and read all of its traffic: keep it secret", err=True)
    code = namespace.join_code()
    typer.echo(code)
    if qr and sys.stdout.isatty():
        import segno

        # Upper case makes the QR code smaller, and join codes ignore case.
        segno.make(code.upper(), error="l", micro=False).terminal(compact=True, border=2)


@key.command()
def join(
    code: Annotated[
        str | None,
        typer.Argument(
            metavar="[CODE]",
            help="The join code. If it is left out, it is asked for, and stays out of the shell history.",
        ),
    ] = None,
) -> None:
    """Join a cluster by its join code."""
    from ringfort.identity.namespace import NetworkNamespace
    from ringfort.identity.store import DEFAULT_CLUSTER, Added

    namespace = NetworkNamespace.from_join_code(_ask() if code is None else code)
    name = namespace.name
    match _store().add(namespace):
        case Added.KNOWN:
            typer.echo(f"this machine is already in the cluster {name!r}")
        case Added.NEW:
            typer.echo(f"joined the cluster {name!r}")
        case Added.REPLACED:
            typer.echo(f"joined the cluster {name!r} in place of another cluster of that name")
            typer.echo("to go back, join with the code of a machine that is still in the other cluster", err=True)
    if name != DEFAULT_CLUSTER:
        typer.echo(f"to use it: export RINGFORT_CLUSTER={name}", err=True)


@key.command(name="list")
def list_() -> None:
    """List the clusters of this machine with their public network ids; * marks the one in use."""
    from ringfort.identity.store import DEFAULT_CLUSTER

    store = _store()
    names = store.names()
    environment = Environment.from_mapping()
    in_use = environment.cluster or DEFAULT_CLUSTER
    for name in names:
        mark = "*" if name == in_use and environment.key is None else " "
        typer.echo(f"{mark} {name:<{max(map(len, names))}}  {store.load(name).network_id.hex()}")
    if environment.key is not None:
        typer.echo("RINGFORT_KEY is set: its cluster is in use, and is not stored here", err=True)
    elif not names:
        typer.echo("no cluster yet; the first use creates 'default', and so does: ringfort key new", err=True)


@key.command()
def rotate(name: Name = "default") -> None:
    """Give a cluster a new secret; the old join code stops working."""
    _store().rotate(name)
    typer.echo(f"the cluster {name!r} has a new secret; its old join code is invalid")
    typer.echo("running processes keep the old secret until they are restarted", err=True)
    _say_how_to_join(name)


def _store() -> ClusterStore:
    from ringfort.identity.store import ClusterStore

    return ClusterStore(Environment.from_mapping().home_folder)


def _say_how_to_join(name: str) -> None:
    typer.echo(
        f"on every other machine: ringfort key join, with the code that `ringfort key show {name}` prints here",
        err=True,
    )


def _ask() -> str:
    """Read the code from a terminal without echo, or from the first line of a pipe."""
    if sys.stdin.isatty():
        return typer.prompt("join code", hide_input=True, err=True)
    return sys.stdin.readline(_MAX_CODE_CHARACTERS)
