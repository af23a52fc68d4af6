"""`ringfort checkpoint`: lists the checkpoints of elastic runs in a folder, checks that they can be read, and exports
their arrays."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringfort.cli.columns import fit
from ringfort.cli.outcome import EXIT_FAILED, print_json
from ringfort.cli.parameters import AsJson
from ringfort.telemetry.words import clean, uptime

if TYPE_CHECKING:
    from ringfort.errors import CheckpointError
    from ringfort.training.elastic.checkpoint import Saved

checkpoint = typer.Typer(
    help="List, verify and export the checkpoints of elastic runs.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

LABELS = {"samples": "samples", "epoch": "epoch", "branch": "branch"}
"""Put before the values of these columns where they are not below their heading."""


@checkpoint.command(name="ls")
def list_(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder with the checkpoints.")],
    json_: AsJson = False,
) -> None:
    """List the checkpoints in a folder, newest first. Only heads and sizes are checked; `verify` reads everything."""
    found, now = _found(folder), time.time()
    if json_:
        print_json({"checkpoints": [as_dict(one, now) for one in found]})
    elif found:
        from rich.console import Console

        console = Console()
        typer.echo("\n".join(lines(found, now, console.width if console.is_terminal else None)))
    else:
        typer.echo(f"no checkpoints in {folder}", err=True)


@checkpoint.command()
def verify(
    path: Annotated[Path, typer.Argument(metavar="FOLDER|FILE", help="One checkpoint, or a folder with checkpoints.")],
) -> None:
    """Read every block of the checkpoints. The exit code is 1 if one is damaged, or if there are none."""
    from ringfort.errors import CheckpointError
    from ringfort.telemetry.metrics import binary_size

    checkpoints, failed = _found(path), 0
    for found in checkpoints:
        try:
            if isinstance(found, CheckpointError):
                raise found
            found.verify()
        except CheckpointError as exc:
            failed += 1
            typer.echo(f"{clean(exc.path)}: {clean(exc.why)}")
        else:
            typer.echo(f"{clean(str(found.path))}: valid, step {found.stamp.step:,}, {binary_size(found.nbytes)}")
    if not checkpoints:
        typer.echo(f"no checkpoints in {path}", err=True)
    if failed or not checkpoints:
        raise typer.Exit(EXIT_FAILED)


@checkpoint.command()
def export(
    path: Annotated[Path, typer.Argument(metavar="FOLDER|FILE", help="One checkpoint, or a folder with checkpoints.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The safetensors file to write.")],
    step: Annotated[int | None, typer.Option(metavar="N", help="The checkpoint of this step, not the newest.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="All arrays of a torch run, not only the model's.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write the arrays of the newest valid checkpoint as a safetensors file; of a torch run, those of the model."""
    from ringfort.telemetry.metrics import binary_size
    from ringfort.training.elastic import checkpoint_export as exporting

    exporting.check_output(output, force=force)
    saved, image = exporting.read_newest(path, step, lambda why: typer.echo(f"not used: {clean(why)}", err=True))
    selection = exporting.select(saved, everything=all_)
    exporting.write(output, image, selection, saved.stamp)
    arrays, size = len(selection.arrays), binary_size(sum(one.nbytes for one in selection.arrays.values()))
    typer.echo(
        f"{clean(str(output))}: {arrays} array{'' if arrays == 1 else 's'}, {size}, "
        f"of step {saved.stamp.step:,} of {clean(saved.stamp.run)}"
    )
    if selection.values:
        what = "number or other plain value" if selection.values == 1 else "numbers or other plain values"
        typer.echo(f"left out: {selection.values} {what}; safetensors has arrays alone")


def _found(path: Path) -> list[Saved | CheckpointError]:
    """Return the checkpoints in a folder, or that in a file."""
    from ringfort.errors import CheckpointError, InvalidArgumentError
    from ringfort.training.elastic.checkpoint import CheckpointFolder, open_checkpoint

    if path.is_dir():
        return list(CheckpointFolder(path).saved())
    if not path.exists():
        raise InvalidArgumentError("path", str(path), "no such file or folder")
    try:
        return [open_checkpoint(path)]
    except CheckpointError as exc:
        return [exc]


def as_dict(found: Saved | CheckpointError, now: float) -> dict[str, Any]:
    """Return a checkpoint for JSON: seconds and bytes, nothing rounded. What is unknown is None."""
    from ringfort.errors import CheckpointError

    if isinstance(found, CheckpointError):
        known: dict[str, Any] = dict.fromkeys(("step", "run", "branch", "epoch", "samples", "bytes", "age_seconds"))
        return {"file": found.path, **known, "valid": False, "reason": found.why}
    stamp = found.stamp
    return {
        "file": str(found.path),
        "step": stamp.step,
        "run": stamp.run,
        "branch": stamp.branch,
        "epoch": stamp.epoch,
        "samples": stamp.cursor,
        "bytes": found.nbytes,
        "age_seconds": max(0.0, now - found.written),
        "valid": True,
        "reason": "",
    }


def lines(found: Sequence[Saved | CheckpointError], now: float, width: int | None) -> list[str]:
    """Return the table, for a terminal of `width` columns; None for a file."""
    return fit([_row(as_dict(one, now)) for one in found], LABELS, width)


def _row(known: dict[str, Any]) -> dict[str, str]:
    """Return the values of a checkpoint by column, in order of importance."""
    from ringfort.telemetry.metrics import binary_size

    is_valid = known["valid"]
    found = {
        "step": f"{known['step']:,}" if is_valid else "?",
        "state": "valid" if is_valid else "invalid",
        "run": known["run"] if is_valid else "",
        "age": uptime(known["age_seconds"]),
        "size": binary_size(known["bytes"]) if is_valid else "",
        "samples": f"{known['samples']:,}" if is_valid else "",
        "epoch": str(known["epoch"]) if is_valid else "",
        "branch": known["branch"] if is_valid else "",
        "reason": known["reason"],
        "file": Path(known["file"]).name,
    }
    return {name: clean(text) for name, text in found.items()}
