"""A rank's process for `ProcessRanks`: `python -m ringfort.testing.worker module:make`, one check per input line."""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Sequence
from importlib import import_module

from ringfort.testing.check import in_words
from ringfort.testing.conformance import ALL_CHECKS
from ringfort.testing.processes import MakeBackend
from ringfort.testing.ranks import RANKS_TIMEOUT


def answer(make: MakeBackend, name: str, rank: int, addresses: Sequence[str]) -> str | None:
    """Run one rank's part of a check. Returns None, or what went wrong."""
    # A hang ends the process, with the stacks of all threads.
    faulthandler.dump_traceback_later(RANKS_TIMEOUT, exit=True)
    try:
        with make(rank, addresses) as backend:
            ALL_CHECKS[name].run_rank(backend, is_process=True)
    except BaseException as exc:  # whatever it is, it is the answer
        return in_words(exc)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return None


def main() -> None:
    """Answer until standard input ends."""
    module, _, function = sys.argv[1].partition(":")
    make: MakeBackend = getattr(import_module(module), function)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(make, *json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
