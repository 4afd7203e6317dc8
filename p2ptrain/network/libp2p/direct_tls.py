"""TLS 1.3 between two peers that told each other their certificates before: contexts that trust one certificate each.

A peer makes a self-signed ECDSA P-256 certificate at every start (`Certificate`). It says nothing about who holds it;
`p2ptrain.network.libp2p.direct` says how the peer at the other end learns whose it is. Python's `ssl` verifies a
certificate only against a store of trusted ones, so there is one context for each peer, whose store is that peer's
certificate, and the server picks it while it reads the dialler's first message, by the server name in it.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from p2ptrain.network.libp2p.socket_stream import SocketStream

MAX_CERTIFICATE_BYTES = 1024
MAX_AGE_SECONDS = 600.0
"""No stream begins on an older connection: its keys have encrypted enough (RFC 8446, section 5.5, allows 400 GB)."""
MAX_CONTEXTS = 256
"""Peers whose contexts are kept: making one takes over a millisecond."""

_ALWAYS = (datetime(1970, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC))
"""Certificates end with their process. Clocks of volunteers' machines are off, so their dates say nothing."""


class Certificate:
    """This peer's certificate and key, for as long as the process lives; the key is never written to a disk.

    Attributes:
        der: What other peers are told.
    """

    def __init__(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "p2ptrain")])
        built = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        built = built.serial_number(x509.random_serial_number())
        certificate = built.not_valid_before(_ALWAYS[0]).not_valid_after(_ALWAYS[1]).sign(key, hashes.SHA256())
        self.der = certificate.public_bytes(serialization.Encoding.DER)
        self._pem = certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
        self._contexts: dict[tuple[bytes, bool], ssl.SSLContext] = {}

    def context(self, remote: bytes, *, is_server: bool) -> ssl.SSLContext:
        """A context that presents this certificate and accepts ``remote`` (DER, see `check_certificate`) alone."""
        key = (remote, is_server)
        context = self._contexts.pop(key, None)
        if context is None:
            context = self._context(is_server)
            context.load_verify_locations(cadata=remote)
            while len(self._contexts) >= MAX_CONTEXTS:
                del self._contexts[next(iter(self._contexts))]
        self._contexts[key] = context  # last, as the one that was used last
        return context

    def choosing_context(self, choose: Callable[[str], ssl.SSLContext | None]) -> ssl.SSLContext:
        """A server's context that trusts nobody and goes on with the one that ``choose(server name)`` returns, if any.

        Nothing is computed, and nothing but an alert is answered, for a dialler whose server name leads to None.
        """

        def on_name(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> int | None:
            chosen = choose(name or "")
            if chosen is None:
                return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
            connection.context = chosen
            return None

        context = self._context(is_server=True)
        context.sni_callback = on_name
        return context

    def _context(self, is_server: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate itself is compared
        context.verify_mode = ssl.CERT_REQUIRED
        if is_server:
            context.num_tickets = 0  # every connection is authenticated by itself
        with _as_file(self._pem) as path:
            context.load_cert_chain(path)
        return context


def check_certificate(der: object) -> bytes:
    """Return what another peer says is its certificate.

    Raises:
        ValueError: It is none, too long, or has another kind of key than `Certificate`.
    """
    if not isinstance(der, bytes) or not 0 < len(der) <= MAX_CERTIFICATE_BYTES:
        raise ValueError("a certificate of a wrong size")
    try:
        key = x509.load_der_x509_certificate(der).public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError("a malformed certificate") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("a certificate with another kind of key")
    return der


class TlsSocket(SocketStream):
    """A `SocketStream` on TLS."""

    _pause_above = 1
    """What is written is encrypted, so copied, at once. With 0 TLS connections of both event loops pause for ever."""

    on_rest: Callable[[], bool] | None = None
    """Takes the connection back when a stream on it has ended and nothing more is on its way; whether it does."""

    def __init__(self) -> None:
        super().__init__()
        self._made_at = self._loop.time()

    def rest(self) -> bool:
        """Give the connection back to whoever made it, once a stream on it has ended; False if it has to end too."""
        taker, self.on_rest = self.on_rest, None
        is_young = self._loop.time() < self._made_at + MAX_AGE_SECONDS
        return taker is not None and is_young and not self.is_closing and taker()

    @property
    def remote_certificate(self) -> bytes:
        """What the other end has proven to hold the key of (DER); empty when there is none."""
        return self._connection.getpeercert(binary_form=True) or b""

    @property
    def context(self) -> ssl.SSLContext:
        """The context that verified it."""
        return self._connection.context

    @property
    def _connection(self) -> ssl.SSLObject:
        assert self._transport is not None
        found: ssl.SSLObject = self._transport.get_extra_info("ssl_object")
        return found

    async def wait_gone(self) -> None:
        """Return when the connection has ended."""
        await asyncio.shield(self._gone)

    def eof_received(self) -> bool:
        super().eof_received()
        return False  # TLS connections of asyncio end both ways at once


@contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """A path that leads to ``data``: `ssl` takes keys from files only. Kept in memory where the system can."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("p2ptrain")
        try:
            os.write(descriptor, data)
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
    else:
        with tempfile.NamedTemporaryFile(prefix="p2ptrain-") as file:  # mode 0600
            file.write(data)
            file.flush()
            yield file.name
