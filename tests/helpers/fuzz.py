"""Random and mutated input for everything that reads what an unauthenticated client, or a faulty member, may send.

Each target takes one input and lets nothing out but the errors that it may raise. Plain `random` with a seed, not
hypothesis: a million inputs have to take minutes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from ringfort.errors import DistributedError, HandshakeError, ProtocolError, TamperedError, TransportError
from ringfort.identity.noise import MESSAGE_1_BYTES, NoiseHandshake
from ringfort.identity.proof import check_proof, make_proof
from ringfort.transport import abort_reasons, hello
from ringfort.transport.frames import (
    CANCEL,
    CLEAR_TO_SEND,
    DATA,
    MAX_FRAGMENT,
    MAX_MESSAGE,
    PROTOCOL_VERSION,
    RENDEZVOUS,
    pack,
)
from ringfort.transport.handshake import MAGIC, PREAMBLE, Handshake
from ringfort.transport.hello import Join, Meet, Ready, Refused, Welcome
from ringfort.transport.inbound import Inbound
from ringfort.transport.messages import Envelope, Receive, Scratch
from ringfort.transport.records import CIPHERS, LENGTH, MAX_RECORD, Cipher, Opener, Sealer, preferred
from ringfort.transport.reducer import Reducer
from ringfort.transport.socket_streams import SealedStream
from tests.helpers.handshakes import CLUSTER, PURPOSE, Side, converse, member

ALICE, BOB = member(), member()
KEY = bytes(range(32))
INBOX = 1 << 20
MOST_WANTED = 20_000
"""Bytes: more than a handshake may wait for."""
SLOWEST = 2.0
"""Seconds for one input, which takes microseconds: only a hang takes longer, or a machine that stands still."""

Target = Callable[[random.Random], None]


def mutated(rng: random.Random, data: bytes) -> bytes:
    """`data` with a few things done to it; sometimes none."""
    found = bytearray(data)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 5))):
        place = rng.randrange(len(found) + 1)
        match rng.randrange(7):
            case 0 if place < len(found):
                found[place] ^= 1 << rng.randrange(8)
            case 1 if place < len(found):
                found[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 2:
                del found[place : place + rng.choice((1, 4, 30))]
            case 3:
                found[place:place] = rng.randbytes(rng.choice((1, 4, 30)))
            case 4:
                found[place:place] = found[place : place + rng.choice((4, 64))]
            case 5:
                found[place : place + 4] = rng.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\x10\0", b"\x10\0\0\0"))
            case _:
                del found[place:]
    return bytes(found)


def in_pieces(rng: random.Random, data: bytes) -> list[bytes]:
    size = rng.choice((1, 3, 17, 64, 1000, 1 << 20))
    if size < len(data) // 50:
        size = len(data) // 50 + 1
    return [data[start : start + size] for start in range(0, len(data), size)]


# --- handshakes -------------------------------------------------------------------------------------------------------


def _strange_start(rng: random.Random) -> bytes:
    """Words to somebody who expects a preamble: nothing right, a right preamble, or most of one."""
    preamble = PREAMBLE.pack(
        MAGIC,
        rng.choice((*[PROTOCOL_VERSION] * 3, PROTOCOL_VERSION + 1)),
        rng.choice((0, 1, 1, 1)),
        0,
        CLUSTER.network_id,
    )
    rest = rng.randbytes(rng.choice((0, 10, 48, 96, 200, 600)))
    if rng.randrange(3) == 0:
        rest = LENGTH.pack(rng.choice((0, 1, 15, 16, 64, 100, 16_000, 17_000, 2**32 - 1))) + rest
    return rng.choice((rest, preamble + rest, mutated(rng, preamble + rest)))


def _check_side(side: Side) -> None:
    handshake = side.handshake
    assert 0 <= handshake.wants <= MOST_WANTED
    assert handshake.wants > 0 or handshake.is_open or side.error is not None
    assert len(handshake._data) <= MOST_WANTED
    assert side.error is None or isinstance(side.error, TransportError)


def random_handshake(rng: random.Random) -> None:
    """A stranger's words, to either side, with encryption on or off."""
    credentials = rng.choice((ALICE, ALICE, None))
    side = Side(Handshake(credentials, rng.choice((PURPOSE, None))))
    for piece in in_pieces(rng, _strange_start(rng)):
        side.listen(piece)
    assert credentials is None or not side.handshake.is_open, "an unauthenticated client got in"
    _check_side(side)


