"""Direct connections lead to who they were agreed on with, to nobody else, and to the daemon where there is no way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from p2ptrain.errors import ResourceError
from p2ptrain.network import direct
from p2ptrain.network.direct import OFFERS
from p2ptrain.network.direct_listener import START, TOKEN_BYTES, DirectLimits, server_name
from p2ptrain.network.direct_tls import Certificate, TlsSocket, check_certificate
from p2ptrain.network.frames import Kind, frame, pack
from p2ptrain.network.socket_stream import SocketStream
from tests.support.daemons import eventually
from tests.support.direct import BULK, HERE, DirectPeer, direct_peers

Main = Callable[[], Awaitable[None]]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Main], None]:
    """Runs a scenario, on both event loops, with a deadline."""

    def run_it(main: Main) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(30):
                await main()

        (uvloop.run if request.param == "uvloop" else asyncio.run)(bounded())

    return run_it


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    before = open_sockets()
    yield
    assert open_sockets() <= before


def open_sockets() -> set[str]:
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # what listed them
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return {name for name in found if name.startswith("socket:")}


async def until(condition: Callable[[], bool]) -> None:
    async def holds() -> bool:
        return condition()

    await eventually(holds)


async def opened(a: DirectPeer, b: DirectPeer) -> tuple[TlsSocket, TlsSocket]:
    """Both ends of a stream that ``a`` opens to ``b``."""
    near = await a.direct.open(b.name, BULK, 5)
    assert near is not None
    peer, protocol, far = await b.streams.get()
    assert (peer, protocol) == (a.name, BULK)
    return near, far


async def dial(
    peer: DirectPeer, certificate: Certificate, name: str | None, token: bytes = b"", trusts: bytes | None = None
) -> TlsSocket:
    """Dial a peer's port as anybody can; raises what the event loop raises."""
    stream = TlsSocket()
    context = certificate.context(trusts or peer.direct._certificate.der, is_server=False)
    await asyncio.get_running_loop().create_connection(
        lambda: stream, "127.0.0.1", peer.direct.port, ssl=context, server_hostname=name or ""
    )
    if token:
        await stream.write(token)
    return stream


def offer(peer: DirectPeer, to: str, certificate: Certificate) -> bytes:
    """A token, as if ``to`` had asked for it over the daemons."""
    listener = peer.direct._listener
    assert listener is not None
    return listener.offer(to, BULK, certificate.der)


async def is_refused(stream: TlsSocket) -> bool:
    try:
        await stream.read(1)
    except (OSError, EOFError):
        return True
    finally:
        stream.abort()
    return False


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_bytes_go_both_ways_between_the_peers_that_agreed(run: Callable[[Main], None], host: str) -> None:
    data = os.urandom(3_000_000)

    async def main() -> None:
        async with direct_peers(host=host) as (a, b):
            near, far = await opened(a, b)
            received = memoryview(bytearray(len(data)))
            await asyncio.gather(
                near.write(data[:5], data[5:]), far.write(data), far.read_into(received), near.read(len(data))
            )
            assert received == data
            await asyncio.gather(near.close(), far.close())

    run(main)


