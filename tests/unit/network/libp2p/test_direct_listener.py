"""The port for direct connections lets in who was offered one, once and in time, and bounds everybody else."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable

import pytest

from p2ptrain.network.libp2p.direct_listener import START, TOKEN_BYTES, DirectLimits, server_name
from p2ptrain.network.libp2p.direct_tls import Certificate, TlsSocket, check_certificate
from tests.support.processes.direct import BULK, dial, direct_peers, is_refused, offer, opened, until

Main = Callable[[], Awaitable[None]]

pytestmark = pytest.mark.usefixtures("nothing_leaks")


def test_another_key_than_the_one_named_is_refused(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with direct_peers() as (_, b):
            mine, stolen = Certificate(), Certificate()
            token = offer(b, "a", mine)

            # A dialler's handshake is done before the listener has seen its certificate.
            async def comes_in() -> bool:
                try:
                    return not await is_refused(await dial(b, stolen, server_name(token), token))
                except OSError:
                    return False

            assert not await comes_in()
            await until(lambda: b.direct.refusals["no handshake"] == 1)
            assert b.streams.empty()

    run(main)


def test_no_certificate_is_refused(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with direct_peers() as (_, b):
            token = offer(b, "a", Certificate())
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            stream = TlsSocket()
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().create_connection(
                    lambda: stream, "127.0.0.1", b.direct.port, ssl=context, server_hostname=server_name(token)
                )
                await stream.write(token)
            assert await is_refused(stream)
            await until(lambda: b.direct.refusals["no handshake"] == 1)

    run(main)


def test_another_peers_certificate_and_name_do_not_open_with_ones_own_token(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with direct_peers() as (_, b):
            honest, thief = Certificate(), Certificate()
            token_of_honest = offer(b, "a", honest)
            token_of_thief = offer(b, "t", thief)
            # The thief comes in by its own offer, and shows what it overheard of the other's.
            stream = await dial(b, thief, server_name(token_of_thief), token_of_honest)
            assert await is_refused(stream)
            assert b.direct.refusals["wrong certificate"] == 1
            assert b.streams.empty()

    run(main)


def test_a_token_opens_once(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with direct_peers() as (_, b):
            mine = Certificate()
            token = offer(b, "a", mine)
            first = await dial(b, mine, server_name(token), token)
            assert await first.read(1)
            with pytest.raises(ConnectionError):
                await dial(b, mine, server_name(token), token)
            # And over another offer's connection.
            other = offer(b, "a", mine)
            assert await is_refused(await dial(b, mine, server_name(other), token))
            assert b.direct.refusals == {"no handshake": 1, "unknown token": 1}
            first.abort()

    run(main)


def test_an_expired_token_opens_nothing(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with direct_peers(limits=DirectLimits(offer_seconds=0.1)) as (_, b):
            mine = Certificate()
            early, late = offer(b, "a", mine), offer(b, "a", mine)
            stream = await dial(b, mine, server_name(early))
            await asyncio.sleep(0.15)
            await stream.write(early)
            assert await is_refused(stream)
            with pytest.raises(ConnectionError):
                await dial(b, mine, server_name(late), late)
            assert b.direct.refusals == {"expired token": 1, "no handshake": 1}

    run(main)


@pytest.mark.parametrize("name", [None, "example.org", server_name(bytes(TOKEN_BYTES))])
def test_who_was_offered_nothing_gets_no_handshake(run: Callable[[Main], None], name: str | None) -> None:
    async def main() -> None:
        async with direct_peers() as (_, b):
            with pytest.raises(ConnectionError):
                await dial(b, Certificate(), name)
            assert b.direct.refusals == {"no handshake": 1}

    run(main)


def test_plain_text_is_no_handshake(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with direct_peers() as (_, b):
            reader, writer = await asyncio.open_connection("127.0.0.1", b.direct.port)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = await reader.read()
            assert b"HTTP" not in answer
            writer.transport.abort()
            assert b.direct.refusals == {"no handshake": 1}

    run(main)


def test_older_tls_is_refused(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with direct_peers() as (_, b):
            mine = Certificate()
            token = offer(b, "a", mine)
            context = mine.context(b.direct._certificate.der, is_server=False)
            context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
            with pytest.raises(ConnectionError):
                await dial(b, mine, server_name(token), token)

    run(main)


@pytest.mark.parametrize("sends", ["nothing", "half a hello", "no token"])
def test_who_is_slow_is_cut_off(run: Callable[[Main], None], sends: str) -> None:
    async def main() -> None:
        async with direct_peers(limits=DirectLimits(handshake_seconds=0.3)) as (_, b):
            if sends == "no token":
                mine = Certificate()
                stream = await dial(b, mine, server_name(offer(b, "a", mine)))
                assert await is_refused(stream)
            else:
                reader, writer = await asyncio.open_connection("127.0.0.1", b.direct.port)
                if sends == "half a hello":
                    writer.write(bytes.fromhex("1603010200010001fc0303"))
                assert await reader.read() == b""
                writer.transport.abort()
            assert b.direct.refusals == {"too slow": 1}

    run(main)


def test_who_does_not_begin_a_stream_is_cut_off(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with direct_peers(limits=DirectLimits(spare_seconds=0.2)) as (_, b):
            mine = Certificate()
            token = offer(b, "a", mine)
            stream = await dial(b, mine, server_name(token), token)
            assert await stream.read(1)
            assert await is_refused(stream)
            token = offer(b, "a", mine)
            stream = await dial(b, mine, server_name(token), token)
            assert await stream.read(1)
            await stream.write(b"?" + START)
            assert await is_refused(stream)
            assert b.streams.empty()

    run(main)


def test_handshakes_at_a_time_are_bounded_for_each_host(run: Callable[[Main], None]) -> None:
    limits = DirectLimits(handshakes=3, handshakes_per_host=2, handshake_seconds=20)

    async def main() -> None:
        async with direct_peers(limits=limits) as (_, b):
            held = [await asyncio.open_connection("127.0.0.1", b.direct.port) for _ in range(2)]
            await until(lambda: b.direct._listener is not None and b.direct._listener._handshakes.total() == 2)
            reader, writer = await asyncio.open_connection("127.0.0.1", b.direct.port)
            assert await reader.read() == b""
            writer.transport.abort()
            assert b.direct.refusals == {"too many handshakes": 1}
            for _, one in held:
                one.transport.abort()
            await until(lambda: b.direct._listener is not None and not b.direct._listener._handshakes)
            mine = Certificate()
            token = offer(b, "a", mine)
            stream = await dial(b, mine, server_name(token), token)
            assert await stream.read(1)
            stream.abort()

    run(main)


def test_connections_of_one_peer_and_of_all_are_bounded(run: Callable[[Main], None]) -> None:
    limits = DirectLimits(connections_per_peer=2, connections=3)

    async def main() -> None:
        async with direct_peers("abc", limits=limits) as (a, b, c):
            first, far = await opened(a, b)
            second, _ = await opened(a, b)
            assert await a.direct.open("b", BULK, 5) is None
            assert b.direct.refusals["too many connections"] == 1
            assert first.rest()  # A connection that waits for its next stream counts, too.
            assert far.rest()
            await until(lambda: a.direct.num_spares == 1)
            third, _ = await opened(c, b)
            assert await c.direct.open("b", BULK, 5) is None
            for stream in (first, second, third):
                stream.abort()

    run(main)


def test_certificates_of_other_kinds_are_refused() -> None:
    from datetime import UTC, datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([])
    built = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    built = built.serial_number(1).not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))
    der = built.not_valid_after(datetime(2100, 1, 1, tzinfo=UTC)).sign(key, hashes.SHA256())
    for bad in (der.public_bytes(serialization.Encoding.DER), b"", b"x" * 2000, None, Certificate().der + b"x"):
        with pytest.raises(ValueError, match="certificate"):
            check_certificate(bad)
    good = Certificate().der
    assert check_certificate(good) == good
