"""What `ringfort run` keeps, shows and serves of its ranks, with real processes."""

from __future__ import annotations

import codecs
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.test_run import PATIENCE, ROOT, WORKER, run
from tests.helpers.terminal import Screen


def test_both_streams_of_each_rank_are_kept_in_order_as_they_were_written_and_only_some_are_printed(
    tmp_path: Path,
) -> None:
    logs = tmp_path / "logs"
    code, out, err = run("-n", "2", "--log-dir", str(logs), "--tee", "1", WORKER, "chatter", str(logs / "rank-N.log"))
    assert (code, out, err) == (0, "[1] 0\x07\n[1] 2\x07\n", "[1] 1\x07\n[1] 3\x07\n")
    written = b"0\x07\n1\x07\n2\x07\n3\x07\n"
    assert {path.name: path.read_bytes() for path in logs.iterdir()} == dict.fromkeys(
        ("rank-0.log", "rank-1.log"), written
    )


def test_when_files_cannot_grow_any_more_that_is_said_once_and_the_run_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ringfort.cli", "run", "--log-dir", str(tmp_path), WORKER, "flood"]
    ended = subprocess.run(
        ["bash", "-c", 'ulimit -f 1024; exec "$@"', "bash", *command],  # 1 MiB a file
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert ended.returncode == 0
    assert len(ended.stdout.splitlines()) == 1501
    assert ended.stdout.endswith("x\n[0] done\n")
    (said,) = ended.stderr.splitlines()
    assert re.fullmatch(rf"ringfort run: cannot keep the output of rank 0 in {tmp_path}: File too large\. .*", said)
    assert (tmp_path / "rank-0.log").stat().st_size == 1 << 20


@contextmanager
def in_terminal(*arguments: str) -> Iterator[tuple[Screen, Callable[[Callable[[list[str]], bool]], bool]]]:
    """`ringfort run` in a terminal: its screen, and how to read on until the rows are as wanted or nothing comes."""
    ours, theirs = pty.openpty()
    screen, text = Screen(), codecs.getincrementaldecoder("utf-8")()
    variables = {"PYTHONPATH": str(ROOT / "src"), "TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "120", "LINES": "24"}
    launcher = subprocess.Popen(
        [sys.executable, "-m", "ringfort.cli", "run", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, **variables},
    )
    os.close(theirs)

    def read_until(is_wanted: Callable[[list[str]], bool]) -> bool:
        while not is_wanted(screen.rows):
            try:
                screen.feed(text.decode(os.read(ours, 65536)))
            except OSError:  # Linux says so when the other side has closed
                return False
        return True

    try:
        with launcher:
            yield screen, read_until
            assert launcher.wait(PATIENCE) == 0
    finally:
        launcher.kill()
        os.close(ours)


def test_in_a_terminal_the_status_stands_below_the_bars_and_is_gone_at_the_end(tmp_path: Path) -> None:
    pytest.importorskip("tqdm")
    status = re.compile(r"step [\d,]+ · loss 0\.5 · 2 ranks · [\d,]+ steps/s")

    def is_drawn(rows: list[str]) -> bool:
        bars = [row[:10] for row in rows[-3:-1]]
        return bars == ["[0] train:", "[1] train:"] and status.match(rows[-1]) is not None

    with in_terminal("-n", "2", WORKER, "step", str(tmp_path / "end"), "bar") as (screen, read_until):
        assert read_until(is_drawn), screen.rows
        assert sorted(screen.rows[:2]) == ["[0] first word", "[1] first word"]
        (tmp_path / "end").touch()
        assert not read_until(lambda _: False)
    assert not any(status.match(row) for row in screen.rows)
    assert sorted(row[:10] for row in screen.rows[2:]) == ["", "[0] train:", "[1] train:"]
