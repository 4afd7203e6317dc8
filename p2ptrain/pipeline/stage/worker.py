"""A stage's passes on its device, one at a time, with wire encoding on the same thread.

The worker keeps no state of microbatches; `p2ptrain.pipeline.stage.gradients` sums their gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from p2ptrain.codecs.base import CodecError
from p2ptrain.models.stage import WHOLE, StageContext
from p2ptrain.pipeline.messages import BadMicrobatchError, Hop, Payload, check_values, pack, unpack
from p2ptrain.pipeline.plan import PipelinePlan
from p2ptrain.pipeline.stage.budget import Limits
from p2ptrain.pipeline.stage.compute import StageCompute
from p2ptrain.pipeline.stage.device import Device, Pass, Timed

T = TypeVar("T")


class StageWorker:
    """Runs one stage's passes, each of which raises `BadMicrobatchError` if a value is not finite or too large.

    The ``codec`` encodes activations and their gradients. A pass holds ``lock``, as does the round's thread while it
    changes parameters or sums.
    """

    def __init__(
        self, plan: PipelinePlan, number: int, compute: StageCompute, device: Device, limits: Limits | None = None
    ) -> None:
        self.number = number
        self.is_last = number == plan.num_stages - 1
        self.compute = compute
        self.device = device
        self.limits = limits or Limits()
        self.codec = plan.manifest.pipeline.codec
        self.lock = threading.Lock()
        self._plan = plan

    def check_shapes(self, hop: Hop) -> None:
        """Raise `BadMicrobatchError` if route, shapes, codecs or counts do not fit the stage."""
        num_after = self._plan.num_stages - 1 - self.number
        if len(hop.route) > num_after:
            raise BadMicrobatchError(f"a route of {len(hop.route)} hosts, where {num_after} stages are left")
        try:
            self._plan.check(self.number, hop.inputs, hop.targets, hop.samples, hop.tokens)
        except ValueError as error:
            raise BadMicrobatchError(str(error)) from error

    async def check_values(self, hop: Hop) -> None:
        """Raise `BadMicrobatchError` if a value is not finite, or an id is out of range."""

        def check() -> None:
            check_values(hop.inputs)
            if self.number == 0 and self._plan.num_ids:
                _check_ids(hop.inputs, self._plan.num_ids, "token ids")
            if self.ends(hop):
                _check_ids(hop.targets, self._plan.num_classes, "targets")

        try:
            await self.device.runtime.offload(check)
        except CodecError as error:
            raise BadMicrobatchError(str(error)) from error

    def ends(self, hop: Hop) -> bool:
        """True if this stage computes the loss from the targets."""
        return self.is_last and not hop.returns_output

    async def forward(self, inputs: Payload, context: StageContext = WHOLE) -> Timed[Payload]:
        """Return the stage's output, encoded for the next stage."""
        return await self.run(Pass.FORWARD, lambda: pack(self.compute.forward(unpack(inputs), context), self.codec))

    async def evaluate(self, hop: Hop) -> Timed[float]:
        """Return the last stage's loss in nats, without backward."""
        return await self.run(Pass.FORWARD, lambda: self.compute.evaluate(unpack(hop.inputs), unpack(hop.targets)))

    async def run(self, kind: Pass, work: Callable[[], T]) -> Timed[T]:
        """Run a pass in its turn; see `Device.run`."""

        def locked() -> T:
            with self.lock:
                return work()

        try:
            return await self.device.run(kind, locked)
        except CodecError as error:
            raise BadMicrobatchError(str(error)) from error


def _check_ids(payload: Payload, bound: int, what: str) -> None:
    ids = np.frombuffer(payload.data, dtype=np.int32)
    if not 0 <= int(ids.min()) <= int(ids.max()) < bound:
        raise BadMicrobatchError(f"{what} that the model does not know")
