"""One rank of `ringfort.local`: `python -m ringfort.launch.local_group_rank DESCRIPTOR TIMEOUT`.

It forms the group, says so, and then runs one function after the other, until the notebook closes its end.
"""

from __future__ import annotations

import socket
import sys
import traceback
from typing import Any

from ringfort.collectives import objects
from ringfort.context import DistributedContext
from ringfort.errors import AbortedError, DistributedError
from ringfort.launch import function_source, local_group, local_group_frames as frames
from ringfort.startup import init


def main(descriptor: int, timeout: float | None) -> None:
    """Serve the notebook at the other end of `descriptor`."""
    with socket.socket(fileno=descriptor) as connection:
        incoming = frames.Frames(connection)
        try:
            notebook = incoming.read()
            sys.path[:] = notebook["path"]
            sys.argv[:] = [notebook["program"]]  # by which viewers know the run
            try:
                context = init(timeout=timeout, backend="tcp")
            except Exception as exc:
                frames.send(connection, _encoded(_failure(exc)))
                return
            local_group.mark_as_rank(context.rank)
            with context:
                frames.send(connection, _encoded({"ready": True}))
                while True:
                    frames.send(connection, _answer(context, incoming.read()))
        except (EOFError, BrokenPipeError):
            return  # the notebook has closed the group, or is gone


def _answer(context: DistributedContext, call: dict[str, Any]) -> bytes:
    try:
        fn = function_source.unpack(call["steps"])
        result = fn(context, *call["args"], **call["keywords"])
    except KeyboardInterrupt:
        raise
    except BaseException as exc:
        return _encoded(_failure(exc))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    try:
        return _encoded({"result": result})
    except DistributedError as exc:
        advice = "return None, numbers, strings, lists, dicts or arrays"
        what = f"the function returned a value that cannot be sent to the notebook; {advice} ({exc})"
        return _encoded({"type_name": "TypeError", "message": what, "traceback": "", "is_victim": False})


def _encoded(value: dict[str, Any]) -> bytes:
    return objects.encode(value, function_source.MAX_BYTES)


def _failure(exc: BaseException) -> dict[str, Any]:
    """An exception as text, from the function on: the lines of this module say nothing to the user."""
    kind = type(exc)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    frame = exc.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename == __file__ and frame.tb_next is not None:
        frame = frame.tb_next
    lines = traceback.format_exception(kind, exc, frame)
    is_victim = isinstance(exc, DistributedError) and (exc.is_peer_failure or isinstance(exc, AbortedError))
    return {"type_name": name, "message": str(exc), "traceback": "".join(lines), "is_victim": is_victim}


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), float(sys.argv[2]) if sys.argv[2] else None)
    except KeyboardInterrupt:
        sys.exit(130)  # the notebook was interrupted, and passes it on
