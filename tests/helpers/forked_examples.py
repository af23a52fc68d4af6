"""Examples as processes that are forked from one that has loaded their libraries: loading Lightning takes seconds.

The test's side is `Forker`. What an example prints goes to a file, which may be read while it runs.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

PATIENCE = 60.0
"""Seconds for something that takes one on an idle machine."""


class Example:
    """A running example."""

    def __init__(self, forker: Forker, pid: int, words: Path) -> None:
        self._forker = forker
        self.pid = pid
        self._words = words
        self._code: int | None = None

    @property
    def words(self) -> str:
        """What it has printed so far."""
        return self._words.read_text()

    def says(self, text: str) -> None:
        """Wait until it has printed something."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.words:
            assert time.monotonic() < deadline, f"no {text!r} in:\n{self.words}"
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill it, if it runs, and wait for its end."""
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.end()

    def end(self) -> int:
        """Wait for its end, and return its exit code; that of a signal is negative."""
        deadline = time.monotonic() + PATIENCE
        while self._code is None:
            assert time.monotonic() < deadline, f"{self.pid} has not ended:\n{self.words}"
            self._code = self._forker.ask("poll", self.pid)
            time.sleep(0.02)
        return self._code


class Forker:
    """Starts examples. Not for use from several threads."""

    def __init__(self, folder: Path, *libraries: str) -> None:
        self._folder = folder
        self._started = list[Example]()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.forked_examples", *libraries],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "RINGFORT_HOME": str(folder / "home")},
        )  # fmt: skip

    def start(self, program: Path, *arguments: str, **variables: str) -> Example:
        """Start an example."""
        words = self._folder / f"words-{len(self._started)}"
        words.touch()
        self._started.append(Example(self, self.ask("start", str(program), arguments, variables, str(words)), words))
        return self._started[-1]

    def ask(self, *what: object) -> Any:
        """Let the process do something, and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(what), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """Kill the examples that still run, and end."""
        for example in self._started:
            example.kill()
        self._process.communicate()


# --- the process ------------------------------------------------------------------------------------------------------


def main() -> None:
    for library in sys.argv[1:]:
        import_module(library)
    for line in sys.stdin:
        verb, *what = json.loads(line)
        if verb == "poll":
            ended, status = os.waitpid(what[0], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        elif (answer := os.fork()) == 0:
            _run(*what)
        print(json.dumps(answer), flush=True)
    os._exit(0)  # torch takes seconds to go in good order


def _run(program: str, arguments: list[str], variables: Mapping[str, str], words: str) -> NoReturn:
    """In the forked process."""
    code = 1
    try:
        file = os.open(words, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ |= variables
        sys.argv = [program, *arguments]
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")
        code = 0
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
