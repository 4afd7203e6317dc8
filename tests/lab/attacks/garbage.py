"""Streams of garbage, of truncated frames, of lengths that lie, and of a byte a second."""

import asyncio
import contextlib

import msgpack

from p2ptrain.errors import P2PTrainError
from p2ptrain.manifest import PROTOCOL_VERSION
from p2ptrain.network.rpc.endpoint import PROTOCOL, Header
from p2ptrain.network.rpc.frames import FRAME, Kind, frame, pack
from tests.lab.stranger import Stranger

NAMES = ("group.join", "group.probe", "allreduce", "state.head", "chunks.state", "history.after", "evidence")


async def attack(stranger: Stranger, streams: int = 12) -> None:
    async with asyncio.TaskGroup() as tasks:
        for victim in await stranger.victims():
            for number in range(streams):
                tasks.create_task(_send(stranger, victim, number))


async def _send(stranger: Stranger, victim: str, kind: int) -> None:
    while True:
        with contextlib.suppress(P2PTrainError, TimeoutError):
            stream = await stranger.transport.open(victim, PROTOCOL, 5.0)
            try:
                async with asyncio.timeout(30.0):
                    for piece in _pieces(stranger, kind):
                        await stream.write(piece)
                        await asyncio.sleep(1.0 if len(piece) == 1 else 0.1)
            finally:
                stream.abort()
        await asyncio.sleep(0.5)


def _pieces(stranger: Stranger, kind: int) -> list[bytes]:
    random = stranger.random
    header = pack(Header(PROTOCOL_VERSION, stranger.swarm, random.choice(NAMES)))
    opening = frame(Kind.MESSAGE, header)
    match kind % 6:
        case 0:
            return [random.randbytes(random.randrange(1, 4096)) for _ in range(8)]
        case 1:  # A frame that ends early.
            return [opening[: random.randrange(1, len(opening))]]
        case 2:  # A length that lies.
            return [FRAME.pack(0xFFFFFFFF, Kind.MESSAGE) + bytes(65536)]
        case 3:  # A header, and a request of nested nonsense.
            nested = msgpack.packb({"ticket": [[[[[[{}]]]]]] * 64, "head": random.randbytes(64)})
            return [opening + frame(Kind.MESSAGE, nested)]
        case 4:  # Slow loris.
            return [bytes([each]) for each in opening]
        case _:  # A header, and frames of kinds that do not belong there.
            return [opening, *(FRAME.pack(16, random.randrange(256)) + bytes(16) for _ in range(8))]
