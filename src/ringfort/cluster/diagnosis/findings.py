"""Looks at this machine and its network for the doctor. `checks.py` judges what it finds."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import secrets
import shutil
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ringfort.cluster.diagnosis.checks import FIREWALLS, MDNS_PORT, Findings, Torch
from ringfort.cluster.discovery.interfaces import Choice, Interface, choose
from ringfort.cluster.discovery.mdns import THIS_MACHINE, browse, interface_troubles, machines_of, trouble_of
from ringfort.cluster.discovery.static import parse_peers
from ringfort.cluster.discovery.system import list_interfaces, run_tool
from ringfort.cluster.net.profile import find_accelerators, own_version
from ringfort.cluster.net.waiting import within
from ringfort.cluster.node import ClusterNode
from ringfort.config import AutoDiscoveryConfig, Environment, format_address
from ringfort.errors import ConfigError, DistributedError, IdentityError, TransportError
from ringfort.identity.keypair import NodeIdentity, key_path
from ringfort.identity.store import DEFAULT_CLUSTER, ClusterStore, current_namespace
from ringfort.transport import tcp

LISTEN_SECONDS: Final = 1.5
"""Seconds to listen for announcements and to connect to peers. Zeroconf asks after 0.1 s and again after 1 s."""
_ANSWER_SECONDS: Final = 2.0
"""Seconds for one connection, or for our own multicast to return. Both usually take milliseconds."""
_TOOL_TIMEOUT: Final = 5.0
"""Seconds for a firewall tool to answer."""
_TORCH_TIMEOUT: Final = 30.0
"""Seconds to import torch and list its GPUs, which takes two to ten on a cold disk."""
_MDNS_GROUP: Final = "224.0.0.251"
_QUESTION: Final = b"\x09_ringfort\x04_tcp\x05local\x00\x00\x0c\x00\x01"
"""An ordinary mDNS query for `_ringfort._tcp.local`, so that other software handles it as usual."""

_UFW_SETTINGS: Final = Path("/etc/ufw/ufw.conf")
"""Readable by all users, unlike `ufw status`, which answers only root."""


async def gather_findings(wanted: Sequence[str] = (), peers: Sequence[str] = ()) -> Findings:
    """Look at everything, in about two seconds. Raise `ConfigError` for an invalid peer address, and nothing else."""
    named = parse_peers(peers)
    environment = Environment.from_mapping()
    choice, choice_error = _choice(wanted)
    usable = Choice(()) if choice is None else choice
    key, cluster, network, key_error = _identity(environment)
    may_meet = key and cluster and usable.interfaces  # else joining would create a key and a cluster, or find nobody
    (heard, troubles), multicast, ports, answers, (own_token, met, refusals) = await asyncio.gather(
        browse(usable, LISTEN_SECONDS),
        _hear_all(usable),
        asyncio.gather(*(_connect_self(address) for address in usable.addresses)),
        asyncio.gather(*(_answers(host, port) for host, port in named)),
        asyncio.to_thread(_meet, wanted, peers if may_meet else None),
    )
    announced = [one for one in heard if one.token != own_token]
    mdns_errors = [(trouble.what, trouble.fix) for trouble in troubles if usable.interfaces and not trouble.interface]
    commands = {name: firewall.command for name, firewall in FIREWALLS.items()}
    firewall, hidden = await asyncio.to_thread(look_at_firewalls, commands)
    accelerators = await asyncio.to_thread(_accelerators)
    addresses = [format_address(host, port) for host, port in named]
    return Findings(
        choice=choice,
        choice_error=choice_error,
        multicast=multicast,
        announced=machines_of((one.addresses for one in announced if one.network == network), usable),
        other_clusters=machines_of((one.addresses for one in announced if one.network != network), usable),
        mdns_error=mdns_errors[0] if mdns_errors else None,
        ports=dict(zip(usable.addresses, ports, strict=True)),
        peers={address: why for address, (why, _) in zip(addresses, answers, strict=True)},
        segments={address: size for address, (why, size) in zip(addresses, answers, strict=True) if not why},
        firewall=firewall,
        firewall_hidden=hidden,
        torch=await asyncio.to_thread(_torch, is_to_be_asked=bool(accelerators)),
        accelerators=accelerators,
        platform=sys.platform,
        clock=time.time(),
        key=key,
        key_error=key_error,
        cluster=cluster,
        version=own_version(),
        met=met,
        refusals=refusals,
    )


def _choice(wanted: Sequence[str]) -> tuple[Choice | None, str]:
    try:
        return choose(list_interfaces(), wanted), ""
    except ConfigError as exc:
        return None, str(exc)


def _meet(wanted: Sequence[str], peers: Sequence[str] | None) -> tuple[str, dict[str, str], tuple[str, ...]]:
    """Join as an observer for a moment. Return its token, the versions of the connected peers, and the refusals."""
    if peers is None:
        return "", {}, ()
    try:
        with ClusterNode(AutoDiscoveryConfig(interfaces=tuple(wanted), peers=tuple(peers)), slots=0) as node:
            time.sleep(LISTEN_SECONDS)
            views = node.snapshot()
            here = next(view.host for view in views if view.is_self)
            met = {
                f"{THIS_MACHINE if view.host == here else view.name or view.peer} ({view.address})": view.version
                for view in views
                if not view.is_self
            }
            return node.peer_id.rpartition(".")[2], met, node.refusals()
    except DistributedError:  # whatever prevents the start has a check of its own
        return "", {}, ()


async def _hear_all(choice: Choice) -> dict[str, str]:
    silent = {trouble.interface: trouble.what for trouble in interface_troubles(choice)}
    found: dict[str, str] = {}
    for interface in choice.interfaces:
        if any(":" not in address for address in interface.addresses):
            found[interface.name] = silent.get(interface.name) or await _hear(interface)
    return found


async def _hear(interface: Interface) -> str:
    """Return why a query that is sent on an interface is not received on it; empty if it is. The kernel returns
    multicast to the sender's own machine through the same firewall that packets from others have to pass."""
    address = socket.inet_aton(next(address for address in interface.addresses if ":" not in address))
    number = struct.pack("!H", secrets.randbelow(65535) + 1)
    question = number + b"\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00" + _QUESTION
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError, AttributeError):  # macOS needs it beside the other, some kernels lack it
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind(("", MDNS_PORT))
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(_MDNS_GROUP) + address)
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, address)
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
            sock.setblocking(False)
            sock.sendto(question, (_MDNS_GROUP, MDNS_PORT))
            await within(_ANSWER_SECONDS, _wait_for(sock, question))
        except TimeoutError:
            return "sent, but not heard"
        except OSError as exc:
            return trouble_of(exc).what if exc.errno == errno.EADDRINUSE else f"refused by the system ({exc.strerror})"
    return ""


