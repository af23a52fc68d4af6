"""Machines that meet through a VPN only, such as Tailscale: tunnels are left out until they are asked for by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ringfort.identity.namespace import NetworkNamespace
from tests.helpers.namespaces import Host, lan, needs_namespaces

pytestmark = [needs_namespaces, pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="needs /dev/net/tun")]

ROOT = Path(__file__).parents[2]
ADDRESSES = ("100.64.0.1", "100.64.0.2")
PROGRAM = """
import numpy as np, ringfort
with ringfort.init() as ctx:
    x = np.full(100_000, ctx.rank + 1.0)
    ctx.all_reduce(x)
    print("sum", x[0], "of", ctx.world_size, flush=True)
"""


def ringfort_run(host: Host, key: str, folder: Path, *options: str) -> subprocess.Popen[str]:
    variables = {"RINGFORT_KEY": key, "RINGFORT_HOME": str(folder / host.namespace)}
    command = [sys.executable, "-m", "ringfort", *options]
    return host.start(*command, variables=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_tunnel_is_used_if_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    key = NetworkNamespace.generate().join_code()
    with lan(2, machine_ids=True) as net:
        for host in net.hosts:
            host.set_link("down")  # there is no other way between the two
        ends = [f"{host.namespace}={address}" for host, address in zip(net.hosts, ADDRESSES, strict=True)]
        worker = str(ROOT / "tests" / "workers" / "tunnel.py")
        tunnel = subprocess.Popen([sys.executable, worker, *ends], stdout=subprocess.PIPE, text=True)
        try:
            assert tunnel.stdout is not None
            assert tunnel.stdout.readline() == "up\n"
            doctor = ringfort_run(net.hosts[0], key, tmp_path, "doctor").communicate(timeout=60)[0]
            assert "tailscale0" in doctor
            assert "it is a tunnel (a VPN or a virtual machine); ask for it by name to use it" in " ".join(
                doctor.split()
            )
            options = ["run", "--nodes", "2", "--interface", "tailscale0", "--peer", ADDRESSES[0]]
            runs = [ringfort_run(host, key, tmp_path, *options, str(tmp_path / "program.py")) for host in net.hosts]
            words = [run.communicate(timeout=60)[0] for run in runs]
            assert [run.returncode for run in runs] == [0, 0], "\n".join(words)
            assert "".join(words).count("sum 3.0 of 2") == 2
        finally:
            tunnel.kill()
            tunnel.communicate()