def mutated_handshake(rng: random.Random) -> None:
    """Two members, and somebody between them who changes what passes in one direction."""
    spoilt, when = rng.randrange(2), rng.randrange(3)
    seen = 0
    changed = False

    def change(data: bytes, _: int) -> bytes:
        nonlocal seen, changed
        if not data:
            return data
        seen += 1
        if seen - 1 != when:
            return data
        result = mutated(rng, data)
        changed = result != data
        return result

    sides = [Side(Handshake(ALICE, PURPOSE)), Side(Handshake(BOB))]
    sides[spoilt]._change = change
    converse(*sides)
    is_open = all(side.handshake.is_open for side in sides)
    # What was put behind the last byte of a handshake belongs to what follows it.
    assert is_open is not changed or (is_open and any(side.unread for side in sides))
    for side in sides:
        _check_side(side)


def noise_message(rng: random.Random) -> None:
    """One message of a handshake, changed or made up, to the side that waits for it."""
    sides = [NoiseHandshake(initiator=True, static=ALICE.static, psk=KEY, prologue=b"p")]
    if rng.randrange(4) == 0:  # the rest of a handshake costs ten times as much
        sides.append(NoiseHandshake(initiator=False, static=BOB.static, psk=KEY, prologue=b"p"))
        for turn in range(rng.randrange(3)):
            sides[1 - turn % 2].read(sides[turn % 2].write())
        writer = next(side for side in sides if side.initiator is (len(side.pending) != 2))
        reader = sides[1 - sides.index(writer)]
        valid = writer.write(rng.randbytes(50) if len(writer.pending) == 1 else b"")
    else:
        reader = NoiseHandshake(initiator=False, static=BOB.static, psk=KEY, prologue=b"p", ephemeral=BOB.static)
        valid = rng.randbytes(MESSAGE_1_BYTES)
    message = mutated(rng, valid)
    try:
        reader.read(message)
        assert message == valid, "a changed message was accepted"
    except HandshakeError:
        assert not reader.is_finished


def proof(rng: random.Random) -> None:
    """What a member says of its identity, changed: it proves the same identity or none."""
    data = rng.randbytes(rng.randrange(200)) if rng.randrange(8) == 0 else mutated(rng, _PROOF)
    try:
        assert check_proof(data, KEY, initiator=True, binding=KEY) == ALICE.identity.public_key
    except HandshakeError:
        assert data != _PROOF


_PROOF = make_proof(ALICE.identity, KEY, initiator=True, binding=KEY)


# --- hellos, abort reasons -----------------------------------------------------------------------------------------

_HELLOS = [
    hello.encode(said)
    for said in (
        PURPOSE,
        Join(0, 1, "", 0),
        Welcome(b"token", [("host", 1), ("other", 2)]),
        Meet(1, 2, bytes(16)),
        Ready(),
        Refused("group", "because"),
    )
]
_ABORT_REASONS = [
    abort_reasons.encode(abort_reason)
    for abort_reason in (abort_reasons.Aborted(1, "why"), abort_reasons.Left(2), abort_reasons.Lost(1, "x"))
]


def hello_or_abort_reason(rng: random.Random) -> None:
    """A member's words inside a record."""
    decode, valid = rng.choice(((hello.decode, _HELLOS), (abort_reasons.decode, _ABORT_REASONS)))
    data = rng.randbytes(rng.randrange(60)) if rng.randrange(4) == 0 else mutated(rng, rng.choice(valid))
    with suppress(ProtocolError):
        decode(data)


# --- records ----------------------------------------------------------------------------------------------------------


