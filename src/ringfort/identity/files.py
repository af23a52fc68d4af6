"""Small secret files: created atomically, readable only by their owner, and refused if other users could read them.

Every error is an `IdentityError` with the command that fixes it.
"""

from __future__ import annotations

import errno
import os
import pwd
import shlex
import stat
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from ringfort.errors import IdentityError

MAX_BYTES = 4096
"""Of a secret file. Ours have about a hundred; a larger file is not ours and is not read."""

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OWN_HOME = "export RINGFORT_HOME=/a/folder/of/your/own"


def load_or_create(path: Path, make: Callable[[], bytes]) -> bytes:
    """Return the content of `path`. If it does not exist, create it with what `make` returns, unless another process
    does so first."""
    data = read(path)
    if data is None:
        ensure_folder(path.parent)
        fresh = make()
        data = fresh if create(path, fresh) else read(path)
    if data is None:
        raise IdentityError(path, "was removed while it was being read", "run the same command again")
    return data


def read(path: Path) -> bytes | None:
    """Return the content of `path`, or None if it does not exist. Other users must not be able to read or replace
    it."""
    with _translated(path):
        try:
            # Without O_NONBLOCK, opening a named pipe would wait for ever.
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise IdentityError(path, "is not a file", f"mv {quoted(path)} {quoted(f'{path}.old')}")
            _check_private(path, status, "600")
            check_folder(path.parent)
            return os.read(handle, MAX_BYTES)
        finally:
            os.close(handle)


def read_mounted(path: Path) -> bytes:
    """Return the content of a secret that a container engine has mounted. It belongs to root, and the engine gives it
    to this process by its group: so only the mode for everybody is checked."""
    with _translated(path):
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            how = "mount the secret there, or unset RINGFORT_KEY_FILE"
            raise IdentityError(path, "is not there", how) from None
        except PermissionError:
            how = f"chgrp {os.getegid()} {quoted(path)} && chmod 440 {quoted(path)}, or in Kubernetes an fsGroup"
            raise IdentityError(path, "this user cannot read it", how) from None
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise IdentityError(path, "is not a file", "name the file in the mounted folder")
            if status.st_mode & stat.S_IRWXO:
                mode = f"everybody can access this secret (mode {stat.S_IMODE(status.st_mode):04o})"
                how = f"chmod o= {quoted(path)}, or in Kubernetes `defaultMode: 0440` with an fsGroup"
                raise IdentityError(path, mode, how)
            data = os.read(handle, MAX_BYTES)
        finally:
            os.close(handle)
    if not data.strip():
        raise IdentityError(path, "is empty", "ringfort key show > FILE, on a machine of the cluster")
    return data


def create(path: Path, data: bytes) -> bool:
    """Write `data` to `path` unless that exists. Return whether it was written. No reader ever sees a part of it."""
    with _translated(path), _written(path, data) as temporary:
        try:
            # If several processes link at once, one succeeds, and the name appears with its whole content. (Renaming
            # would replace what the first one wrote, which others may have read by then.)
            os.link(temporary, path)
        except FileExistsError:
            return False
        _keep_name(path)
    return True


def replace(path: Path, data: bytes) -> None:
    """Replace the content of `path` by `data`. A reader sees the old content or the new."""
    ensure_folder(path.parent)
    with _translated(path), _written(path, data) as temporary:
        temporary.replace(path)
        _keep_name(path)


def names(folder: Path) -> list[str]:
    """Return the sorted names in `folder`; none if it does not exist."""
    check_folder(folder)
    with _translated(folder):
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def ensure_folder(folder: Path) -> None:
    """Create `folder` and its parents, accessible only to their owner; or check that it is."""
    with _translated(folder):
        # Not `parents=True`, which gives the parents the default mode: one of them may be our home.
        for missing in reversed([place for place in (folder, *folder.parents) if not place.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
    check_folder(folder)


def check_folder(folder: Path) -> None:
    """Check that `folder`, if it exists, is accessible only to its owner: a user who can write to it could replace the
    files in it."""
    with _translated(folder):
        try:
            status = folder.stat()
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "is not a folder")
        _check_private(folder, status, "700")


@contextmanager
def _written(path: Path, data: bytes) -> Generator[Path, None, None]:
    """A temporary file beside `path` with `data` in it, flushed to the disk."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".new")  # with mode 0600
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)  # a name must not outlive its content when the power fails
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)  # `replace` has moved it


def _keep_name(path: Path) -> None:
    """Flush the name to the disk too: after a power failure an old secret must not come back."""
    handle = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check_private(path: Path, status: os.stat_result, mode: str) -> None:
    if status.st_uid != os.geteuid():  # also for root: the owner of a file can read and replace it
        is_root = os.geteuid() == 0
        raise IdentityError(
            path,
            f"belongs to another user ({_user(status.st_uid)})",
            f"chown root {quoted(path)} (or run as that user)" if is_root else _OWN_HOME,
        )
    if stat.S_IMODE(status.st_mode) & _OTHERS:
        kind = "folder" if stat.S_ISDIR(status.st_mode) else "secret"
        # A folder like /tmp is shared on purpose, and must stay so.
        shared = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        raise IdentityError(
            path,
            f"other users can access this {kind} (mode {stat.S_IMODE(status.st_mode):04o})",
            "keep the key in a folder of your own" if shared else f"chmod {mode} {quoted(path)}",
        )


@contextmanager
def _translated(path: Path) -> Generator[None, None, None]:
    """Translate an `OSError` into an `IdentityError` with advice."""
    try:
        yield
    except IdentityError:
        raise
    except OSError as exc:
        raise IdentityError(path, *_advice(exc, path)) from exc


def _advice(exc: OSError, path: Path) -> tuple[str, str]:
    """What is wrong, and the command that fixes it. A file that is in the way is moved, never removed."""
    folder = _existing(path.parent)
    match exc.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return "the disk is full", f"free some space (df -h {quoted(folder)})"
        case errno.ENOTDIR | errno.EEXIST:
            in_the_way = path if _status(path) else folder
            return f"{in_the_way} is not a folder", f"mv {quoted(in_the_way)} {quoted(f'{in_the_way}.old')}"
        case errno.EACCES | errno.EPERM if _is_ours_but_lacks(folder, stat.S_IRWXU):
            return f"the folder {folder} is not writable", f"chmod u+rwx {quoted(folder)}"
        case errno.EACCES | errno.EPERM if _is_ours_but_lacks(path, stat.S_IRUSR):
            return "is not readable", f"chmod 600 {quoted(path)}"
        case errno.EACCES | errno.EPERM | errno.EROFS | errno.ENOTSUP | errno.ENOSYS:
            return "this user cannot create files there", _OWN_HOME
        case _:
            return exc.strerror or "cannot be used", f"ls -ld {quoted(path)}"


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # as in a container
        return f"user id {number}"


def _is_ours_but_lacks(path: Path, mode: int) -> bool:
    status = _status(path)
    return status is not None and status.st_uid == os.geteuid() and status.st_mode & mode != mode


def _status(path: Path) -> os.stat_result | None:
    """None also if we may not look, where `Path.exists` would raise."""
    try:
        return path.stat()
    except OSError:
        return None


def _existing(folder: Path) -> Path:
    """The nearest existing parent, which is the one to fix."""
    while _status(folder) is None and folder != folder.parent:
        folder = folder.parent
    return folder


def quoted(path: Path | str) -> str:
    """Return `path` as it is typed in a shell."""
    return shlex.quote(str(path))
