"""Two ends of an encrypted connection over loopback, as after a handshake."""

from __future__ import annotations

import secrets
import socket

from ringfort.bootstrap.connection import Connection
from ringfort.transport.records import CIPHERS, Opener, Sealer, preferred


def sealed_pair() -> tuple[Connection, Connection]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = socket.create_connection(server.getsockname())
        second, _ = server.accept()
    keys = [secrets.token_bytes(32) for _ in range(2)]
    cipher = CIPHERS[preferred()[0]]
    (ours, theirs) = ((Sealer(key).with_cipher(cipher), Opener(key).with_cipher(cipher)) for key in keys)
    return Connection(first, b"", ours[0], theirs[1]), Connection(second, b"", theirs[0], ours[1])
