"""Microbatches that go forward alone, for their loss: nothing of them counts, nothing is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from p2ptrain.codecs.base import CodecError
from p2ptrain.pipeline.messages import BadMicrobatchError, FullError, Hop, Leg, Payload, Reply
from p2ptrain.pipeline.routing.hop import Tell
from p2ptrain.pipeline.stage.compute import NotFiniteError
from p2ptrain.pipeline.stage.passes import Passes

MAX_EVALUATIONS = 8
"""At a time."""


class Evaluations:
    """A host's side of them.

    Args:
        peer_id: Of this peer.
        stage: The number of the stage.
        passes: Runs them.
        onward: What the stages after this one, or the trainer, make of its output.
        is_last: Whether it is the last stage.
    """

    def __init__(
        self,
        peer_id: str,
        stage: int,
        passes: Passes,
        onward: Callable[[Hop, Payload, Tell], Awaitable[Reply]],
        is_last: bool,
    ) -> None:
        self._peer_id = peer_id
        self._stage = stage
        self._passes = passes
        self._onward = onward
        self._is_last = is_last
        self._number = 0

    async def take(self, hop: Hop, news: Tell) -> Reply:
        """Take a microbatch forward; raises as `StageHost.take`."""
        if self._number >= MAX_EVALUATIONS:
            raise FullError(f"{MAX_EVALUATIONS} evaluations are under way: come again, or go to another host")
        self._number += 1
        try:
            loop = asyncio.get_running_loop()
            began, inputs = loop.time(), await self._passes.inputs_of(hop)
            if self._is_last and not hop.goes_home:
                loss = await self._passes.evaluate(hop, inputs)
                return Reply(loss, (Leg(self._stage, self._peer_id, loop.time() - began, 0.0),), None)
            output = await self._passes.forward(inputs)
            await news(self._stage, self._peer_id)
            after = await self._onward(hop, output.payload, news)
            return replace(after, legs=(Leg(self._stage, self._peer_id, output.seconds, 0.0), *after.legs))
        except (CodecError, NotFiniteError) as error:
            raise BadMicrobatchError(f"{hop.id} in stage {self._stage}: {error}") from error
        finally:
            self._number -= 1