def test_what_was_written_before_a_close_arrives(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with direct_peers() as (a, b):
            near, far = await opened(a, b)
            data = memoryview(bytearray(2_000_000))

            async def write() -> None:
                await near.write(b"x" * len(data))
                await near.close()

            writing = asyncio.create_task(write())
            await far.read_into(data)
            assert data == b"x" * len(data)
            with pytest.raises(EOFError):
                await far.read(1)
            await writing

    run(main)


def test_a_reader_that_does_not_read_holds_the_writer_back(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with direct_peers() as (a, b):
            near, far = await opened(a, b)
            sent = 0

            async def send_for_ever() -> None:
                nonlocal sent
                while True:
                    await near.write(bytes(1 << 18))
                    sent += 1 << 18

            with pytest.raises(TimeoutError):
                await asyncio.wait_for(send_for_ever(), timeout=1)
            assert 0 < sent < 32 << 20
            near.abort()
            far.abort()

    run(main)


def test_an_abort_is_the_end_of_the_stream_at_the_other_end(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with direct_peers() as (a, b):
            near, far = await opened(a, b)
            near.abort()
            with pytest.raises((EOFError, OSError)):
                await far.read(1)
            await until(lambda: b.direct._listener is not None and b.direct._listener.num_connections <= 1)

    run(main)


def test_the_next_connection_is_made_in_advance_and_for_one_stream(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with direct_peers() as (a, b):
            first, _ = await opened(a, b)
            await until(lambda: a.direct.num_spares == 1)
            asked = a.control.num_asked
            second, far = await opened(a, b)
            assert a.control.num_asked <= asked + 1
            await second.write(b"2")
            assert await far.read(1) == b"2"
            assert first is not second
            for stream in (first, second):
                stream.abort()

    run(main)


def test_a_spare_connection_whose_other_end_is_gone_is_not_used(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with direct_peers() as (a, b):
            first, _ = await opened(a, b)
            await until(lambda: a.direct.num_spares == 1)
            await b.direct.close()
            spare = next(iter(a.direct._spares.values()))[0]
            await until(lambda: spare.is_closing)
            assert await a.direct.open("b", BULK, 5) is None
            first.abort()

    run(main)


def test_spare_connections_end_after_a_while(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with direct_peers(limits=DirectLimits(spare_seconds=0.2)) as (a, b):
            first, _ = await opened(a, b)
            await until(lambda: a.direct.num_dialled == 2)
            await until(lambda: a.direct.num_spares == 0)
            assert b.direct._listener is not None
            first.abort()
            await until(lambda: b.direct._listener is not None and b.direct._listener.num_connections == 0)

    run(main)


# Who is let in


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
    import ssl

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
    import ssl

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
            # Each stream, and the connection made in advance, count.
            first, _ = await opened(a, b)
            await until(lambda: a.direct.num_spares == 1)
            second, _ = await opened(a, b)
            await until(lambda: b.direct.refusals["too many connections"] == 1)
            assert await a.direct.open("b", BULK, 5) is None
            third, _ = await opened(c, b)
            assert await c.direct.open("b", BULK, 5) is None
            for stream in (first, second, third):
                stream.abort()

    run(main)


# Where there is no way


def test_a_closed_port_is_left_alone_for_a_while(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with direct_peers() as (a, b):
            assert b.direct._listener is not None
            for task in b.direct._listener._acceptors:
                task.cancel()
            await asyncio.gather(*b.direct._listener._acceptors, return_exceptions=True)
            for one in b.direct._listener._sockets:
                one.close()
            assert await a.direct.open("b", BULK, 5) is None
            assert a.control.num_asked == 1
            assert await a.direct.open("b", BULK, 5) is None
            assert a.control.num_asked == 1

    run(main)


def test_rests_grow_and_end(run: Callable[[Main], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "FIRST_REST_SECONDS", 0.1)

    async def main() -> None:
        async with direct_peers() as (a, b):
            b.direct._served = ()
            assert await a.direct.open("b", BULK, 5) is None
            await asyncio.sleep(0.12)
            assert await a.direct.open("b", BULK, 5) is None
            assert a.direct._rests["b"].seconds == pytest.approx(0.2)
            b.direct._served = (BULK,)
            await asyncio.sleep(0.22)
            near, _ = await opened(a, b)
            assert not a.direct._rests
            near.abort()

    run(main)


def test_a_port_that_does_not_answer_is_given_up_soon(
    run: Callable[[Main], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "TCP_SECONDS", 0.2)

    async def main() -> None:
        async with direct_peers() as (a, b):
            with socket.socket() as full:
                full.bind(("127.0.0.1", 0))
                full.listen(0)
                fillers = [socket.socket() for _ in range(4)]
                for filler in fillers:
                    filler.setblocking(False)
                    filler.connect_ex(full.getsockname())
                assert b.direct._listener is not None
                b.direct._listener.port = full.getsockname()[1]
                started = asyncio.get_running_loop().time()
                assert await a.direct.open("b", BULK, 5) is None
                assert asyncio.get_running_loop().time() - started < 2
                for filler in fillers:
                    filler.close()

    run(main)


def test_only_addresses_of_the_daemons_connections_are_dialled(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with direct_peers() as (a, _):
            a.control.ways = [("b", f"{HERE}/p2p/QmRelay/p2p-circuit"), ("c", HERE)]
            assert await a.direct.open("b", BULK, 5) is None
            assert a.control.num_asked == 0
            assert not a.direct._rests  # a hole may be punched at any time
            a.control.ways = [("b", HERE)]
            assert await a.direct.open("b", BULK, 5) is not None

    run(main)


def test_a_listener_with_another_certificate_than_named_gets_nothing(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with direct_peers("abm") as (a, b, m):
            # Whoever sits on the path sends the connection to itself.
            assert b.direct._listener is not None
            assert m.direct._listener is not None
            b.direct._listener.port = m.direct.port
            m.direct._listener._offers = b.direct._listener._offers
            assert await a.direct.open("b", BULK, 5) is None
            assert m.streams.empty()
            assert b.streams.empty()

    run(main)


@pytest.mark.parametrize(
    "change",
    [
        {"port": 0},
        {"port": 65536},
        {"port": "1"},
        {"port": True},
        {"token": b"short"},
        {"token": None},
        {"certificate": b""},
        {"certificate": b"x" * 500},
        {"certificate": None},
        {"certificate": b"x" * 5000},
        {"reason": {"a": 1}},
    ],
)
def test_a_malformed_offer_leads_nowhere(change: dict[str, Any]) -> None:
    async def main() -> None:
        async with direct_peers() as (a, b):
            answer = {"port": b.direct.port, "token": bytes(TOKEN_BYTES), "certificate": Certificate().der, **change}

            async def lie(peer: str, stream: SocketStream) -> None:
                await stream.read(1)
                await stream.write(frame(Kind.MESSAGE, pack(answer)))

            await b.control.serve_stream(OFFERS, lie)
            assert await a.direct.open("b", BULK, 5) is None
            assert "b" in a.direct._rests

    asyncio.run(main())


@pytest.mark.parametrize(
    "request_",
    [{}, {"protocol": 5}, {"protocol": "/other"}, {"protocol": BULK}, {"protocol": BULK, "certificate": b"garbage"}],
)
def test_a_malformed_request_is_offered_nothing(request_: dict[str, Any]) -> None:
    async def main() -> None:
        async with direct_peers() as (_, b):
            assert set(b.direct._offer("a", request_)) == {"reason"}

    asyncio.run(main())


def test_who_listens_nowhere_can_dial_all_the_same(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with direct_peers() as (a, b):
            assert a.direct._listener is not None
            await a.direct._listener.close()
            a.direct._listener = None
            near, _ = await opened(a, b)
            assert await b.direct.open("a", BULK, 5) is None
            near.abort()

    run(main)


def test_a_taken_port_is_named() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            async with direct_peers() as (a, _):
                with pytest.raises(ResourceError, match=str(port)):
                    await a.direct.start(("127.0.0.1",), port)

    asyncio.run(main())


def test_certificates_of_other_kinds_are_refused(tmp_path: Path) -> None:
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
