"""`ringfort key`: the secrets of the clusters that this machine belongs to.

Only `show` prints a secret, and only to standard output: `ringfort key show | ssh other ringfort key join` works.
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ringfort.cli.outcome import errors_as_lines

if TYPE_CHECKING:
    from ringfort.identity.store import ClusterStore

key = typer.Typer(
    help="Make, show and join clusters: machines that share a secret.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_MAX_CODE_CHARACTERS = 1024
"""Read from standard input at most; a code has at most 116."""

Name = Annotated[str, typer.Argument(metavar="[NAME]", help="The cluster.")]


@key.command()
def new(name: Name = "default") -> None:
    """Make a cluster with a new secret."""
    with errors_as_lines():
        _store().create(name)
        typer.echo(f"made the cluster {name!r}")
        _say_how_to_join(name)


@key.command()
def show(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The cluster.  [default: the one in use]")
    ] = None,
    qr: Annotated[bool, typer.Option("--qr/--no-qr", help="Draw the code as a picture too, in a terminal.")] = True,
) -> None:
    """Print the join code that lets another machine in."""
    with errors_as_lines():
        from ringfort.identity.store import current_namespace

        namespace = current_namespace() if name is None else _store().load(name)
        typer.echo("whoever has this code can join the cluster and read all of its traffic: keep it secret", err=True)
        code = namespace.join_code()
        typer.echo(code)
        if qr and sys.stdout.isatty():
            typer.echo(_picture(code))


@key.command()
def join(
    code: Annotated[
        str | None,
        typer.Argument(
            metavar="[CODE]", help="The join code; without it, it is asked for and stays out of the shell's history."
        ),
    ] = None,
) -> None:
    """Join the cluster of a code."""
    with errors_as_lines():
        from ringfort.identity.namespace import NetworkNamespace
        from ringfort.identity.store import DEFAULT_CLUSTER, Added

        namespace = NetworkNamespace.from_join_code(_ask() if code is None else code)
        name = namespace.name
        match _store().add(namespace):
            case Added.KNOWN:
                typer.echo(f"this machine is in the cluster {name!r} already")
            case Added.NEW:
                typer.echo(f"joined the cluster {name!r}")
            case Added.REPLACED:
                typer.echo(f"joined the cluster {name!r} in place of another one of that name")
                typer.echo("to go back, join with the code of a machine that is still in the other one", err=True)
        if name != DEFAULT_CLUSTER:
            typer.echo(f"to use it: export RINGFORT_CLUSTER={name}", err=True)


@key.command(name="list")
def list_() -> None:
    """List the clusters of this machine and their public network ids; * marks the one in use."""
    with errors_as_lines():
        from ringfort.config import Environment
        from ringfort.identity.store import DEFAULT_CLUSTER

        store = _store()
        names = store.names()
        environment = Environment.from_mapping()
        in_use = environment.cluster or DEFAULT_CLUSTER
        for name in names:
            mark = "*" if name == in_use and environment.key is None else " "
            typer.echo(f"{mark} {name:<{max(map(len, names))}}  {store.load(name).network_id.hex()}")
        if environment.key is not None:
            typer.echo("RINGFORT_KEY is set: its cluster is in use, and it is stored nowhere", err=True)
        elif not names:
            typer.echo("no cluster yet; the first use makes 'default', and so does: ringfort key new", err=True)


@key.command()
def rotate(name: Name = "default") -> None:
    """Give a cluster a new secret: the old code stops working."""
    with errors_as_lines():
        _store().rotate(name)
        typer.echo(f"the cluster {name!r} has a new secret, and its old code is void")
        typer.echo("processes that run keep the old one until they are started again", err=True)
        _say_how_to_join(name)


def _store() -> ClusterStore:
    from ringfort.config import Environment
    from ringfort.identity.store import ClusterStore

    return ClusterStore(Environment.from_mapping().home_folder)


def _say_how_to_join(name: str) -> None:
    typer.echo(
        f"on every other machine: ringfort key join, with the code that `ringfort key show {name}` prints here",
        err=True,
    )


def _ask() -> str:
    """From a terminal without showing it, as for a password; from a pipe, its first line."""
    if sys.stdin.isatty():
        return typer.prompt("join code", hide_input=True, err=True)
    return sys.stdin.readline(_MAX_CODE_CHARACTERS)


def _picture(code: str) -> str:
    import segno

    # In capitals: that alphabet of QR codes is half as large, and a join code does not mind.
    picture = io.StringIO()
    segno.make(code.upper(), error="l", micro=False).terminal(picture, compact=True, border=2)
    return picture.getvalue().rstrip("\n")