class _Words:
    """A socket that only has something to say."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def recv_into(self, buffer: memoryview) -> int:
        if not self._pieces:
            return 0
        piece = self._pieces[0][: len(buffer)]
        self._pieces[0] = self._pieces[0][len(piece) :]
        if not self._pieces[0]:
            del self._pieces[0]
        buffer[: len(piece)] = piece
        return len(piece)


def _sealed(plain: list[bytes], cipher: type[Cipher]) -> list[bytes]:
    sealer, found = Sealer(KEY, cipher, roll_over=3), []
    for data in plain:
        out = bytearray(len(data) + sealer.overhead)
        sealer.seal(data, memoryview(out))
        found.append(bytes(out))
    return found


_PLAIN = [b"one", b"the second", bytes(300), b"4", bytes(range(256)) * 5]
_CIPHERS = [CIPHERS[number] for number in sorted(preferred())]
_RECORDS = {cipher: _sealed(_PLAIN, cipher) for cipher in _CIPHERS}
_BUFFER = memoryview(bytearray(4096))


def records(rng: random.Random) -> None:
    """A stream of records that were changed, left out, repeated or moved. What is read is a beginning of what was."""
    cipher = rng.choice(_CIPHERS)
    chosen = list(_RECORDS[cipher])
    match rng.randrange(4):
        case 0:
            rng.shuffle(chosen)
        case 1:
            del chosen[rng.randrange(len(chosen))]
        case 2:
            chosen.insert(rng.randrange(len(chosen)), rng.choice(chosen))
        case _:
            pass
    data = mutated(rng, b"".join(chosen)) if rng.randrange(8) else rng.randbytes(rng.randrange(200))
    words = _Words(in_pieces(rng, data))
    stream = SealedStream(words, Sealer(KEY), Opener(KEY, cipher, roll_over=3))  # type: ignore[arg-type]
    size = rng.choice((1, 50, 4096))
    read = bytearray()
    with suppress(TamperedError, BlockingIOError):
        for _ in range(3000):
            try:
                count = stream.recv_into(_BUFFER[:size])
            except BlockingIOError:
                continue  # half a record: the rest, or the end, comes with the next read
            if not count:
                break
            read += _BUFFER[:count]
        else:
            raise AssertionError("it does not end")
    assert b"".join(_PLAIN).startswith(read), "something else was read than was said"


# --- frames -----------------------------------------------------------------------------------------------------------

_ADD = Reducer(np.dtype("<u2"), lambda into, span: np.add(into, span, out=into))
_SCRATCH = Scratch(MAX_RECORD)
_KEYS = ((0, 0), (0, 1), (7, 0))


def frames(rng: random.Random) -> None:
    """What a member gone wrong sends: headers that nearly fit, behind and inside each other."""
    inbound = Inbound(3, _SCRATCH, INBOX)
    for key in _KEYS[: rng.randrange(4)]:
        size = rng.choice((0, 8, 40))
        inbound.post(Receive(memoryview(bytearray(size)), Envelope(*key), _ADD if rng.randrange(2) else None))
    data = b"".join(_frame(rng) for _ in range(rng.randrange(1, 8)))
    data = mutated(rng, data) if rng.randrange(8) else rng.randbytes(len(data))
    try:
        for piece in in_pieces(rng, data):
            _feed(inbound, piece)
    except ProtocolError:
        pass
    held = sum(len(stored.data) for queue in inbound._inbox.values() for stored in queue)
    assert inbound.stored_bytes == held <= len(data)


def _frame(rng: random.Random) -> bytes:
    kind = rng.choice((DATA, DATA, DATA, DATA, CLEAR_TO_SEND, CANCEL, rng.randrange(8)))
    payload = rng.randbytes(rng.choice((0, 1, 8, 20, 40)))
    total = rng.choice((len(payload), len(payload), 8, 40, 60, MAX_MESSAGE, 2**64 - 1)) if kind == DATA else 0
    length = rng.choice((len(payload),) * 8 + (MAX_FRAGMENT, 2**32 - 1))
    comm_id, tag = rng.choice(_KEYS)
    flags = rng.choice((0, 0, RENDEZVOUS, 255))
    epoch = rng.choice((0,) * 20 + (1,))
    return pack(kind, flags=flags, length=length, epoch=epoch, comm_id=comm_id, tag=tag, total=total) + payload


def _feed(inbound: Inbound, data: bytes) -> None:
    while data:
        space = inbound.want()
        assert len(space) > 0, "nowhere to put the bytes that come"
        taken = data[: len(space)]
        space[: len(taken)] = taken
        inbound.took(len(taken))
        data = data[len(taken) :]


TARGETS: dict[Target, int] = {
    random_handshake: 200,
    mutated_handshake: 50,
    noise_message: 150,
    proof: 50,
    hello_or_abort_reason: 150,
    records: 200,
    frames: 200,
}
"""Of every thousand inputs, how many are for each: fewer where a handshake has to be computed."""


def fuzz(target: Target, seed: int, count: int) -> None:
    """So many inputs. Whatever but a typed error gets out says with which seed."""
    for number in range(count):
        start = time.monotonic()
        try:
            target(random.Random(seed + number))
        except Exception as exc:
            kind = "an error that it should have caught" if isinstance(exc, DistributedError) else type(exc).__name__
            raise AssertionError(f"{target.__name__}(random.Random({seed + number})): {kind}: {exc}") from exc
        assert time.monotonic() - start < SLOWEST, f"{target.__name__}(random.Random({seed + number})) takes too long"
