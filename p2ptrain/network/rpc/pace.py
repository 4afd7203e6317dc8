"""Bulk receives with a minimum rate instead of a deadline."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from p2ptrain.errors import DeadlineError
from p2ptrain.network.rpc.channel import Channel

NEVER_SECONDS = 1e9


@dataclass(frozen=True)
class LeastRate:
    """Minimum rate of a sender over a window; by default about one bulk frame per `ChannelLimits.send_seconds`."""

    bytes_per_second: float = 4096.0
    window_seconds: float = 60.0


LEAST_RATE = LeastRate()


async def receive_steadily(
    channel: Channel, num_bytes: int, into: memoryview | None = None, rate: LeastRate = LEAST_RATE
) -> bytearray | memoryview:
    """Return the next bulk buffer, as `Channel.receive_bytes`, with a minimum rate in place of the deadline.

    Raises `DeadlineError` if less arrived in a window; the channel is dead then.
    """
    loop = asyncio.get_running_loop()
    mark = 0
    try:
        async with asyncio.timeout(rate.window_seconds) as window:

            def on_progress(received: int) -> None:
                nonlocal mark
                if received - mark >= rate.bytes_per_second * rate.window_seconds:
                    mark = received
                    window.reschedule(loop.time() + rate.window_seconds)

            return await channel.receive_bytes(num_bytes, NEVER_SECONDS, into, on_progress=on_progress)
    except TimeoutError:
        raise DeadlineError(
            f"peer {channel.remote[-8:]} sent less than {rate.bytes_per_second:g} bytes/s for {rate.window_seconds:g} s"
        ) from None
