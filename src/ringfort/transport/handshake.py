"""The handshake: each side proves who it is and to which cluster it belongs, and the initiator says what the connection
is for. Pure: bytes in, bytes out.

    initiator                                       responder
    preamble, Noise message 1              ->
                                           <-       preamble, Noise message 2
    Noise message 3: proof, purpose, ciphers ->
                                           <-       record: proof, cipher
    records                                <->      records

The preamble is in the clear and never changes its format, so that two versions or two clusters can tell each other that
they differ: magic "RGFT" · version (2 bytes) · mode (1) · 0 · network id (16). The Noise prologue binds it. A node
reveals nothing about itself before the other side has proved the cluster's secret: the static Noise keys of messages 2
and 3 are new in each process, and the responder sends its proof of identity only after message 3.

The initiator lists the ciphers it prefers and the responder chooses one. All later records are sealed with it; the
answer itself is always AES-256-GCM. The list and the choice are sealed, so nobody on the path can force another cipher.

With encryption off there are only the preambles and the purpose; the messages that follow are not sealed.
"""

from __future__ import annotations

import hmac
from collections.abc import Generator
from struct import Struct

import msgspec

from ringfort.errors import (
    EncryptionMismatchError,
    HandshakeError,
    NamespaceMismatchError,
    ProtocolError,
    VersionMismatchError,
)
from ringfort.identity.credentials import Credentials
from ringfort.identity.noise import MESSAGE_1_BYTES, MESSAGE_2_BYTES, MESSAGE_3_OVERHEAD, NoiseHandshake
from ringfort.identity.proof import MAX_PROOF_BYTES, check_proof, make_proof
from ringfort.transport import hello
from ringfort.transport.frames import PROTOCOL_VERSION
from ringfort.transport.hello import MAX_PURPOSE, Hello
from ringfort.transport.records import CIPHERS, LENGTH, MAX_OVERHEAD, Opener, Sealer, agree, preferred

MAGIC = b"RGFT"
PREAMBLE = Struct("<4sHBB16s")
PLAIN, NOISE = 0, 1
_MODES = {PLAIN: "off", NOISE: "on"}

Steps = Generator[int, bytes, None]
"""Yields how many bytes it wants next and is sent exactly those."""


