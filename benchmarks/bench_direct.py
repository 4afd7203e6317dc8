"""What encryption costs on direct connections: CPU seconds per GB of plain TCP, of records, and of TLS.

Two processes on loopback move bulk frames as `p2ptrain.network.rpc` writes them (a header, then 256 KiB) one way over
sockets on the event loop, in turn: plain ones, those of direct connections (`p2ptrain.network.libp2p.direct_records`),
and asyncio's TLS 1.3 (AES-256-GCM), which direct connections used before. CPU seconds are those of both processes.

    python -m benchmarks.bench_direct --json results/direct.json
    python -m benchmarks.bench_direct --quick
"""

from __future__ import annotations

import argparse
import asyncio
import json
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial

import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from benchmarks.answers import hear, say
from benchmarks.findings import Finding, Section, run
from benchmarks.harness import Measured, arguments, paired
from benchmarks.workers import Workers
from p2ptrain.network.libp2p.direct_records import Cipher, SealedSocket
from p2ptrain.network.libp2p.socket_stream import SocketStream
from p2ptrain.network.rpc.channel import SEND_FRAME_BYTES
from p2ptrain.network.rpc.frames import FRAME, Kind

KINDS = ("tcp", "records", "tls")
TURN_SECONDS = 300.0
GOALS = {"tls": 0.5, "tcp": None}
"""For the CPU of records, of that of others."""


def measure(megabytes: int, turns: int, log: str | None) -> Section:
    """CPU seconds per GB and MB/s of every kind.

    Raises:
        RuntimeError: A process failed or took too long.
    """
    cpu_seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    speeds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    num_frames = megabytes * (1 << 20) // SEND_FRAME_BYTES
    gigabytes = num_frames * SEND_FRAME_BYTES / 1e9
    with Workers("benchmarks.bench_direct", log) as workers:
        listener, dialler = workers.start("--worker"), workers.start("--worker")
        ports, _ = workers.hear_all(TURN_SECONDS)
        for turn in range(-1, turns):
            for kind in KINDS:
                started = time.monotonic()
                listener.tell(json.dumps({"receive": num_frames}))
                dialler.tell(json.dumps({"kind": kind, "port": ports[kind], "send": num_frames}))
                cpu = sum(one["cpu"] for one in workers.hear_all(TURN_SECONDS))
                if turn >= 0:
                    cpu_seconds[kind].append(cpu / gigabytes)
                    speeds[kind].append(1e3 * gigabytes / (time.monotonic() - started))
    section = Section(
        f"{megabytes} MiB one way between two processes on loopback", ("", "CPU seconds per GB", "MB/s"),
        results={"cpu_seconds_per_gb": cpu_seconds, "mb_per_second": speeds},
    )  # fmt: skip
    section.rows += [(kind, Measured(tuple(cpu_seconds[kind])), Measured(tuple(speeds[kind]))) for kind in KINDS]
    for other, goal in GOALS.items():
        ratio = paired(Measured(tuple(cpu_seconds["records"])), Measured(tuple(cpu_seconds[other])))
        section.findings.append(Finding("CPU a byte of records", ratio.median, other, goal))
    return section


class TlsSocket(SocketStream):
    """A `SocketStream` on TLS, which copies what is written and cannot be half closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self._transport is not None
        self._transport.set_write_buffer_limits(high=1, low=0)  # with 0 it would pause for ever

    def eof_received(self) -> bool:
        return False


def make(kind: str, is_dialler: bool) -> SocketStream:
    """One end of a connection; the keys are anybody's."""
    if kind == "records":
        keys = (bytes(32), b"x" * 32) if is_dialler else (b"x" * 32, bytes(32))
        return SealedSocket(Cipher(keys[0]), Cipher(keys[1]), lambda _: False)
    return TlsSocket() if kind == "tls" else SocketStream()


def tls_context() -> ssl.SSLContext:
    """A server's context with a new certificate."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    built = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    built = built.serial_number(1).not_valid_before(datetime(1970, 1, 1, tzinfo=UTC))
    certificate = built.not_valid_after(datetime(9999, 1, 1, tzinfo=UTC)).sign(key, hashes.SHA256())
    pem, old = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile() as file:
        file.write(certificate.public_bytes(pem) + key.private_bytes(pem, old, serialization.NoEncryption()))
        file.flush()
        context.load_cert_chain(file.name)
    return context


async def work() -> None:
    """One of the two processes: listens, and does what it is told."""
    loop, accepted = asyncio.get_running_loop(), asyncio.Queue[SocketStream]()

    def accepting(kind: str) -> Callable[[], SocketStream]:
        def accept() -> SocketStream:
            accepted.put_nowait(stream := make(kind, is_dialler=False))
            return stream

        return accept

    servers = {
        kind: await loop.create_server(accepting(kind), "127.0.0.1", 0, ssl=tls_context() if kind == "tls" else None)
        for kind in KINDS
    }
    say(**{kind: server.sockets[0].getsockname()[1] for kind, server in servers.items()})
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    while command := await hear():
        told, payload = json.loads(command), memoryview(bytearray(SEND_FRAME_BYTES))
        if "receive" in told:
            stream = await accepted.get()
            await stream.read(1)
            began = time.process_time()
            for _ in range(told["receive"]):
                await stream.read(FRAME.size)
                await stream.read_into(payload)
            await stream.write(b".")
        else:
            stream, tls = make(told["kind"], is_dialler=True), client if told["kind"] == "tls" else None
            await loop.create_connection(lambda one=stream: one, "127.0.0.1", told["port"], ssl=tls)
            await stream.write(b".")
            began = time.process_time()
            header = FRAME.pack(len(payload), Kind.BULK)
            for _ in range(told["send"]):
                await stream.write(header, payload)
            await stream.read(1)
        say(cpu=time.process_time() - began)
        stream.abort()


def main(given: Sequence[str] | None = None) -> int:
    """Measure and report."""
    parser = arguments(__doc__, "fewer and shorter turns")
    parser.add_argument("--log", metavar="FILE", help="where the processes' error output goes")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.worker:
        uvloop.run(work())
        return 0
    megabytes, turns = (64, 3) if options.quick else (512, 9)
    return run("direct", {"frames": partial(measure, megabytes, turns, options.log)}, options)


if __name__ == "__main__":
    sys.exit(main())
