"""The arrays of a checkpoint as a safetensors file, which other programs read without Ringfort.

The name of an array is its keys, joined by dots: `state["layers"][0]["w"]` is `layers.0.w`. Of a torch run only the
model is taken, without the word `model`, so that its names are those of `state_dict()`.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ringfort.errors import BackendUnavailableError, CheckpointError, InvalidArgumentError
from ringfort.training.elastic.checkpoint import CheckpointFolder, Saved, Stamp, open_checkpoint, sync_folder
from ringfort.training.elastic.state_tree import Entry, Image

_MISSING: Final = frozenset({"complex128"})
"""Element types that the format does not have."""
_RESERVED: Final = "__metadata__"
_OS_ERROR: Final = re.compile(r"\(os error (\d+)\)")
"""How safetensors, which is written in Rust, gives the number of an error of the system."""


@dataclass(frozen=True)
class Selection:
    """Which arrays are exported, by name."""

    arrays: dict[str, Entry]
    values: int
    """Plain values that are left out: the format has arrays alone."""
    is_torch: bool
    """Whether these are of a torch run."""


# --- which checkpoint -------------------------------------------------------------------------------------------------


def read_newest(path: Path, step: int | None, warn: Callable[[str], None]) -> tuple[Saved, Image]:
    """Return the checkpoint in a file, or the newest valid one in a folder, or that of `step`; with its state, of which
    every block was compared with its hash.

    `warn` is told of newer ones that cannot be used. Raise `CheckpointError` if none can be, and
    `InvalidArgumentError` if it is not clear which one is meant.
    """
    if not path.exists():
        raise InvalidArgumentError("path", str(path), "no such file or folder")
    if not path.is_dir():
        if step is not None:
            raise InvalidArgumentError("step", step, f"chooses from a folder, and {path} is a file")
        saved = open_checkpoint(path)
        return saved, saved.read()
    reasons = list[CheckpointError]()
    for found in _candidates(path, step):
        try:
            if isinstance(found, CheckpointError):
                raise found
            image = found.read()
        except CheckpointError as exc:
            reasons.append(exc)
        else:
            for reason in reasons:
                warn(str(reason))
            return found, image
    if len(reasons) == 1:
        raise reasons[0]
    wanted = "checkpoint" if step is None else f"checkpoint of step {step:,}"
    told = "".join(f"\n  {reason.path}: {reason.why}" for reason in reasons)
    raise CheckpointError(str(path), f"no {wanted} here can be used{told}" if told else f"no {wanted} in this folder")


def _candidates(folder: Path, step: int | None) -> list[Saved | CheckpointError]:
    """Return those to try, newest first; for a file that cannot be used, the reason. Raise `InvalidArgumentError` if
    they are of several runs, or if the newest are of several branches: their steps do not compare."""
    found = list(CheckpointFolder(folder).saved())
    if step is not None:
        begin = str(folder / f"step-{step:09d}-")
        found = [
            one for one in found if (one.stamp.step == step if isinstance(one, Saved) else one.path.startswith(begin))
        ]
    readable = [one for one in found if isinstance(one, Saved)]
    runs = {(one.stamp.run, one.stamp.settings): one for one in reversed(readable)}
    if len(runs) > 1:
        raise _unclear(folder, "several runs", list(runs.values()))
    newest = {one.stamp.branch: one for one in reversed(readable) if one.stamp.step == readable[0].stamp.step}
    if len(newest) > 1:
        raise _unclear(folder, f"several branches at step {readable[0].stamp.step:,}", list(newest.values()))
    return found


def _unclear(folder: Path, what: str, examples: list[Saved]) -> InvalidArgumentError:
    told = "".join(f"\n  {one.path} (run {one.stamp.run}, step {one.stamp.step:,})" for one in examples)
    return InvalidArgumentError("path", str(folder), f"has checkpoints of {what}; name the file that you want:{told}")


# --- which arrays -----------------------------------------------------------------------------------------------------


def select(saved: Saved, *, everything: bool = False) -> Selection:
    """Return the arrays to export: of a torch run the model's, of another run all; with `everything` all of any run.

    Raise `CheckpointError` if two arrays have one name, or if one cannot be in the format.
    """
    leaves = [(_keys(saved, entry.path), entry) for entry in saved.manifest.entries]
    is_torch = {"model", "optimizer"} <= {keys[0] for keys, _ in leaves} and any(
        keys[:2] == ("optimizer", "groups") for keys, _ in leaves
    )
    if is_torch and not everything:
        leaves = [(keys[1:], entry) for keys, entry in leaves if keys[0] == "model"]
    arrays = dict[str, Entry]()
    for keys, entry in leaves:
        if not entry.kind:
            continue
        name, why = ".".join(map(str, keys)), ""
        if name in arrays:
            why = f"{arrays[name].path} and {entry.path} are both named {name}; rename one of them in the program"
        elif name == _RESERVED:
            why = f"{entry.path} has a name that safetensors keeps for itself; rename it in the program"
        elif entry.kind in _MISSING:
            why = f"{entry.path} is {entry.kind}, which safetensors does not have"
        if why:
            raise CheckpointError(str(saved.path), why)
        arrays[name] = entry
    if not arrays:
        raise CheckpointError(str(saved.path), "has no arrays to export")
    return Selection(arrays, sum(not entry.kind for _, entry in leaves), is_torch)


def _keys(saved: Saved, path: str) -> tuple[str | int, ...]:
    """Return the keys of a path: of `state['a'][0]`, 'a' and 0. Checkpoints of format 1 have them only there."""
    keys = list[str | int]()
    try:
        node = ast.parse(path, mode="eval").body
        while isinstance(node, ast.Subscript):
            keys.append(ast.literal_eval(node.slice))
            node = node.value
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as exc:
        raise CheckpointError(str(saved.path), f"its head is invalid: {path[:60]} is an invalid path") from exc
    if not keys:
        raise CheckpointError(str(saved.path), f"its head is invalid: {path[:60]} is an invalid path")
    return tuple(reversed(keys))


# --- the file ---------------------------------------------------------------------------------------------------------


def check_output(output: Path, *, force: bool) -> None:
    """Raise `InvalidArgumentError` if the file cannot be written here, or exists and `force` is not set; and
    `BackendUnavailableError` without safetensors. So nothing is read in vain."""
    _safetensors()
    if output.is_dir():
        raise InvalidArgumentError("output", str(output), "is a folder; give the name of a file")
    if not output.parent.is_dir():
        raise InvalidArgumentError("output", str(output), f"its folder {output.parent} does not exist")
    if output.exists() and not force:
        raise InvalidArgumentError("output", str(output), "exists; --force replaces it")


def write(output: Path, image: Image, selection: Selection, stamp: Stamp) -> None:
    """Write the file whole or not at all. Raise `CheckpointError` if the disk does not take it."""
    safetensors = _safetensors()
    held = {name: image.array(entry) for name, entry in selection.arrays.items()}
    metadata = {"run": stamp.run, "branch": stamp.branch, "step": str(stamp.step), "cursor": str(stamp.cursor)}
    if selection.is_torch:
        metadata["format"] = "pt"  # transformers asks for it
    temporary = output.with_name(f".{output.name}.{os.getpid()}.new")
    with _translated(output, safetensors.SafetensorError):
        specs = {
            name: safetensors.TensorSpec(
                dtype=entry.kind, shape=list(entry.shape), data_ptr=held[name].ctypes.data, data_len=entry.nbytes
            )
            for name, entry in selection.arrays.items()
        }
        try:
            with temporary.open("wb") as file:  # made here for its mode: that of safetensors is readable by us alone
                mode = os.fstat(file.fileno()).st_mode & 0o777
            safetensors.serialize_file(specs, temporary, metadata=metadata)
            temporary.chmod(mode)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(output)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        sync_folder(output.parent)


def _safetensors() -> Any:
    """Return the module. Raise `BackendUnavailableError` without it, or with one that is too old."""
    try:
        import safetensors
        from safetensors import TensorSpec
    except ImportError as exc:
        raise BackendUnavailableError("safetensors", "pip install 'ringfort[export]'") from exc
    del TensorSpec
    return safetensors


@contextmanager
def _translated(output: Path, error: type[Exception]) -> Generator[None]:
    """Raise errors of the system, and those of safetensors, as `CheckpointError`."""
    try:
        yield
    except OSError as exc:
        raise CheckpointError(str(output), f"not written: {(exc.strerror or str(exc)).lower()}") from exc
    except error as exc:
        found = _OS_ERROR.search(str(exc))
        why = os.strerror(int(found[1])).lower() if found else str(exc)
        raise CheckpointError(str(output), f"not written: {why}") from exc
