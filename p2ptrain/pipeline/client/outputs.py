"""Model outputs for a trainer that computes the loss itself.

The last host sends the output, and waits for the gradient. If that host dies, a substitute sends the output again, and
gets the same gradient. So the trainer sees each microbatch's output once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import torch

from p2ptrain.codecs.arrays import CodecError
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.pipeline.messages import (
    BadMicrobatchError,
    MicrobatchId,
    OutputRequest,
    Payload,
    Reply,
    TensorHead,
    check_values,
    pack,
    unpack,
)
from p2ptrain.pipeline.routing.hop import OUTPUT, answer, refusing
from p2ptrain.pipeline.routing.send_window import SendWindow
from p2ptrain.runtime import Runtime


class ExpectedOutput:
    """The pending output of one microbatch; ``output`` resolves with it in fp32."""

    def __init__(self, shape: tuple[int, ...], runtime: Runtime) -> None:
        loop = asyncio.get_running_loop()
        self.output: asyncio.Future[torch.Tensor] = loop.create_future()
        self._gradient: asyncio.Future[torch.Tensor] = loop.create_future()
        self._shape = shape
        self._runtime = runtime

    def give(self, gradient: torch.Tensor) -> None:
        """Set the gradient of the loss with respect to the output: fp32, of the same shape."""
        if not self._gradient.done():
            self._gradient.set_result(gradient)

    def check(self, output: TensorHead | Payload) -> None:
        """Raise `BadMicrobatchError` if an output has another shape."""
        if output.shape != self._shape:
            raise BadMicrobatchError(f"an output of {list(output.shape)}, where {list(self._shape)} was to come")

    async def take(self, output: Payload, requires_grad: bool) -> Payload | None:
        """Accept the output; return its gradient, if required.

        Raises:
            BadMicrobatchError: The shape differs, or output or gradient cannot be encoded in the codec.
        """
        self.check(output)
        try:
            await self._runtime.offload(check_values, output)
            values = await self._runtime.offload(unpack, output)
            if not self.output.done():
                self.output.set_result(values)
            if not requires_grad:
                return None
            return await self._runtime.offload(pack, await asyncio.shield(self._gradient), output.codec)
        except CodecError as error:
            raise BadMicrobatchError(f"an output, or its gradient, cannot be used: {error}") from error


def serve_outputs(rpc: Rpc, expected: Mapping[MicrobatchId, ExpectedOutput]) -> None:
    """Accept the expected outputs that hosts send to this trainer, and return their gradients."""

    window = SendWindow()

    async def serve(channel: Channel, request: OutputRequest) -> None:
        async with refusing(rpc, channel):
            if request.id not in expected:
                raise BadMicrobatchError(f"nobody waits for {request.id} any more")
            output = expected[request.id]
            output.check(request.output)

            async def take(values: Payload) -> Reply:
                return Reply(0.0, (), await output.take(values, request.requires_grad))

            await answer(channel, (request.output,), take, window)

    rpc.serve_channel(OUTPUT, OutputRequest, serve)
