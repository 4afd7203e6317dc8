"""Passes of microbatches over a host's device: from wire form and back, and out of the sum of gradients again.

The arithmetic is in `p2ptrain.pipeline.stage.compute`, the queue in `p2ptrain.pipeline.stage.device`. Here is what is
around them: values are checked, tensors decoded and encoded, times taken.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import torch

from p2ptrain.codecs.base import CodecError
from p2ptrain.errors import P2PTrainError
from p2ptrain.pipeline.messages import BadMicrobatchError, Hop, Payload, pack, unpack
from p2ptrain.pipeline.routing.router import MEASURE_WEIGHT
from p2ptrain.pipeline.stage.compute import LossPass, StageCompute
from p2ptrain.pipeline.stage.device import Device, Pass
from p2ptrain.tasks import Tasks

CLOSE_SECONDS = 2.0
"""How long a host that leaves waits for its device to take out what was given up."""


@dataclass
class Added:
    """What takes a microbatch out of the sum again.

    Attributes:
        inputs: Of the stage.
        back: What came back; on the last stage, the targets.
        tokens: Its weight.
        is_loss: Whether what came back are targets.
        is_in: Whether it is in the sum; known on the device alone, between passes.
    """

    inputs: Payload
    back: Payload
    tokens: int
    is_loss: bool
    is_in: bool = False


@dataclass(frozen=True)
class Passed:
    """What a pass that added to the sum gave.

    Attributes:
        loss: On the last stage: mean over the targets, in nats.
        gradient: In the stage's inputs; None in the first stage.
        seconds: In the queue and on the device.
        added: What takes it out again.
    """

    loss: float
    gradient: Payload | None
    seconds: float
    added: Added


@dataclass(frozen=True)
class Output:
    """What a forward pass gave.

    Attributes:
        payload: The stage's output.
        seconds: In the queue and on the device.
        busy_seconds: On the device alone.
    """

    payload: Payload
    seconds: float
    busy_seconds: float


class Passes:
    """Runs one stage's passes.

    Args:
        stage: The number of the stage.
        num_stages: How many there are.
        compute: Its arithmetic.
        device: Where passes run.
        codec: How activations and their gradients travel.
        num_ids: On the first stage: what token ids are less than; 0 where inputs are no ids.
        num_classes: On the last stage: what targets are less than.

    Attributes:
        tokens_per_second: What the device does, forward and backward, of late; 0 before it was measured.
    """

    def __init__(
        self,
        stage: int,
        num_stages: int,
        compute: StageCompute,
        device: Device,
        codec: str,
        num_ids: int,
        num_classes: int,
    ) -> None:
        self.tokens_per_second = 0.0
        self._is_first = stage == 0
        self._compute = compute
        self._device = device
        self._codec = codec
        self._num_ids = num_ids
        self._num_classes = num_classes
        self._undoing = Tasks(self._not_taken_out)
        self._failure: Exception | None = None

    @property
    def num_waiting(self) -> int:
        """Passes in the queue of the device."""
        return self._device.num_waiting

    async def inputs_of(self, hop: Hop) -> torch.Tensor:
        """The input, as the stage takes it.

        Raises:
            CodecError: A value is not finite.
            BadMicrobatchError: A token id is none of the model's.
        """

        def read() -> torch.Tensor:
            inputs = unpack(hop.inputs)
            if self._is_first and self._num_ids and not 0 <= int(inputs.min()) <= int(inputs.max()) < self._num_ids:
                raise BadMicrobatchError(f"{hop.id} has token ids that the model does not know")
            return inputs

        return await self._device.beside(read)

    async def _targets_of(self, hop: Hop) -> torch.Tensor:
        def read() -> torch.Tensor:
            targets = unpack(hop.targets)
            if not 0 <= int(targets.min()) <= int(targets.max()) < self._num_classes:
                raise BadMicrobatchError(f"{hop.id} has targets that the model does not know")
            return targets

        return await self._device.beside(read)

    async def forward(self, inputs: torch.Tensor) -> Output:
        """The stage's output, which the stage after it takes.

        Raises:
            NotFiniteError, CodecError: A value of it is not finite, or too large for the codec.
        """
        loop = asyncio.get_running_loop()
        asked = began = loop.time()

        def begin() -> None:
            nonlocal began
            began = loop.time()

        output = await self._device.run(Pass.FORWARD, lambda: self._compute.forward(inputs), begin)
        busy_seconds = loop.time() - began
        payload = await self._device.beside(lambda: pack(output, self._codec))
        return Output(payload, loop.time() - asked, busy_seconds)

    async def evaluate(self, hop: Hop, inputs: torch.Tensor) -> float:
        """The last stage's loss alone, in nats; raises as `add_loss`."""
        targets = await self._targets_of(hop)
        return await self._device.run(Pass.FORWARD, lambda: self._compute.evaluate(inputs, targets))

    async def add_loss(self, hop: Hop, inputs: torch.Tensor) -> Passed:
        """The last stage's forward and backward at once.

        Raises:
            NotFiniteError, CodecError: Loss or gradients are not finite, or too large for the codec.
            BadMicrobatchError: A target is none of the model's.
        """
        added = Added(hop.inputs, hop.targets, hop.tokens, is_loss=True)
        return await self._add(added, inputs, await self._targets_of(hop), 0.0)

    async def add_backward(self, hop: Hop, inputs: torch.Tensor, gradient: Payload, forward_seconds: float) -> Passed:
        """The backward pass of any other stage, or of the last one where the trainer made the loss.

        Args:
            hop: Which microbatch.
            inputs: Of the stage.
            gradient: In its output.
            forward_seconds: That its forward pass took on the device.

        Raises:
            NotFiniteError, CodecError: Gradients are not finite, or too large for the codec.
        """
        added = Added(hop.inputs, gradient, hop.tokens, is_loss=False)
        back = await self._device.beside(lambda: unpack(gradient))
        return await self._add(added, inputs, back, forward_seconds)

    async def _add(self, added: Added, inputs: torch.Tensor, back: torch.Tensor, forward_seconds: float) -> Passed:
        """Run a pass that adds to the sum; if nothing comes of it, what was added is taken out again."""
        loop = asyncio.get_running_loop()
        began: float | None = None
        asked = loop.time()

        def begin() -> None:
            nonlocal began
            began = loop.time()

        def add() -> LossPass:
            found = self._pass(inputs, back, float(added.tokens), added.is_loss)
            added.is_in = True
            return found

        try:
            found = await self._device.run(Pass.BACKWARD, add, begin)
        except asyncio.CancelledError:
            if began is not None:  # It runs to its end, and passes run one at a time.
                self.take_out(added)
            raise
        assert began is not None
        self._measure(added.tokens, forward_seconds + loop.time() - began)
        back_down, gradient = found.gradient, None
        try:
            if back_down is not None:
                gradient = await self._device.beside(lambda: pack(back_down, self._codec))
        except (CodecError, asyncio.CancelledError):
            self.take_out(added)
            raise
        return Passed(found.loss, gradient, loop.time() - asked, added)

    def _pass(self, inputs: torch.Tensor, back: torch.Tensor, weight: float, is_loss: bool) -> LossPass:
        if is_loss:
            return self._compute.loss(inputs, back, weight)
        return LossPass(0.0, self._compute.backward(inputs, back, weight))

    def _measure(self, tokens: int, seconds: float) -> None:
        if seconds > 0:
            rate, known = tokens / seconds, self.tokens_per_second
            self.tokens_per_second = known + MEASURE_WEIGHT * (rate - known) if known else rate

    def take_out(self, added: Added) -> None:
        """Take a microbatch out of the sum again, if it is in it, by the same pass with the negated weight.

        That may take until `until_taken_out` returns.
        """
        self._undoing.start(self._take_out(added), "undo")

    async def _take_out(self, added: Added) -> None:
        inputs, back = await self._device.beside(lambda: (unpack(added.inputs), unpack(added.back)))

        def undo() -> None:
            if added.is_in:  # What ran when it was given up may have failed.
                self._pass(inputs, back, -float(added.tokens), added.is_loss)
                added.is_in = False

        await self._device.run(Pass.UNDO, undo)

    async def until_taken_out(self) -> None:
        """Return when nothing is being taken out any more.

        Raises:
            P2PTrainError: Something could not be taken out: the sum holds what does not count.
        """
        await self._undoing.join()
        if self._failure is not None:
            raise P2PTrainError(
                f"a microbatch that was given up is still in this stage's gradients ({self._failure!r}): start this"
                " peer again"
            ) from self._failure

    def _not_taken_out(self, error: Exception) -> None:
        self._failure = error

    async def close(self) -> None:
        """Let what is being taken out come to its end, unless the device is stuck."""
        await self._undoing.close(CLOSE_SECONDS)
