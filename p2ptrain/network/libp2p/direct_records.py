"""Encrypted records over TCP between two peers: key schedule, record format, and socket.

A modified, dropped, repeated, reordered or reflected record fails authentication, and the connection ends.
``docs/explanation/security.md`` describes the format, the protocol, its limits and its threat model.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Callable
from enum import IntEnum

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from p2ptrain.buffers import Buffer
from p2ptrain.network.libp2p.socket_stream import SocketStream

LABEL = b"p2ptrain direct connection 1"
KEY_BYTES, NAME_BYTES, NONCE_BYTES, TAG_BYTES = 32, 16, 12, 16
HEADER = struct.Struct(">IB")
OVERHEAD_BYTES = HEADER.size + TAG_BYTES
HELLO_BYTES = NAME_BYTES + OVERHEAD_BYTES
"""The dialler's first bytes: the connection's name, and READY."""
RECORD_BYTES = 256 * 1024
"""Longest plaintext of a record: the payload of one bulk frame of `p2ptrain.network.rpc`."""
SEALED_BYTES = RECORD_BYTES + 1024
"""Send buffer: the header of a bulk frame and its payload."""
BUFFER_BYTES = 2 * SEALED_BYTES
"""Receive buffer; with room for one record only, reading would pause after each."""
RECORDS_PER_KEY = 1 << 16
"""Records until the key changes: at most 2^30 AES blocks, which leave an attacker an advantage of 2^-69."""


class Kind(IntEnum):
    """The kinds of records. All but DATA are empty."""

    READY = 1
    """The sender has the keys, and has finished the last stream."""
    START = 2
    """The dialler begins a stream."""
    DATA = 3
    END = 4
    """The sender has sent all data, and closes the connection."""


def agree(own: X25519PrivateKey, remote_key: bytes, *transcript: str | bytes) -> tuple[bytes, Cipher, Cipher]:
    """Derive a connection's name and the ciphers of the dialler's and the listener's records.

    Raises `ValueError` if ``remote_key`` is no X25519 public key, or leads to an all-zero secret.
    """
    shared = own.exchange(X25519PublicKey.from_public_bytes(remote_key))
    fields = (each.encode() if isinstance(each, str) else each for each in transcript)
    salt = hashlib.sha256(b"".join(len(each).to_bytes(2, "big") + each for each in fields)).digest()
    derived = HKDF(SHA256(), 2 * KEY_BYTES + NAME_BYTES, salt, LABEL).derive(shared)
    return derived[2 * KEY_BYTES :], Cipher(derived[:KEY_BYTES]), Cipher(derived[KEY_BYTES : 2 * KEY_BYTES])


class Cipher:
    """The cipher of one direction; both ends process records in the same order."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._aead = AESGCM(key)
        self._num_records = 0

    def seal(self, kind: Kind, data: Buffer, into: memoryview) -> int:
        """Encrypt the next record into the start of ``into``; return its length."""
        end = OVERHEAD_BYTES + len(data)
        into[: HEADER.size] = header = HEADER.pack(len(data), kind)
        self._aead.encrypt_into(self._nonce, data, header, into[HEADER.size : end])
        self._advance()
        return end

    def mark(self, kind: Kind) -> bytes:
        """Return the next record, with empty plaintext."""
        record = bytearray(OVERHEAD_BYTES)
        self.seal(kind, b"", memoryview(record))
        return bytes(record)

    def open(self, record: Buffer, into: Buffer) -> None:
        """Decrypt the next record into ``into``, whose length must be the plaintext's.

        Raises `InvalidTag` if the record is not authentic or not the next one; ``into`` then holds garbage.
        """
        self._aead.decrypt_into(self._nonce, record[HEADER.size :], record[: HEADER.size], into)
        self._advance()

    def opens(self, kind: Kind, record: bytes) -> bool:
        """True if ``record`` is the authentic next one, empty and of this kind."""
        try:
            self.open(record, bytearray())
        except InvalidTag:
            return False
        return record[: HEADER.size] == HEADER.pack(0, kind)

    @property
    def _nonce(self) -> bytes:
        return self._num_records.to_bytes(NONCE_BYTES, "big")

    def _advance(self) -> None:
        self._num_records += 1
        if self._num_records % RECORDS_PER_KEY == 0:
            self._key = HKDFExpand(SHA256(), KEY_BYTES, LABEL + b", next key").derive(self._key)
            self._aead = AESGCM(self._key)


