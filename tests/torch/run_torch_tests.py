"""Torch's own tests of `torch.distributed`, from its wheel, with the backend `ringfort`.

    python -m tests.torch.run_torch_tests [--world-size 2|4] [--only NAME ...] [--list]

Every test must pass or be in `not_applicable.txt`, with the reason; one that is there and passes is a failure too, so
that the list stays true. A test is a group of processes of its own, forked from this one, in which torch is loaded.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

LIST = Path(__file__).with_name("not_applicable.txt")
PATIENCE = 60
"""Seconds that a test may take; torch's own limit is five minutes, which a hang would cost every time."""


def not_applicable(world_size: int, path: Path = LIST) -> dict[str, str]:
    """The tests that do not apply with `world_size`, and why. Raises `ValueError` for a line that makes no sense."""
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        name, worlds, reason = ([part.strip() for part in line.split("|", 2)] + ["", ""])[:3]
        if not name.startswith("test_") or not reason or not set(worlds.split()) <= {"2", "4"}:
            raise ValueError(f"{path}:{number}: must be `test_name | 2 4 | reason`, not {line!r}")
        if str(world_size) in worlds.split():
            found[name] = reason
    return found


GUISES = ("ringfort", "gloo", "mpi")
"""Many tests are for torch's own backends by name, though nothing in them is: where the decorators of one skip it for
its name, it is tried as those would be. What then runs is Ringfort all the same."""


class Disguised(str):
    """The name `ringfort`, which says that it is Gloo's too: a test that asks in its middle goes on as on any CPU."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other


@cache
def make_case(guise: str) -> type[Any]:
    """Torch's test case as its module makes it for the backend `guise`, with the backend `ringfort`."""
    torch: Any = import_module("torch")
    import_module("ringfort.torch.create")  # here, and so in all processes that are forked
    common: Any = import_module("torch.testing._internal.common_distributed")
    common.TIMEOUT_DEFAULT = PATIENCE
    # Tests ask these tables, which know only torch's own backends, whether one has a feature.
    for feature in ("ddp", "subgroup"):
        common.DistTestCases.backend_feature[feature].add("ringfort")
    # Torch wants 8 ranks for tests of groups of some ranks, to keep its own runs short. They are of ranks 1 and 2.
    small = int(os.environ["WORLD_SIZE"]) < 3
    common.skip_if_small_worldsize = unittest.skipIf(small, "needs three ranks")
    name = "torch.testing._internal.distributed.distributed_test"
    sys.modules.pop(name, None)
    os.environ["BACKEND"] = guise
    module: Any = import_module(name)
    os.environ["BACKEND"] = "ringfort"
    module.BACKEND = Disguised("ringfort")

    class RingfortTest(module.TestDistBackend, module.DistributedTest._DistTestBase):
        home = module  # what is pickled is looked for by the name of its module: which must be this one then

        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return RingfortTest


def run(names: Sequence[str]) -> Iterator[tuple[str, str, str, float]]:
    """Name, outcome (`passed`, `skipped` or `failed`), words and seconds of each test."""
    for name in names:
        start = time.monotonic()
        # The first guise whose decorators let it run. What it finds missing itself, it misses in any.
        cases = (make_case(guise) for guise in GUISES)
        case = next(
            (case for case in cases if not hasattr(getattr(case, name), "__unittest_skip__")), make_case(GUISES[0])
        )
        sys.modules[case.home.__name__] = case.home
        result = unittest.TestResult()
        case(name).run(result)
        failed = [trace for _, trace in (*result.failures, *result.errors)]
        outcome, words = ("failed", failed[0]) if failed else ("passed", "")
        if not failed and result.skipped:
            outcome, words = "skipped", result.skipped[0][1]
        yield name, outcome, words, time.monotonic() - start


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, choices=(2, 4), default=2)
    parser.add_argument("--only", nargs="*", default=None, help="these tests alone")
    parser.add_argument("--list", action="store_true", help="print the names of all tests and end")
    parser.add_argument("--verbose", action="store_true", help="print the words of each test that does not pass")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"WORLD_SIZE": str(chosen.world_size), "TEMP_DIR": folder}
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        for name in ("barrier", "test_dir", "init_dir"):
            (Path(folder) / name).mkdir()
        names = sorted(name for name in dir(make_case(GUISES[0])) if name.startswith("test_"))
        if chosen.list:
            print(*names, sep="\n")
            return 0
        return report(run(chosen.only or names), not_applicable(chosen.world_size), chosen.verbose)


def report(outcomes: Iterator[tuple[str, str, str, float]], excused: dict[str, str], verbose: bool) -> int:
    """Prints what became of each test; 1 if any is not as the list says."""
    passed, bad, others = 0, 0, 0
    for name, outcome, words, seconds in outcomes:
        passed += outcome == "passed"
        others += outcome != "passed" and name in excused
        last = words.strip().splitlines()[-1] if words.strip() else ""
        wrong = (outcome == "passed") == (name in excused)
        bad += wrong
        note = ""
        if wrong:
            note = "  <- is in not_applicable.txt: remove it" if outcome == "passed" else f"  <- {last}"
        print(f"{outcome:8} {seconds:6.1f} s  {name}{note}", flush=True)
        if verbose and outcome != "passed":
            print(words, flush=True)
    print(f"{passed} passed, {others} do not apply, {bad} are not as they should be", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