class Handshake:
    """One side of a handshake. Send `outgoing` and clear it; then read at most `wants` bytes and `feed` them."""

    version = PROTOCOL_VERSION

    def __init__(
        self, credentials: Credentials | None, purpose: Hello | None = None, *, ciphers: tuple[int, ...] | None = None
    ) -> None:
        """Start the initiator's side if `purpose` is given, else the responder's. Without `credentials`, encryption is
        off. `ciphers` defaults to what this machine prefers."""
        self.outgoing = bytearray()
        self.purpose = purpose
        """What the connection is for. The responder knows it once `is_open`."""
        self.identity = b""
        """The identity key that the other side has proved."""
        self.sealer: Sealer | None = None
        self.opener: Opener | None = None
        self.is_open = False
        self.has_begun = False
        """Responder only: whether the other side has sent a valid first message. That needs no secret."""
        self._credentials = credentials
        self._ciphers = preferred() if ciphers is None else ciphers
        self._preamble = PREAMBLE.pack(
            MAGIC,
            self.version,
            PLAIN if credentials is None else NOISE,
            0,
            credentials.namespace.network_id if credentials else b"",
        )
        self._data = bytearray()
        self._steps = self._initiate(purpose) if purpose is not None else self._respond()
        self.wants = next(self._steps)

    def feed(self, data: bytes) -> None:
        """Process received bytes.

        Raises `ProtocolError` if the other side is not Ringfort, a `RefusedError` if its version, cluster or mode
        differs, and `HandshakeError` if it does not know the secret. What is left in `outgoing` tells it why.
        """
        self._data += data
        if self._is_first and not MAGIC.startswith(self._data[: len(MAGIC)]):
            raise ProtocolError(f"The other side is not Ringfort: it began with {bytes(self._data[:16])!r}")
        self.wants -= len(data)
        if self.wants > 0:
            return
        taken, self._data = bytes(self._data), bytearray()
        self._is_first = False
        try:
            self.wants = self._steps.send(taken)
        except StopIteration:
            self.wants = 0
            self.is_open = True

    _is_first = True

    # --- the two sides --------------------------------------------------------------------------------------------

    def _initiate(self, purpose: Hello) -> Steps:
        self.outgoing += self._preamble
        if self._credentials is None:
            self._compare((yield PREAMBLE.size))
            self.outgoing += _framed(hello.encode(purpose))
            return
        noise = self._noise(initiator=True)
        self.outgoing += noise.write()
        self._compare((yield PREAMBLE.size))
        noise.read((yield MESSAGE_2_BYTES))
        static = self._credentials.static_public
        proof = make_proof(self._credentials.identity, static, initiator=True, binding=noise.binding)
        said = (proof, hello.encode(purpose), self._ciphers)
        self.outgoing += _framed(noise.write(msgspec.msgpack.encode(said)))
        send, receive = noise.keys()
        opener = Opener(receive)
        answer = yield from _next_message(opener, MAX_PROOF_BYTES)
        if not answer or answer[0] not in self._ciphers:
            raise HandshakeError("The other side chose a cipher that was not offered")
        cipher = CIPHERS[answer[0]]
        self.sealer, self.opener = Sealer(send, cipher), opener.with_cipher(cipher)
        self.identity = check_proof(answer[1:], noise.remote_static, initiator=False, binding=noise.binding)

    def _respond(self) -> Steps:
        preamble = yield PREAMBLE.size
        self.outgoing += self._preamble
        self._compare(preamble)
        if self._credentials is None:
            self.has_begun = True
            self.purpose = hello.decode((yield from _next_message(None, MAX_PURPOSE)))
            return
        noise = self._noise(initiator=False)
        noise.read((yield MESSAGE_1_BYTES))
        self.has_begun = True
        self.outgoing += noise.write()
        limit = MAX_PURPOSE + MAX_PROOF_BYTES + MESSAGE_3_OVERHEAD + 64
        payload = noise.read((yield from _next_message(None, limit, MESSAGE_3_OVERHEAD)))
        try:
            proof, purpose, theirs = msgspec.msgpack.decode(payload, type=tuple[bytes, bytes, tuple[int, ...]])
        except msgspec.MsgspecError as exc:
            raise HandshakeError(f"Malformed third message: {exc}") from exc
        self.identity = check_proof(proof, noise.remote_static, initiator=True, binding=noise.binding)
        send, receive = noise.keys()
        sealer = Sealer(send)
        static = self._credentials.static_public
        ours = make_proof(self._credentials.identity, static, initiator=False, binding=noise.binding)
        number = agree(self._ciphers, theirs)
        self.outgoing += sealed(sealer, bytes((number,)) + ours)
        cipher = CIPHERS[number]
        self.sealer, self.opener = sealer.with_cipher(cipher), Opener(receive, cipher)
        self.purpose = hello.decode(purpose)

    def _noise(self, *, initiator: bool) -> NoiseHandshake:
        assert self._credentials is not None
        return NoiseHandshake(
            initiator=initiator,
            static=self._credentials.static,
            psk=self._credentials.namespace.handshake_key,
            # `_compare` has found both preambles to be the same.
            prologue=self._preamble,
        )

    def _compare(self, theirs: bytes) -> None:
        _, version, mode, reserved, network_id = PREAMBLE.unpack(theirs)  # `feed` has looked at the magic
        _, our_version, our_mode, _, our_id = PREAMBLE.unpack(self._preamble)
        if version != our_version:
            raise VersionMismatchError(
                f"The other side has protocol version {version}, this side {our_version}; run "
                f"`pip install --upgrade ringfort` on {'this side' if version > our_version else 'the other side'}"
            )
        if mode != our_mode:
            raise EncryptionMismatchError(
                f"The other side has encryption {_MODES.get(mode, mode)}, this side has it {_MODES[our_mode]}; "
                "set the same on all ranks (encryption=, RINGFORT_ENCRYPTION)"
            )
        if reserved:  # both preambles must be equal to the last bit, because the prologue binds them
            raise ProtocolError(f"Invalid preamble: its reserved byte is {reserved}, not 0")
        if not hmac.compare_digest(network_id, our_id):
            name = self._credentials.namespace.name if self._credentials else ""
            raise NamespaceMismatchError(
                f"The other side belongs to another cluster, this side to {name!r}; run `ringfort key show` on one "
                "machine and `ringfort key join` on the other"
            )


def _framed(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body


def sealed(sealer: Sealer | None, body: bytes) -> bytes:
    """Return `body` as it is sent over an open connection: a record, or its length and itself without a sealer."""
    if sealer is None:
        return _framed(body)
    record = bytearray(len(body) + sealer.overhead)
    sealer.seal(body, memoryview(record))
    return bytes(record)


class RecordReader:
    """Splits what arrives on an open connection into messages: the reverse of `sealed`."""

    def __init__(self, opener: Opener | None, limit: int, least: int = 0) -> None:
        """`limit` and `least` are the bytes of the largest and the smallest message."""
        self._opener = opener
        self._limit = limit
        self._least = least
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._data += data

    @property
    def wants(self) -> int:
        """Bytes to read next so that nothing behind the current message is read."""
        return self._end() - len(self._data)

    def next(self) -> bytes | None:
        """Return the next whole message, or None. Raises `ProtocolError` or `TamperedError`."""
        end = self._end()
        if len(self._data) < end:
            return None
        record = bytes(self._data[:end])
        del self._data[:end]
        if self._opener is None:
            return record[LENGTH.size :]
        body = bytearray(end - self._opener.overhead)
        self._opener.open(record, memoryview(body))
        return bytes(body)

    def _end(self) -> int:
        if len(self._data) < LENGTH.size:
            return LENGTH.size
        head = bytes(self._data[: LENGTH.size])
        length = LENGTH.unpack(head)[0] if self._opener is None else self._opener.body_length(head)
        if not self._least <= length <= self._limit + (0 if self._opener is None else MAX_OVERHEAD):
            raise ProtocolError(f"Invalid message: {length} bytes; the limit is {self._limit}")
        return LENGTH.size + length


def _next_message(opener: Opener | None, limit: int, least: int = 0) -> Generator[int, bytes, bytes]:
    """Read one message; yields as `Steps`."""
    reader = RecordReader(opener, limit, least)
    while (body := reader.next()) is None:
        reader.feed((yield reader.wants))
    return body