async def _wait_for(sock: socket.socket, question: bytes) -> None:
    while await asyncio.get_running_loop().sock_recv(sock, 2048) != question:
        pass


async def _connect_self(address: str) -> str:
    """Return why connections to one of this machine's own addresses fail; empty if they do not."""
    try:
        server = tcp.listen(address, 0)
    except TransportError as exc:
        return str(exc)
    with server:  # the kernel accepts the connection
        why, _ = await _answers(address, server.getsockname()[1])
    return why


async def _answers(host: str, port: int) -> tuple[str, int]:
    """Return why a connection fails, and TCP's maximum segment size if it succeeds."""
    try:
        _, writer = await within(_ANSWER_SECONDS, asyncio.open_connection(host, port))
    except TimeoutError:
        return "no answer", 0
    except (OSError, UnicodeError) as exc:
        return _in_words(exc), 0
    try:
        sock: socket.socket = writer.get_extra_info("socket")
        return "", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    except OSError:
        return "", 0
    finally:
        writer.close()


def _in_words(exc: Exception) -> str:
    """Return the system's message: asyncio's message for a refused connection only repeats the address."""
    if isinstance(exc, OSError) and exc.errno is not None and not isinstance(exc, socket.gaierror):
        return os.strerror(exc.errno)
    return str(getattr(exc, "strerror", None) or exc)


