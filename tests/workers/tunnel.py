"""A VPN in user space: `tunnel.py NAMESPACE=ADDRESS NAMESPACE=ADDRESS` makes an interface `tailscale0` in each of two
network namespaces, and carries packets between the two until it is killed. Like real ones it has no multicast."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
from ipaddress import ip_address
from pathlib import Path

NAME = "tailscale0"
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 1, 0x1000
_CLONE_NEWNET = 0x40000000


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    ends = []
    for argument in sys.argv[1:]:
        namespace, address = argument.split("=")
        with Path("/run/netns", namespace).open() as place:
            if libc.setns(place.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", NAME.encode(), _IFF_TUN | _IFF_NO_PI))
        subprocess.run(["ip", "address", "add", f"{address}/24", "dev", NAME], check=True)
        subprocess.run(["ip", "link", "set", NAME, "mtu", "1280", "up"], check=True)
        ends.append(end)
    print("up", flush=True)
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    while True:
        for end in select.select(ends, [], [])[0]:
            packet = os.read(end, 65536)
            if packet[0] >> 4 == 4 and not ip_address(packet[16:20]).is_multicast:
                os.write(other[end], packet)


if __name__ == "__main__":
    main()
