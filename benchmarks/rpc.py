"""Calls against gRPC for Python and torch.distributed.rpc: small ones, large tensors, and small ones beside a tensor.

Each engine has a process that calls and one that is called. They take turns: in a round each makes its calls for a
moment, and then is frozen until its next.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.parts import table
from ringfort import RpcAgent
from ringfort.backends.tcp import TcpBackend
from ringfort.config import GIB, MIB, DistributedConfig
from ringfort.context import DistributedContext
from ringfort.testing.groups import reserved_addresses

SMALL, LARGE, HUGE = b"sixteen bytes ok", 64 * MIB, GIB
BURST = 0.3
"""Seconds of small calls in a round."""
WORKERS = 8
SECONDS = 120

ENGINES = {
    "ringfort": "this library: encrypted (AEGIS) TCP",
    "plain": 'the same, `encryption="off"`',
    "grpc": "gRPC for Python, synchronous, plaintext; tensors as `bytes`",
    "grpc-tls": "the same over TLS",
    "tensorpipe-tcp": "`torch.distributed.rpc` over TCP alone (uv, basic), plaintext",
    "tensorpipe": "the same with its defaults: shared memory and copies between processes on one host, plaintext",
}
CLAIMS = (
    ("small calls per second, against gRPC in plaintext", "small", 1.5),
    ("64 MiB tensors, against gRPC in plaintext", "large", 2.0),
)
WORST_MS = 20.0


class Caller(NamedTuple):
    """What a client can do: one small call, and one with an array, as it is called."""

    small: Callable[[], object]
    large: Callable[[np.ndarray], int]
    begin_large: Callable[[np.ndarray], Callable[[], bool]]
    """Begins a transfer; returns whether it has ended."""


# --- the engines: each is a client, or a server until its standard input ends -----------------------------------------


def _ours(address: str, rank: int, stack: ExitStack, encryption: Any) -> Caller:
    config = DistributedConfig(encryption=encryption, timeout=SECONDS)
    ctx = DistributedContext(stack.enter_context(TcpBackend(rank, 2, address, config=config)))
    agent = stack.enter_context(RpcAgent(ctx))

    @agent.rpc
    def echo(data: bytes) -> bytes:
        return data

    @agent.rpc
    def size(x: np.ndarray) -> int:
        return x.nbytes

    ctx.barrier()

    def begin(x: np.ndarray) -> Callable[[], bool]:
        return agent.rpc_async(1, "size", x).done

    return Caller(lambda: agent.rpc_sync(1, "echo", SMALL), lambda x: agent.rpc_sync(1, "size", x), begin)


def _grpc(address: str, rank: int, stack: ExitStack, folder: Path | None) -> Caller:
    import grpc

    options = [(f"grpc.max_{way}_message_length", -1) for way in ("send", "receive")]
    if rank == 1:
        from concurrent.futures import ThreadPoolExecutor

        server = grpc.server(ThreadPoolExecutor(WORKERS), options=options)
        handlers = {
            "echo": grpc.unary_unary_rpc_method_handler(lambda data, _: data),
            "size": grpc.unary_unary_rpc_method_handler(
                lambda data, _: str(np.frombuffer(data, np.uint8).nbytes).encode()
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
        if folder is None:
            server.add_insecure_port(address)
        else:
            key, certificate = (folder / name for name in ("key", "certificate"))
            pair = [(key.read_bytes(), certificate.read_bytes())]
            server.add_secure_port(address, grpc.ssl_server_credentials(pair))
        server.start()
        stack.callback(lambda: server.stop(0).wait())
        return Caller(lambda: None, lambda _: 0, lambda _: lambda: True)
    if folder is None:
        channel = grpc.insecure_channel(address, options=options)
    else:
        credentials = grpc.ssl_channel_credentials((folder / "certificate").read_bytes())
        channel = grpc.secure_channel(address, credentials, options=options)
    stack.enter_context(channel)
    grpc.channel_ready_future(channel).result(SECONDS)
    echo, size = channel.unary_unary("/bench/echo"), channel.unary_unary("/bench/size")
    return Caller(
        lambda: echo(SMALL), lambda x: int(size(x.tobytes())), lambda x: size.future(x.tobytes(), timeout=SECONDS).done
    )


def _torch_size(x: Any) -> int:
    return x.nbytes


def _torch_echo(data: bytes) -> bytes:
    return data


def _tensorpipe(address: str, rank: int, stack: ExitStack, ways: Mapping[str, Any]) -> Caller:
    import torch
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://{address}", num_worker_threads=WORKERS, rpc_timeout=SECONDS, **ways
    )
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    stack.callback(rpc.shutdown)
    return Caller(
        lambda: rpc.rpc_sync("rank1", _torch_echo, (SMALL,)),
        lambda x: rpc.rpc_sync("rank1", _torch_size, (torch.from_numpy(x),)),
        lambda x: rpc.rpc_async("rank1", _torch_size, (torch.from_numpy(x),)).done,
    )


def make(engine: str, address: str, rank: int, folder: Path, stack: ExitStack) -> Caller:
    """One side of an engine."""
    if engine in ("ringfort", "plain"):
        return _ours(address, rank, stack, "on" if engine == "ringfort" else "off")
    if engine.startswith("grpc"):
        return _grpc(address, rank, stack, folder if engine == "grpc-tls" else None)
    return _tensorpipe(address, rank, stack, {"_transports": ["uv"], "_channels": ["basic"]} if "tcp" in engine else {})


def side_main(engine: str, address: str, rank: int, folder: Path) -> None:
    """A process: says that it is there, answers what it is asked, and ends when nothing more comes."""
    with ExitStack() as stack:
        caller = make(engine, address, rank, folder, stack)
        print("ready", flush=True)
        arrays = {"large": np.ones(LARGE, np.uint8)}
        for line in sys.stdin:
            what = line.strip()
            if what == "small":
                answer: Any = _burst(caller)
            elif what == "large":
                start = time.perf_counter()
                assert caller.large(arrays["large"]) == LARGE
                answer = time.perf_counter() - start
            else:
                answer = _beside(caller, int(what))
            print(json.dumps(answer), flush=True)


def _burst(caller: Caller) -> float:
    """Small calls a second."""
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < BURST:
        for _ in range(20):
            caller.small()
        calls += 20
    return calls / (time.perf_counter() - start)


def _beside(caller: Caller, nbytes: int) -> dict[str, Any]:
    """Seconds of small calls while a large one runs."""
    x = np.ones(nbytes, np.uint8)
    start = time.perf_counter()
    is_done = caller.begin_large(x)
    times: list[float] = []
    while not is_done():
        before = time.perf_counter()
        caller.small()
        times.append(time.perf_counter() - before)
    return {"seconds": time.perf_counter() - start, "times": times}


# --- measuring --------------------------------------------------------------------------------------------------------


class _Pair:
    """The two processes of an engine."""

    def __init__(self, engine: str, address: str, folder: Path, stack: ExitStack) -> None:
        self._sides: list[subprocess.Popen[str]] = []
        for rank in (1, 0):  # gRPC's client wants a server; ours do not mind
            command = [sys.executable, "-m", "benchmarks.rpc", engine, address, str(rank), str(folder)]
            side = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(side.wait)
            stack.callback(side.kill)
            self._sides.append(side)
        for side in self._sides:
            assert side.stdout is not None
            if side.stdout.readline() != "ready\n":
                raise RuntimeError(f"{engine} did not start")
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for side in self._sides:
            side.send_signal(number)

    def ask(self, what: str) -> Any:
        """Has the client do something. Before and after it both are frozen: some engines are busy while they wait."""
        client = self._sides[1]
        assert client.stdin is not None
        assert client.stdout is not None
        self._signal(signal.SIGCONT)
        client.stdin.write(f"{what}\n")
        client.stdin.flush()
        answer = json.loads(client.stdout.readline())
        self._signal(signal.SIGSTOP)
        return answer

    def stop(self) -> None:
        """Ends both: their standard input ends."""
        self._signal(signal.SIGCONT)
        for side in reversed(self._sides):
            assert side.stdin is not None
            side.stdin.close()
        for side in self._sides:
            side.wait(SECONDS)


def why_not(engine: str) -> str | None:
    """Why an engine cannot be measured here."""
    if engine.startswith("grpc"):
        return None if find_spec("grpc") else "pip install 'ringfort[bench]'"
    if engine.startswith("tensorpipe"):
        if not find_spec("torch"):
            return "pip install torch"
        from torch.distributed import rpc

        return None if rpc.is_available() else "this torch was built without TensorPipe"
    return None


def measure(rounds: int, engines: Sequence[str] = tuple(ENGINES), huge: int = HUGE) -> dict[str, Any]:
    """Medians over rounds, with each engine's in turn."""
    missing = {engine: why for engine in engines if (why := why_not(engine))}
    chosen = [engine for engine in engines if engine not in missing]
    found: dict[str, dict[str, list[float]]] = {engine: {"small": [], "large": []} for engine in chosen}
    beside: dict[str, Any] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ringfort-bench-")))
        _write_certificate(folder)
        addresses = stack.enter_context(reserved_addresses(len(chosen)))
        pairs = {
            engine: _Pair(engine, address, folder, stack) for engine, address in zip(chosen, addresses, strict=True)
        }
        for turn in range(rounds + 1):
            for engine in chosen[:: 1 if turn % 2 == 0 else -1]:
                for what in ("small", "large"):
                    answer = pairs[engine].ask(what)
                    if turn:  # the first warms up
                        found[engine][what].append(answer)
        for engine in chosen:
            answer = pairs[engine].ask(str(huge))
            times = sorted(answer["times"]) or [0.0]
            beside[engine] = {
                "seconds": answer["seconds"],
                "calls": len(answer["times"]),
                "p50_ms": times[len(times) // 2] * 1e3,
                "p99_ms": times[min(len(times) - 1, int(len(times) * 0.99))] * 1e3,
            }
        for pair in pairs.values():
            pair.stop()
    cells = {
        engine: {what: statistics.median(values) for what, values in found[engine].items()} | {"beside": beside[engine]}
        for engine in chosen
    }
    return {"cells": cells, "rounds": rounds, "huge": huge, "missing": missing}


def _write_certificate(folder: Path) -> None:
    """A key and a certificate for 127.0.0.1, for an hour."""
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key").write_bytes(secret)
    (folder / "certificate").write_bytes(certificate.public_bytes(pem))


# --- the page ---------------------------------------------------------------------------------------------------------


def rpc_part(result: Mapping[str, Any]) -> Iterable[str]:
    """What calls cost, beside gRPC and TensorPipe."""
    cells: Mapping[str, Mapping[str, Any]] = result["cells"]
    yield (
        "Two processes on this machine. **Small**: synchronous calls of 16 bytes, one after the other. **64 MiB**: an "
        f"array to a function that returns its size. **Beside**: small calls while an array of {result['huge'] >> 20} "
        f"MiB goes over the same link. Medians of {result['rounds']} rounds; the engines are measured alternately.\n"
    )
    for engine, how in result["missing"].items():
        yield f"`{engine}` was not measured ({how}).\n"
    rows: list[list[str]] = []
    for engine, cell in cells.items():
        beside = cell["beside"]
        rows.append(
            [
                f"`{engine}`: {ENGINES[engine]}",
                f"{cell['small']:,.0f}",
                f"{cell['large'] * 1e3:.1f} ms ({LARGE / cell['large'] / 1e9:.2f} GB/s)",
                f"{beside['p50_ms']:.2f} / {beside['p99_ms']:.2f} ms ({beside['calls']} in {beside['seconds']:.2f} s)",
            ]
        )
    yield from table(["engine", "small calls per second", "64 MiB", "beside: median / 99th percentile"], rows)
    verdicts = [[text, f"{bound:g}", f"{ratio:.2f}", _word(ratio >= bound)] for text, bound, ratio in ratios(cells)]
    p99 = cells["ringfort"]["beside"]["p99_ms"]
    verdicts.append(
        [
            "99th percentile of small calls beside 1 GiB, ms",
            f"at most {WORST_MS:g}",
            f"{p99:.1f}",
            _word(p99 < WORST_MS),
        ]
    )
    yield from table(["claim for encrypted calls", "at least", "measured", "kept"], verdicts)
    yield (
        "TensorPipe is C++ from end to end, sends plaintext and pickles its arguments; by default it copies directly "
        "from the memory of one process to that of the other. Ours has Python on both sides of every call, encrypts "
        "every byte and unpickles nothing. With gRPC and TensorPipe, small calls wait until a large array has been "
        "sent. TensorPipe's large array therefore arrives sooner; ours shares the cores with the small calls, which "
        "continue.\n"
    )


def ratios(cells: Mapping[str, Mapping[str, Any]]) -> Iterable[tuple[str, float, float]]:
    """Each claim about gRPC: its words, its bound, and how many times as fast we were."""
    if "grpc" not in cells:
        return
    ours, theirs = cells["ringfort"], cells["grpc"]
    for text, what, bound in CLAIMS:
        yield text, bound, ours[what] / theirs[what] if what == "small" else theirs[what] / ours[what]


def _word(kept: bool) -> str:
    return "yes" if kept else "**no**"


if __name__ == "__main__":
    side_main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
