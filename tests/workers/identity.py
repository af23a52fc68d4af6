"""Processes that all start at once, for the tests of files that only one of them may make."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack


def all_at_once(code: str, *arguments: str, count: int = 10) -> list[str]:
    """What each of `count` processes prints that run `code` at the same moment, each once it has loaded all it needs.

    `code` imports first, then calls `go()`, then does what it is for; `sys.argv[1:]` are `arguments`.
    """
    program = "import sys\ndef go(): print('ready', flush=True); sys.stdin.readline()\n" + code
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", program, *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(count)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        outcomes: list[str] = []
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        for process in processes:
            out, _ = process.communicate(timeout=60)
            assert process.returncode == 0
            outcomes.append(out.strip())
    return outcomes
