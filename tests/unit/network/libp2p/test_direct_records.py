"""Records say what was sent, in the order in which it was sent, by the other end of this connection; or nothing."""

import asyncio
import hashlib
import hmac
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from p2ptrain.network.libp2p import direct_records
from p2ptrain.network.libp2p.direct_records import (
    HEADER,
    OVERHEAD_BYTES,
    RECORD_BYTES,
    Cipher,
    Kind,
    SealedSocket,
    agree,
)
from tests.support.coroutines import on_both_loops, on_both_loops_within

pytestmark = pytest.mark.usefixtures("nothing_leaks")

DIALLER = X25519PrivateKey.from_private_bytes(bytes(range(32)))
LISTENER = X25519PrivateKey.from_private_bytes(bytes(range(32, 64)))
KEYS = [one.public_key().public_bytes_raw() for one in (DIALLER, LISTENER)]
TERMS: tuple[str | bytes, ...] = ("QmDialler", "QmListener", "/p2ptrain/rpc", *KEYS)


VECTOR_SECRETS = (
    "15c5508c5f2d6260eca652efc7382555b2c5a4ed7d69d19bb358d3b62575bb93"
    "e3a1ec1b1c481564d867227daab16a8c029481831d339ec71a9cc831a908c333"
    "d2c0a30a25f3a7be4f73856b16b006d5"
)
VECTOR_RECORDS = "0000000001a8a0333c010a822ee183d8e3c100f20c00000005034da6c25e8473c90d935a3510d09ea675d26cc2325e"


def sealed(cipher: Cipher, data: bytes, kind: Kind = Kind.DATA) -> bytes:
    record = memoryview(bytearray(OVERHEAD_BYTES + len(data)))
    assert cipher.seal(kind, data, record) == len(record)
    return bytes(record)


# The protocol, beside another implementation of it, and beside fixed bytes


def hkdf(secret: bytes, salt: bytes, info: bytes, num_bytes: int) -> bytes:
    """RFC 5869 with SHA-256."""
    return expand(hmac.digest(salt, secret, "sha256"), info, num_bytes)


