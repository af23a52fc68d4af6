"""What the ranks of tests/unit/launch/test_local_ranks.py do, by name: `python -m tests.workers.local_ranks NAME`."""

from __future__ import annotations

import os
import signal
import socket
import sys

from ringfort.config import Environment
from ringfort.errors import PeerLostError
from ringfort.launch.local_ranks import LocalRanks, report

ENVIRONMENT = Environment.from_mapping()
MASTER = (ENVIRONMENT.master_addr or "", ENVIRONMENT.master_port or 0)


def tell() -> None:
    report(
        rank=ENVIRONMENT.rank,
        world_size=ENVIRONMENT.world_size,
        master=f"{ENVIRONMENT.master_addr}:{ENVIRONMENT.master_port}",
        listens=ENVIRONMENT.listen_fd is not None,
        threads=os.environ["OMP_NUM_THREADS"],
        extra=os.environ.get("EXTRA"),
        session=os.getsid(0) == os.getpid(),
    )


def connect() -> None:
    """Rank 1 reaches rank 0 through the socket that the parent opened."""
    if ENVIRONMENT.rank == 0:
        with socket.socket(fileno=ENVIRONMENT.listen_fd) as listener, listener.accept()[0] as peer:
            report(heard=peer.recv(5).decode())
    else:
        with socket.create_connection(MASTER) as peer:
            peer.sendall(b"hello")


def chatter() -> None:
    print("a library says hello")
    print("[1, 2]")
    report(text="line\nbreak", long="x" * 300_000)
    sys.stdout.write('{"unended": true}')


def fail_one() -> None:
    if ENVIRONMENT.rank == 1:
        print("noise\n" * 50_000 + "first line\nlast line", file=sys.stderr)
        sys.exit(3)
    signal.pause()


def victim_first() -> None:
    """Rank 0 ends first, because rank 1 went away; then rank 1 says what was really wrong."""
    if ENVIRONMENT.rank == 0:
        raise PeerLostError(1, "closed its socket")
    try:
        with socket.create_connection(MASTER) as peer:
            peer.recv(1)  # until rank 0 is gone
    except ConnectionError:
        pass
    raise ValueError("the real cause")


def kill_one() -> None:
    if ENVIRONMENT.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def wait() -> None:
    report(ready=True)
    signal.pause()


def stubborn() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait()


def nest() -> None:
    """A parent whose ranks wait: it tells their processes, and waits to be killed."""
    with LocalRanks("tests.workers.local_ranks", 2, ["wait"]) as ranks:
        for ready, _ in enumerate(ranks.messages(), start=1):
            if ready == 2:
                report(pids=ranks.pids)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
