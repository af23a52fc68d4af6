"""A process that has loaded torch once and forks the ranks of one group after the other: loading it takes seconds.

The test's side is `Zygote`. Each rank runs a function of `tests.torch.scenarios`, or of the module of `tests`
that is named before a dot; what that returns comes back as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple


class Outcome(NamedTuple):
    """What became of one rank: its exit code (a signal's is negative), what it returned, and what it wrote."""

    code: int
    value: Any
    words: str


class Zygote:
    """Runs scenarios. Not for use from several threads."""

    def __init__(self) -> None:
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.torch.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=variables,
        )

    def run(self, scenario: str, world_size: int, *arguments: Any, patience: float = 60.0, **variables: str) -> Any:
        """What each rank returned, if all ended well."""
        outcomes = self.outcomes(scenario, world_size, *arguments, patience=patience, **variables)
        for rank, outcome in enumerate(outcomes):
            assert outcome.code == 0, f"rank {rank} ended with {outcome.code}:\n{outcome.words}"
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, scenario: str, world_size: int, *arguments: Any, patience: float = 60.0, **variables: str
    ) -> list[Outcome]:
        """What became of each rank. One that is not done after `patience` seconds is killed, and says where it was."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps([scenario, world_size, arguments, patience, variables]), file=process.stdin, flush=True)
        return [Outcome(*outcome) for outcome in json.loads(process.stdout.readline())]

    def close(self) -> None:
        self._process.communicate()


# --- the process ------------------------------------------------------------------------------------------------------


def main() -> None:
    import_module("ringfort.torch").register()  # where Ringfort is not installed but on the path
    import_module("ringfort.torch.create")
    import_module("tests.torch.scenarios")
    for line in sys.stdin:
        scenario, world_size, arguments, patience, variables = json.loads(line)
        with tempfile.TemporaryDirectory() as folder:
            outcomes = _run(scenario, world_size, arguments, patience, variables, Path(folder))
        print(json.dumps(outcomes), flush=True)
    os._exit(0)  # torch takes seconds to go in good order


def _run(
    scenario: str, world_size: int, arguments: list[Any], patience: float, variables: dict[str, str], folder: Path
) -> list[Outcome]:
    _find(scenario)  # so that what it needs is loaded once, and not by every rank
    sys.stdout.flush()
    pids: list[int] = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            _rank(scenario, rank, world_size, arguments, variables, folder)
        pids.append(pid)
    codes: dict[int, int] = {}
    give_up = time.monotonic() + patience
    while len(codes) < world_size:
        for rank, pid in enumerate(pids):
            if rank not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > give_up:
                    os.kill(pid, signal.SIGABRT if time.monotonic() < give_up + 1 else signal.SIGKILL)
        time.sleep(0.002)
    return [_outcome(codes[rank], folder / f"value-{rank}", folder / f"words-{rank}") for rank in range(world_size)]


def _find(scenario: str) -> Any:
    module, _, function = scenario.rpartition(".")
    return getattr(import_module(f"tests.{module or 'torch.scenarios'}"), function)


def _outcome(code: int, value: Path, words: Path) -> Outcome:
    return Outcome(code, json.loads(value.read_text()) if value.exists() else None, words.read_text())


def _rank(
    scenario: str, rank: int, world_size: int, arguments: list[Any], variables: dict[str, str], folder: Path
) -> None:
    """In the forked process; never returns."""
    import faulthandler

    code = 1
    try:
        words = os.open(folder / f"words-{rank}", os.O_CREAT | os.O_WRONLY)
        os.dup2(words, 1)
        os.dup2(words, 2)
        faulthandler.enable(file=2)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "STORE": str(folder / "store"), **variables}
        if "FAR" in variables or variables.get("DEVICE") == "far":
            import_module("tests.torch.far_device").install()
        if "DEVICE" in variables:  # where the scenario's tensors are made
            import_module("torch").set_default_device(variables["DEVICE"])
        value = _find(scenario)(rank, world_size, *arguments)
        (folder / f"value-{rank}").write_text(json.dumps(value))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