def expand(key: bytes, info: bytes, num_bytes: int) -> bytes:
    found = block = b""
    while len(found) < num_bytes:
        block = hmac.digest(key, block + info + bytes([len(found) // 32 + 1]), "sha256")
        found += block
    return found[:num_bytes]


def test_keys_and_records_are_those_of_the_document() -> None:
    shared = LISTENER.exchange(DIALLER.public_key())
    fields = [one if isinstance(one, bytes) else one.encode() for one in TERMS]
    salt = hashlib.sha256(b"".join(len(one).to_bytes(2, "big") + one for one in fields)).digest()
    secrets = hkdf(shared, salt, b"p2ptrain direct connection 1", 80)
    keys = {"dialler": secrets[:32], "listener": secrets[32:64]}
    for own, remote_key in ((DIALLER, KEYS[1]), (LISTENER, KEYS[0])):
        name, *ciphers = agree(own, remote_key, *TERMS)
        assert name == secrets[64:]
        for cipher, key in zip(ciphers, keys.values(), strict=True):
            for number, (kind, data) in enumerate([(Kind.READY, b""), (Kind.DATA, b"hello"), (Kind.END, b"")]):
                header = len(data).to_bytes(4, "big") + bytes([kind])
                expected = header + AESGCM(key).encrypt(bytes(11) + bytes([number]), data, header)
                assert sealed(cipher, data, kind) == expected
    assert secrets.hex() == VECTOR_SECRETS
    _, sealing, _ = agree(DIALLER, KEYS[1], *TERMS)
    assert (sealing.mark(Kind.READY) + sealed(sealing, b"hello")).hex() == VECTOR_RECORDS


@pytest.mark.parametrize("changed", range(len(TERMS)))
def test_all_that_was_agreed_on_is_in_the_keys(changed: int) -> None:
    other = list(TERMS)
    other[changed] = b"x" * 32 if changed > 2 else "x"
    name, sealing, _ = agree(DIALLER, KEYS[1], *TERMS)
    other_name, other_sealing, _ = agree(DIALLER, KEYS[1], *other)
    assert name != other_name
    assert not other_sealing.opens(Kind.READY, sealing.mark(Kind.READY))
    assert agree(DIALLER, KEYS[1], "ab", "c")[0] != agree(DIALLER, KEYS[1], "a", "bc")[0], "fields have ends"


def test_keys_are_replaced_and_old_ones_open_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_records, "RECORDS_PER_KEY", 3)
    key = bytes(range(32))
    keys = [key]
    for _ in range(2):
        keys.append(expand(keys[-1], b"p2ptrain direct connection 1, next key", 32))
    sealing, opening = Cipher(key), Cipher(key)
    for number in range(9):
        record, into = sealed(sealing, b"data"), bytearray(4)
        header = record[: HEADER.size]
        assert record == header + AESGCM(keys[number // 3]).encrypt(number.to_bytes(12, "big"), b"data", header)
        opening.open(record, into)
        assert into == b"data"
    assert key not in vars(sealing).values()


def test_no_bit_can_be_changed() -> None:
    key = bytes(range(32))
    record = sealed(Cipher(key), b"data")
    opening, into = Cipher(key), bytearray(4)
    for bit in range(8 * len(record)):
        changed = bytearray(record)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(InvalidTag):
            opening.open(changed, into)
    opening.open(record, into)
    assert into == b"data"


# On sockets


@dataclass
class Wire:
    """A `SealedSocket`, and somebody at the raw other end, with the ciphers of that end."""

    here: SealedSocket
    far: socket.socket
    sealing: Cipher
    opening: Cipher

    async def send(self, *records: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.far, b"".join(records))

    async def far_end(self) -> SealedSocket:
        """Put a `SealedSocket` at the other end, too."""
        far = SealedSocket(self.sealing, self.opening, lambda _: False)
        await asyncio.get_running_loop().create_connection(lambda: far, sock=self.far.dup())
        return far


@asynccontextmanager
async def on_a_wire() -> AsyncIterator[Wire]:
    _, dialler, listener = agree(DIALLER, KEYS[1], *TERMS)
    _, opening, sealing = agree(LISTENER, KEYS[0], *TERMS)
    here = SealedSocket(dialler, listener, lambda _: False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        connected = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    connected.setblocking(False)
    far.setblocking(False)
    await asyncio.get_running_loop().create_connection(lambda: here, sock=connected)
    try:
        yield Wire(here, far, sealing, opening)
    finally:
        here.abort()
        far.close()
        await here.wait_gone()


def flipped(wire: Wire, at: int) -> bytes:
    record = bytearray(sealed(wire.sealing, b"data"))
    record[at] ^= 1
    return bytes(record) + bytes(RECORD_BYTES)


def out_of_order(wire: Wire) -> bytes:
    first, second = sealed(wire.sealing, b"one"), sealed(wire.sealing, b"two")
    return second + first


def left_out(wire: Wire) -> bytes:
    sealed(wire.sealing, b"one")
    return sealed(wire.sealing, b"two")


ATTACKS: dict[str, Callable[[Wire, bytes], bytes]] = {
    "comes again": lambda wire, before: before,
    "bit of the length": lambda wire, before: flipped(wire, 2),
    "lowest bit of the length": lambda wire, before: flipped(wire, 3),
    "bit of the tag": lambda wire, before: flipped(wire, -1),
    "too long": lambda wire, before: HEADER.pack(RECORD_BYTES + 1, Kind.DATA),
    "out of order": lambda wire, before: out_of_order(wire),
    "left out": lambda wire, before: left_out(wire),
    "another key": lambda wire, before: sealed(Cipher(bytes(32)), b"data"),
    "another connection": lambda wire, before: sealed(
        agree(LISTENER, KEYS[0], *TERMS[:2], "/other", *KEYS)[2], b"data"
    ),
    "plain text": lambda wire, before: b"GET / HTTP/1.1\r\n\r\n",
    # The other end itself may lie, too:
    "start in a stream": lambda wire, before: wire.sealing.mark(Kind.START),
    "unknown kind": lambda wire, before: sealed(wire.sealing, b"", 9),  # type: ignore[arg-type]
    "empty data": lambda wire, before: sealed(wire.sealing, b""),
    "data in a mark": lambda wire, before: sealed(wire.sealing, b"data", Kind.READY),
}


@pytest.mark.parametrize("attack", ATTACKS)
@on_both_loops_within(on_a_wire)
async def test_what_the_other_end_did_not_send_now_ends_the_connection(wire: Wire, attack: str) -> None:
    good = sealed(wire.sealing, b"good")
    await wire.send(good, ATTACKS[attack](wire, good))
    assert await wire.here.read(4) == b"good"
    for _ in range(2):
        with pytest.raises(ConnectionAbortedError):
            await wire.here.read(1)
    assert wire.here.is_closing
    with pytest.raises(OSError, match="closed"):
        await wire.here.write(b"more")


@on_both_loops_within(on_a_wire)
async def test_a_record_that_is_sent_back_ends_the_connection(wire: Wire) -> None:
    await wire.here.write(b"data")
    echo = await asyncio.get_running_loop().sock_recv(wire.far, 100)
    assert len(echo) == OVERHEAD_BYTES + 4
    await wire.send(echo)
    with pytest.raises(ConnectionAbortedError):
        await wire.here.read(4)


@pytest.mark.parametrize("num_bytes", [0, 3, HEADER.size, 100])
@on_both_loops_within(on_a_wire)
async def test_a_cut_is_no_end(wire: Wire, num_bytes: int) -> None:
    await wire.send(sealed(wire.sealing, b"good"), sealed(wire.sealing, bytes(100))[:num_bytes])
    wire.far.shutdown(socket.SHUT_WR)
    assert await wire.here.read(4) == b"good"
    for _ in range(2):
        with pytest.raises(ConnectionResetError):
            await wire.here.read(1)


@on_both_loops_within(on_a_wire)
async def test_an_end_is_an_end_and_nothing_follows(wire: Wire) -> None:
    await wire.send(sealed(wire.sealing, b"last"), wire.sealing.mark(Kind.END), sealed(wire.sealing, b"more"))
    assert await wire.here.read(4) == b"last"
    for _ in range(2):
        with pytest.raises(EOFError):
            await wire.here.read(1)


@on_both_loops_within(on_a_wire)
async def test_what_is_left_of_a_stream_does_not_go_into_the_next(wire: Wire) -> None:
    await wire.send(sealed(wire.sealing, b"data"), wire.sealing.mark(Kind.START))
    assert await wire.here.read(3) == b"dat"
    with pytest.raises(ConnectionAbortedError):
        await wire.here.expect(Kind.START)


@on_both_loops_within(on_a_wire)
async def test_a_cancelled_read_loses_nothing(wire: Wire) -> None:
    record = sealed(wire.sealing, b"data")
    for part in (record[:3], record[3:7], record[7:]):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await wire.here.read(4)
        await wire.send(part)
    assert await wire.here.read(4) == b"data"


@on_both_loops_within(on_a_wire)
async def test_a_cancelled_write_ends_the_connection(wire: Wire) -> None:
    async def write_for_ever() -> None:
        while True:
            await wire.here.write(bytes(RECORD_BYTES))

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(write_for_ever(), 0.2)
    assert wire.here.is_closing


@on_both_loops
async def test_any_mix_of_reads_and_writes_gives_the_bytes_that_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_records, "RECORDS_PER_KEY", 7)
    chance = random.Random(1)
    data = memoryview(chance.randbytes(3_000_000))

    async def write(one: SealedSocket) -> None:
        at = 0
        while at < len(data):
            sizes = [chance.choice([0, 1, 5, 5000, RECORD_BYTES, 300_000]) for _ in range(chance.randint(1, 3))]
            parts = []
            for size in sizes:
                parts.append(data[at : at + size])
                at += size
            await one.write(*parts)
        await one.close()

    async with on_a_wire() as wire:
        far = await wire.far_end()
        writing = asyncio.create_task(write(far))
        received = bytearray()
        while len(received) < len(data):
            size = min(chance.choice([1, 5, 5000, RECORD_BYTES, 600_000]), len(data) - len(received))
            received += await wire.here.read(size)
            if chance.random() < 0.1:
                await asyncio.sleep(0.001)
        with pytest.raises(EOFError):
            await wire.here.read(1)
        await writing
        assert received == data


@on_both_loops_within(on_a_wire)
async def test_several_tasks_may_write(wire: Wire) -> None:
    far = await wire.far_end()
    pieces = [bytes([number]) * 1_000_000 for number in range(4)]
    writing = asyncio.gather(*(far.write(piece) for piece in pieces))
    assert sorted([await wire.here.read(1_000_000) for _ in pieces]) == pieces
    await writing
    far.abort()
