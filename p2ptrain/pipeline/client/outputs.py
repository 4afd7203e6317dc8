"""Where the model's outputs come home to a trainer that makes a loss of them itself.

The last host sends the output, and waits for its gradient. If it dies meanwhile another one sends the output again, and
gets the same gradient; so the trainer sees each microbatch's output once.
"""

from __future__ import annotations

import asyncio

import torch

from p2ptrain.codecs.base import CodecError
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.client import Rpc
from p2ptrain.pipeline.messages import (
    Arrived,
    BadMicrobatchError,
    HomeRequest,
    MicrobatchId,
    Payload,
    RefusalError,
    Refused,
    Reply,
    TensorHead,
    pack,
    unpack,
)
from p2ptrain.pipeline.routing.hop import HOME, beat
from p2ptrain.runtime import Runtime
from p2ptrain.tasks import Tasks

RECEIVE_SECONDS = 120.0


class Waiting:
    """One microbatch whose output is to come.

    Args:
        shape: Of the output.

    Attributes:
        output: Resolves with the output, fp32.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        loop = asyncio.get_running_loop()
        self.output: asyncio.Future[torch.Tensor] = loop.create_future()
        self._gradient: asyncio.Future[torch.Tensor] = loop.create_future()
        self._shape = shape

    def give(self, gradient: torch.Tensor) -> None:
        """The gradient of the loss in the output; fp32, of its shape."""
        if not self._gradient.done():
            self._gradient.set_result(gradient)

    def check(self, output: TensorHead | Payload) -> None:
        """Raise `BadMicrobatchError` if an output of another shape comes."""
        if output.shape != self._shape:
            raise BadMicrobatchError(f"an output of {list(output.shape)}, where {list(self._shape)} was to come")

    async def came(self, output: Payload, learns: bool, runtime: Runtime) -> Payload | None:
        """Take the output; return its gradient, if that is wanted.

        Raises:
            BadMicrobatchError: It has another shape, or values that are not finite.
        """
        self.check(output)
        try:
            values = await runtime.offload(unpack, output)
        except CodecError as error:
            raise BadMicrobatchError(f"an output that is none: {error}") from error
        if not self.output.done():
            self.output.set_result(values)
        if not learns:
            return None
        return await runtime.offload(pack, await asyncio.shield(self._gradient), output.codec)


class Outputs:
    """A trainer's side.

    Args:
        rpc: Answers hosts.
    """

    def __init__(self, rpc: Rpc) -> None:
        self._waiting: dict[MicrobatchId, Waiting] = {}
        self._runtime = rpc.runtime
        rpc.serve_channel(HOME, HomeRequest, self._serve)

    def expect(self, id: MicrobatchId, waiting: Waiting) -> None:
        """Let an output come."""
        self._waiting[id] = waiting

    def forget(self, id: MicrobatchId) -> None:
        """Let it come no more."""
        self._waiting.pop(id, None)

    async def come_home(self, id: MicrobatchId, output: Payload, learns: bool) -> Payload | None:
        """From a host of this process; see `p2ptrain.pipeline.routing.hop.Here`."""
        return await self._find(id).came(output, learns, self._runtime)

    def _find(self, id: MicrobatchId) -> Waiting:
        if id not in self._waiting:
            raise BadMicrobatchError(f"nobody waits for {id} any more")
        return self._waiting[id]

    async def _serve(self, channel: Channel, request: HomeRequest) -> None:
        head = request.output
        try:
            waiting = self._find(request.id)
            waiting.check(head)
            async with Tasks() as tasks:
                beating = tasks.start(beat(channel), "beat")
                data = await channel.receive_bytes(head.num_bytes, RECEIVE_SECONDS)
                await channel.send(Arrived())
                gradient = await waiting.came(Payload(head.codec, head.shape, data), request.learns, self._runtime)
                beating.cancel()
                await channel.send(Reply(0.0, (), gradient).head)
                if gradient is not None:
                    await channel.send_bytes(gradient.data)
        except RefusalError as error:
            await channel.close(Refused.of(error))
