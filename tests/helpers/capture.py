"""What passes a switch of a test network, as bytes.

`python -m tests.helpers.capture INTERFACE FILE` in the namespace of the switch writes the payload of every TCP
segment to FILE until it is killed. It prints a line when it listens.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the switch, where this runs, has no loopback, which that module tries
    from tests.helpers.namespaces import Lan

ROOT = Path(__file__).parents[2]

_EVERYTHING = 3  # ETH_P_ALL
_IPV4, _TCP = 0x0800, 6


@contextmanager
def captured(net: Lan, file: Path) -> Iterator[None]:
    """Write what the first host sends and receives over TCP to `file`."""
    command = ["ip", "netns", "exec", net.switch, sys.executable, "-m", "tests.helpers.capture", "h0s0", str(file)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "listening\n"
            yield
        finally:
            process.kill()


def _payload(frame: memoryview) -> memoryview:
    """The payload of an Ethernet frame, if that is a TCP segment over IPv4; otherwise empty."""
    if int.from_bytes(frame[12:14], "big") != _IPV4 or frame[14 + 9] != _TCP:
        return frame[:0]
    ip = 14
    tcp = ip + (frame[ip] & 15) * 4
    end = ip + int.from_bytes(frame[ip + 2 : ip + 4], "big")
    return frame[tcp + (frame[tcp + 12] >> 4) * 4 : end]


def main(interface: str, file: str) -> None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERYTHING)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)
        sock.bind((interface, 0))
        print("listening", flush=True)
        buffer = memoryview(bytearray(1 << 17))  # the kernel hands segments over before it cuts them
        with Path(file).open("wb", buffering=0) as out:
            while True:
                out.write(_payload(buffer[: sock.recv_into(buffer)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