def look_at_firewalls(
    commands: Mapping[str, Sequence[str]], ufw_settings: Path = _UFW_SETTINGS, timeout: float = _TOOL_TIMEOUT
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Run the tools that are installed. Return the output of those that answer this user, and the names of the rest."""
    found: dict[str, str] = {}
    hidden: list[str] = []
    for name, command in commands.items():
        if shutil.which(command[0]) is None:
            continue
        done = run_tool(*command, timeout=timeout)
        if done is not None and (done.returncode == 0 or "not running" in done.stdout + done.stderr):
            found[name] = done.stdout or done.stderr
        else:
            hidden.append(name)
    with suppress(OSError, UnicodeDecodeError):
        found.setdefault("ufw", ufw_settings.read_text(encoding="utf-8"))
    return found, tuple(name for name in hidden if name not in found)


def _accelerators() -> tuple[str, ...]:
    import psutil

    found = find_accelerators(psutil.virtual_memory().total)
    return tuple(f"{one.name} ({one.memory / 2**30:.0f} GiB)" if one.memory else one.name for one in found)


def _torch(*, is_to_be_asked: bool) -> Torch | None:
    """Return the installed torch, as its files describe it: importing it takes seconds. If there is a GPU, a separate
    process asks torch whether it can use it."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    try:
        text = Path(spec.submodule_search_locations[0], "version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        text = ""
    version, cuda = parse_torch_version(text)
    knows = any(point.name == "ringfort" for point in entry_points(group="torch.backends"))
    devices, error = _ask_torch() if is_to_be_asked and cuda else (None, "")
    return Torch(version=version, cuda=cuda, knows_ringfort=knows, devices=devices, error=error)


def parse_torch_version(text: str) -> tuple[str, str]:
    """Return the versions of torch and of its CUDA from the text of torch/version.py."""
    found = dict(re.findall(r"^(__version__|cuda)\b[^=\n]*= *['\"]([^'\"]+)['\"]", text, re.MULTILINE))
    return found.get("__version__", ""), found.get("cuda", "")


def _ask_torch() -> tuple[tuple[str, ...] | None, str]:
    """Return the GPUs that torch can use, and why it could not be asked."""
    code = (
        "import json, torch; "
        "print(json.dumps([torch.cuda.get_device_name(one) for one in range(torch.cuda.device_count())]))"
    )
    done = run_tool(sys.executable, "-c", code, timeout=_TORCH_TIMEOUT)
    if done is None:
        return None, f"no answer in {_TORCH_TIMEOUT:g} s"
    lines = done.stdout.splitlines() or [""]
    try:
        return tuple(str(name) for name in json.loads(lines[-1])), ""
    except ValueError:
        return None, (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]


def _identity(environment: Environment) -> tuple[str, str, str, tuple[str, str] | None]:
    """Return this node's id, its cluster's name and network id, and what is wrong. Create nothing that is missing."""
    key = cluster = network = ""
    try:
        home = environment.home_folder
        path = key_path(home, make=False)
        if path.exists():
            key = NodeIdentity.load_or_generate(path).peer_id
        named = environment.key is not None or environment.cluster not in (None, DEFAULT_CLUSTER)
        if named or DEFAULT_CLUSTER in ClusterStore(home).names():
            namespace = current_namespace(environment)
            cluster, network = namespace.name, namespace.network_id.hex()
    except IdentityError as exc:
        return key, cluster, network, (f"{exc.path}: {exc.why}", exc.mend)
    except DistributedError as exc:
        return key, cluster, network, (str(exc), "unset RINGFORT_KEY or RINGFORT_CLUSTER, or correct it")
    return key, cluster, network, None