class SealedSocket(SocketStream):
    """A `SocketStream` over encrypted records, which distinguishes an orderly end from a cut connection.

    Reading raises `OSError` if the connection was cut or a record is not authentic. A failed or cancelled write aborts
    the connection. After a stream's orderly end ``on_rest`` takes the connection back; it returns True if it keeps it.
    """

    _cut = ConnectionResetError

    def __init__(self, sealing: Cipher, opening: Cipher, on_rest: Callable[[SealedSocket], bool]) -> None:
        super().__init__(buffer_bytes=BUFFER_BYTES)
        self._sealing = sealing
        self._opening = opening
        self._on_rest = on_rest
        self._writing = asyncio.Lock()
        self._start_mark = b""
        self._sealed = memoryview(bytearray(SEALED_BYTES))
        self._spare = memoryview(bytearray(RECORD_BYTES))
        self._unread = self._spare[:0]
        self._over: Exception | None = None

    @property
    def has_record(self) -> bool:
        """True if the next record has arrived, if it is an empty one."""
        return self._end - self._start >= OVERHEAD_BYTES

    def rest(self) -> bool:
        return not self.is_closing and self._on_rest(self)

    async def write(self, *parts: Buffer) -> None:
        async with self._writing:
            end = 0
            for part in parts:
                for start in range(0, len(part), RECORD_BYTES):
                    data = memoryview(part)[start : start + RECORD_BYTES]
                    if end + OVERHEAD_BYTES + len(data) > SEALED_BYTES:
                        await self._send(self._sealed[:end])
                        end = 0
                    end += self._sealing.seal(Kind.DATA, data, self._sealed[end:])
            await self._send(self._sealed[:end])

    async def mark(self, kind: Kind) -> None:
        async with self._writing:
            await self._send(self._sealing.mark(kind))

    def begin(self) -> None:
        """Begin a stream: START leaves in one write with what the caller writes at once, else alone."""
        self._start_mark = self._sealing.mark(Kind.START)
        self._loop.call_soon(self._send_start)

    def _send_start(self) -> None:
        if self._start_mark and self._transport is not None and not self.is_closing:
            self._transport.write(self._start_mark)
        self._start_mark = b""

    async def _send(self, records: Buffer) -> None:
        start_mark, self._start_mark = self._start_mark, b""
        try:
            await super().write(*((start_mark, records) if start_mark else (records,)))
        except BaseException:
            self.abort()  # the event loop may still hold the buffer after a cancellation
            raise

    async def close(self) -> None:
        await self.mark(Kind.END)
        await super().close()

    async def read_into(self, view: memoryview) -> None:
        """As `SocketStream.read_into`; after an error ``view`` may hold garbage."""
        while len(view):
            if not len(self._unread):
                data = await self._next(Kind.DATA, view)
                if len(data) <= len(view):
                    view = view[len(data) :]
                    continue
                self._unread = data
            length = min(len(view), len(self._unread))
            view[:length] = self._unread[:length]
            view, self._unread = view[length:], self._unread[length:]

    async def expect(self, kind: Kind) -> None:
        """Read the next record, which must be empty and of this kind; raise as `read_into`."""
        if len(self._unread):
            raise self._broken("a stream went on after its end")
        await self._next(kind, self._spare)

    async def _next(self, due: Kind, view: memoryview) -> memoryview:
        """Return the data of the next record: at the start of ``view`` if it fits, else in the spare buffer."""
        if self._over is not None:
            raise self._over
        length, kind = HEADER.unpack(await self.peek(HEADER.size))
        if length > RECORD_BYTES:
            raise self._broken(f"a record of {length} bytes was announced")
        record = await self.peek(OVERHEAD_BYTES + length)
        data = (view if length <= len(view) else self._spare)[:length]
        try:
            self._opening.open(record, data)
        except InvalidTag:
            raise self._broken("a record is not authentic") from None
        self.consume(len(record))
        if kind == Kind.END:
            self._over = EOFError("the stream ended")
            raise self._over
        if kind != due or (length > 0) != (due == Kind.DATA):
            raise self._broken(f"a record of kind {kind} with {length} bytes came where {due.name} was due")
        return data

    def _broken(self, reason: str) -> Exception:
        self.abort()
        self._over = ConnectionAbortedError(reason)
        return self._over

    def eof_received(self) -> bool:
        super().eof_received()
        return False  # no half-open connections
