"""Bulk transfers without a deadline: as long as bytes come at a least rate, they may take any time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from p2ptrain.errors import DeadlineError
from p2ptrain.network.rpc.channel import Channel

NEVER_SECONDS = 1e9


@dataclass(frozen=True)
class LeastRate:
    """What a sender has to deliver, judged over a window.

    The defaults are what a channel's own deadline for one frame (`ChannelLimits.send_seconds`) amounts to.
    """

    bytes_per_second: float = 4096.0
    window_seconds: float = 60.0


LEAST_RATE = LeastRate()


async def receive_steadily(
    channel: Channel, num_bytes: int, into: memoryview | None = None, rate: LeastRate = LEAST_RATE
) -> bytearray | memoryview:
    """`Channel.receive_bytes`, with a least rate in place of the deadline.

    Args:
        channel: Where from.
        num_bytes: The only length that is accepted.
        into: Where to put it; see `Channel.receive_bytes`.
        rate: What has to arrive in each window, unless the rest of the buffer does.

    Raises:
        DeadlineError: Less arrived in a window; the channel is dead.
        PeerLostError, PeerRefusedError, ProtocolError: See `Channel.receive_bytes`.
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
