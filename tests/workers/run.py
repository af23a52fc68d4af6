"""What the ranks of tests/cluster/test_run.py do, by name: `ringfort run tests/workers/run.py NAME`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import ringfort
from ringfort.training import average_gradients

RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])


def tell() -> None:
    """Meets the others, twice, and says what it was told."""
    ringfort.join(WORLD_SIZE - 1).close()
    with ringfort.init() as ctx:
        total = ctx.all_reduce(np.array([ctx.rank + 1]))
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    print("told", *(os.environ[name] for name in names), "sum", *total, "arguments", *sys.argv[2:])


def join() -> None:
    ringfort.join(min_peers=1)


def fail() -> None:
    """Rank 1 fails in the middle; the others lose it."""
    with ringfort.init() as ctx:
        ctx.barrier()
        if ctx.rank == 1:
            sys.stderr.write("noise\n" * 10_000)
            print("the real cause", file=sys.stderr)
            sys.exit(3)
        ctx.barrier()


def kill() -> None:
    """Rank 1 is killed; the others would wait for ever."""
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def wait() -> None:
    """Says its process and that of a child of its own, and waits."""
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    print("pids", os.getpid(), child.pid)
    signal.pause()


def stubborn() -> None:
    """Ends by no signal that can be caught."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    wait()


def careful() -> None:
    """Writes a last word when it is asked to end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved")))
    wait()


def listen() -> None:
    print("heard", repr(sys.stdin.read()))


def talk() -> None:
    """Until nobody listens."""
    while True:
        print("word " * 100)


def follow() -> None:
    """Rank 0 waits for a line from the test in the file it is given; then all end well. Before that they train a
    little."""
    with ringfort.init() as ctx:
        for _ in range(3):
            average_gradients(ctx, [np.ones(4, np.float32)])
        print("pids", os.getpid())
        if ctx.rank == 0:
            Path(sys.argv[2]).read_text()
        ctx.barrier()


def crash_once() -> None:
    """Rank 1 is killed in the middle of the first attempt; the next one ends well."""
    with ringfort.init() as ctx:
        ctx.barrier()
        if ctx.rank == 1 and os.environ["RINGFORT_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        total = ctx.all_reduce(np.array([ctx.rank + 1]))
    names = ("RINGFORT_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    print("restarts", *(os.environ[name] for name in names), "sum", *total)


def work() -> None:
    """Steps without a pause, until rank 0 finds the file it is given."""
    with ringfort.init() as ctx:
        print("pids", os.getpid())
        while not ctx.broadcast(np.array([Path(sys.argv[2]).exists()]))[0]:
            ctx.all_reduce(np.ones(1000))


def bars() -> None:
    """A bar of tqdm's that is half way until rank 0 gets a line from the test in the file it is given."""
    from tqdm import tqdm

    with ringfort.init() as ctx:
        bar = tqdm(total=2, desc="train")
        bar.update(1)
        bar.refresh()
        ctx.barrier()
        if ctx.rank == 0:
            print("half way")
            Path(sys.argv[2]).read_text()
        ctx.barrier()
        bar.update(1)
        bar.close()


def chatter() -> None:
    """Writes to both streams in turn, each time when the launcher has kept what was written before, in the file that
    it is given."""
    log, written = Path(sys.argv[2].replace("N", str(RANK))), b""
    for number in range(4):
        word = b"%d\x07\n" % number
        os.write(1 + number % 2, word)
        written += word
        while log.read_bytes() != written:
            time.sleep(0.001)


def flood() -> None:
    """Prints 1.5 MB, and then a last word."""
    sys.stdout.write(("x" * 999 + "\n") * 1500)
    print("done")


def step() -> None:
    """Steps until rank 0 finds the file it is given; with a bar of tqdm's if there is another argument."""
    tick = lambda: None  # noqa: E731
    if sys.argv[3:]:
        from tqdm import tqdm

        tick = tqdm(desc="train").update
    with ringfort.init() as ctx:
        print("first word")
        while not ctx.broadcast(np.array([Path(sys.argv[2]).exists()]))[0]:
            time.sleep(0.01)  # computing
            average_gradients(ctx, [np.ones(4, np.float32)])
            ringfort.log(loss=0.5)
            tick()


def train() -> None:
    """Data-parallel descent on a least-squares problem, each rank with a share of the samples."""
    random = np.random.default_rng(0)
    inputs, weights = random.normal(size=(240, 4)), np.array([1.0, -2.0, 3.0, 0.5])
    targets = inputs @ weights
    with ringfort.init() as ctx:
        mine = slice(ctx.rank, None, ctx.world_size)
        guess = np.zeros(4)
        for _ in range(200):
            slope = inputs[mine].T @ (inputs[mine] @ guess - targets[mine])
            guess -= 0.002 * ctx.all_reduce(slope)
        print("error", f"{np.abs(guess - weights).max():.6f}")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
