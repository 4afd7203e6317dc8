"""A TCP relay that takes its time: whoever is dialled through it answers late."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator

from p2ptrain.node.thread import LoopThread

READ_BYTES = 64 * 1024
WAITING_PIECES = 256
"""Pieces under way in one direction; then the sender has to wait."""


class SlowRelay:
    """Passes bytes on to a port on loopback; every piece of the answers arrives late, in order.

    ``delay_seconds`` are the least and the greatest delay of a piece; ``pieces`` counts those that it has delayed.
    """

    def __init__(self, target_port: int, delay_seconds: tuple[float, float], seed: int) -> None:
        self.port = 0
        self.pieces = 0
        self._target_port = target_port
        self._delay_seconds = delay_seconds
        self._random = random.Random(seed)
        self._connections: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["SlowRelay"]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        yield self
        server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._relay(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target: asyncio.StreamWriter | None = None
        try:
            answers, target = await asyncio.open_connection("127.0.0.1", self._target_port)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_on(reader, target, (0.0, 0.0)))
                group.create_task(self._pass_on(answers, writer, self._delay_seconds))
        except* OSError:
            pass  # one side has closed: so does the other
        finally:
            for end in (writer, target):
                if end is not None:
                    end.close()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_seconds: tuple[float, float]
    ) -> None:
        loop = asyncio.get_running_loop()
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(WAITING_PIECES)

        async def deliver() -> None:
            while True:
                due, piece = await under_way.get()
                await asyncio.sleep(due - loop.time())
                if not piece:
                    raise ConnectionResetError("the other side has closed")
                writer.write(piece)
                await writer.drain()

        async with asyncio.TaskGroup() as group:
            group.create_task(deliver())
            piece = b"-"
            while piece:
                piece = await reader.read(READ_BYTES)
                self.pieces += bool(delay_seconds[1])
                await under_way.put((loop.time() + self._random.uniform(*delay_seconds), piece))


@contextlib.contextmanager
def slow_relay(target_port: int, delay_seconds: tuple[float, float], seed: int = 1) -> Iterator[SlowRelay]:
    thread = LoopThread()
    try:
        with thread.holding(SlowRelay(target_port, delay_seconds, seed).serving()) as relay:
            yield relay
    finally:
        thread.stop()
