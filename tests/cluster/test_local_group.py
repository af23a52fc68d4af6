"""`ringfort.local`: functions of this process on ranks beside it, what they print and return, and how they fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import ringfort
from ringfort import DistributedContext, DistributedError, InvalidArgumentError, LocalGroup, LocalRunError
from tests.helpers.source import ROOT


@pytest.fixture(scope="module")
def group() -> Iterator[LocalGroup]:
    with ringfort.local(2) as made:
        yield made


def test_every_rank_runs_the_function_and_returns_its_part(group: LocalGroup) -> None:
    offset = 10

    def add(ctx: DistributedContext, x: np.ndarray, *, times: int) -> dict[str, Any]:
        total = x * times + ctx.rank
        ctx.all_reduce(total)
        return {"sum": total, "me": offset + ctx.rank, "of": ctx.world_size}

    first, second = group.run(add, np.ones(3), times=2)
    assert first["sum"].tolist() == second["sum"].tolist() == [5, 5, 5]
    assert (first["me"], second["me"], first["of"]) == (10, 11, 2)


def test_what_ranks_print_comes_with_the_rank_in_front(group: LocalGroup, capsys: pytest.CaptureFixture[str]) -> None:
    def say(ctx: DistributedContext) -> None:
        print("out", ctx.rank)
        print("err", ctx.rank, file=sys.stderr)
        print("no end", end="")

    assert group.run(say) == [None, None]
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == ["[0] no end", "[0] out 0", "[1] no end", "[1] out 1"]
    assert sorted(shown.err.splitlines()) == ["[0] err 0", "[1] err 1"]


def test_ranks_stay_for_the_next_call(group: LocalGroup) -> None:
    assert group.run(lambda ctx: os.getpid()) == group.pids


def test_ranks_share_the_cores_and_know_their_place(group: LocalGroup) -> None:
    def place(ctx: DistributedContext) -> list[str]:
        return [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]

    assert group.run(place) == [["0", "0", "2", "2"], ["1", "1", "2", "2"]]


def test_a_group_inside_a_rank_is_refused_with_what_to_do(group: LocalGroup) -> None:
    def nest(ctx: DistributedContext) -> str:
        try:
            ringfort.local(2)
        except DistributedError as exc:
            return str(exc)
        return ""

    told = group.run(nest)
    assert told[1].startswith("This process is rank 1 of a local group already. Call ringfort.local() in the notebook")


def test_arguments_and_functions_that_cannot_be_sent_are_refused_before_anything_runs(group: LocalGroup) -> None:
    pids = group.pids
    with pytest.raises(InvalidArgumentError, match=r"args\[1\]='object': cannot be sent .* make it in the function"):
        group.run(lambda ctx, *_: None, 1, object())
    with pytest.raises(InvalidArgumentError, match="lock='lock': cannot be sent"):
        group.run(lambda ctx, lock: None, lock=threading.Lock())
    with pytest.raises(InvalidArgumentError, match="is a method of an object"):
        group.run(group.close)
    assert group.run(lambda ctx: os.getpid()) == pids


def test_two_calls_at_once_are_refused(group: LocalGroup) -> None:
    told: list[str] = []

    class Stream:
        """Where the output of the ranks goes: it makes a call of its own."""

        def write(self, text: str) -> None:
            with pytest.raises(DistributedError) as caught:
                group.run(print)
            told.append(str(caught.value))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", Stream())
        group.run(lambda ctx: print("now") if ctx.rank == 0 else None)
    assert told == ["Another run() of this local group has not ended yet. Wait for it, or interrupt it."]


# --- failures: each of these leaves no ranks, and the next one starts new ones ----------------------------------------


def test_a_result_that_cannot_be_sent_names_the_rank(group: LocalGroup) -> None:
    with pytest.raises(LocalRunError, match=r"Rank 1 raised TypeError: the function returned .* return None, numbers"):
        group.run(lambda ctx: object() if ctx.rank == 1 else None)


def test_a_rank_that_raises_while_others_wait_is_named_with_its_traceback(group: LocalGroup) -> None:
    def fail(ctx: DistributedContext) -> None:
        if ctx.rank == 1:
            raise KeyError("missing")
        ctx.barrier()

    with pytest.raises(LocalRunError) as caught:
        group.run(fail)
    error = caught.value
    assert (error.rank, error.peer, error.type_name, error.is_recoverable) == (1, 1, "KeyError", True)
    assert str(error).startswith("Rank 1 raised KeyError: 'missing'\nAll ranks were stopped; the next run()")
    assert 'raise KeyError("missing")' in error.traceback
    assert "local_group_rank" not in error.traceback
    assert 'raise KeyError("missing")' in str(error.__cause__)
    assert group.pids == []


def test_ctrl_c_reaches_the_ranks(group: LocalGroup, capsys: pytest.CaptureFixture[str]) -> None:
    def wait(ctx: DistributedContext) -> None:
        try:
            ctx.barrier()
            if ctx.rank == 0:
                os.kill(os.getppid(), signal.SIGINT)
            signal.pause()
        finally:
            print("saved", flush=True)

    with pytest.raises(KeyboardInterrupt):
        group.run(wait)
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] saved", "[1] saved"]
    assert group.pids == []


def test_a_rank_that_dies_while_others_wait_is_named_with_its_last_words(group: LocalGroup) -> None:
    def die(ctx: DistributedContext) -> None:
        if ctx.rank == 0:
            print("last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        ctx.barrier()

    with pytest.raises(
        LocalRunError, match="Rank 0 was killed by SIGKILL: last words\nAll ranks were stopped"
    ) as caught:
        group.run(die)
    assert caught.value.type_name == ""
    assert group.pids == []


# --- other groups -----------------------------------------------------------------------------------------------------


def test_one_rank_works_and_a_closed_group_says_so() -> None:
    with ringfort.local(1, variables={"EXTRA": "x"}) as single:
        assert single.run(lambda ctx: [ctx.world_size, os.environ["EXTRA"]]) == [[1, "x"]]
        [pid] = single.pids
        with pytest.raises(LocalRunError, match="Rank 0 ended with exit code 3"):
            single.run(lambda ctx: os._exit(3))
    assert not psutil.pid_exists(pid)
    single.close()
    with pytest.raises(DistributedError, match=r"This local group is closed. Make another one with ringfort.local\(\)"):
        single.run(print)
    with pytest.raises(DistributedError, match="is closed"), single:
        pass


@pytest.mark.parametrize("n", [0, -1, 2.5, "4", None, True])
def test_a_number_of_ranks_that_makes_no_sense_is_refused(n: Any) -> None:
    with pytest.raises(ringfort.InvalidWorldSizeError, match="must be a whole number of at least 1"):
        ringfort.local(n)


def test_the_example_notebook_runs_as_a_script(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "notebook.py")],
        capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "[1] rank 1 of 2 has [3. 3.]" in done.stdout
    assert "Rank 1 raised ValueError: no data here" in done.stdout
    assert "error of the fit" in done.stdout


def test_a_viewer_knows_the_run_by_the_name_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(ctx: DistributedContext) -> str:
        from ringfort.telemetry.trace import own_trace

        return own_trace().header.program

    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/home/me/study.py", raising=False)
    with ringfort.local(1) as made:
        assert made.run(program) == ["study.py"]
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    with ringfort.local(1) as made:
        assert made.run(program) == ["notebook"]
