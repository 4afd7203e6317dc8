"""`ServingOnly`: a peer serves a stage that it does not train, in versions that follow the swarm's rounds."""

from __future__ import annotations

import asyncio
import logging

from p2ptrain.config import PeerConfig
from p2ptrain.models.exact import ExactStage
from p2ptrain.models.stage import Stage
from p2ptrain.node.peer import Peer
from p2ptrain.node.serving.blueprint import Blueprint
from p2ptrain.node.serving.hosting import LEAST_VERSION_SECONDS, Serving
from p2ptrain.node.serving.remote import RemoteWeights
from p2ptrain.pipeline.view import PipelineView
from p2ptrain.serving.host.service import KEPT_VERSIONS
from p2ptrain.serving.host.session import Key
from p2ptrain.tasks import Tasks

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 5.0
"""Time for trainers' records to arrive, before the initial weights are served."""
SHARE_OF_LINK = 0.2
"""Most of the time that downloads take; longer ones come in proportion less often."""


class ServingOnly(Serving):
    """Serves one stage, or without a view the whole model, while `run` runs.

    `run` raises `ResourceError` if the disk is full, `ConfigError` or `TemporaryError` if pretrained weights are needed
    and not available, and the errors of `Serving.run`.
    """

    def __init__(self, peer: Peer, config: PeerConfig, view: PipelineView | None, stage: int) -> None:
        super().__init__(peer, config)
        self._view = view
        self._stage = stage
        self._weights: RemoteWeights | None = None
        self._began = self._next_at = asyncio.get_running_loop().time()
        self._is_trained = True
        self._has_restored = False
        self._asking: asyncio.Task[tuple[Key, Stage] | None] | None = None

    def pause(self, paused: bool) -> None:
        """As for other hosts; a download ends at once."""
        super().pause(paused)
        if paused and self._asking is not None:
            self._asking.cancel()

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            if self._weights is not None:
                self._blueprint.close()

    async def _look(self) -> None:
        """Wait for a version that is due, and serve it."""
        offload, loop = self._peer.runtime.offload, asyncio.get_running_loop()
        if self._weights is None:
            self._blueprint = await offload(Blueprint, self._peer, self._config, self._view, self._stage)
            self._weights = RemoteWeights(self._peer, self._blueprint)
        if not self._has_restored:
            self._has_restored = True
            if (restored := await self._weights.restored()) is not None:
                await self._take(*restored)
        weights, served = self._weights, self._host.keys if self._host is not None else []
        if self._notice(weights.is_trained, served):
            if loop.time() < self._next_at:
                return
            async with Tasks() as tasks:
                has = served[-1][1] if served else b""
                self._asking = tasks.call(weights.newer(has, self._every()), "newer")
                await asyncio.wait({self._asking})
                newer = None if self._asking.cancelled() else self._asking.result()
            if newer is not None:
                self._note(newer[0], loop.time())
                self._next_at = loop.time() + max(LEAST_VERSION_SECONDS, weights.seconds * (1 / SHARE_OF_LINK - 1))
                await self._take(*newer)
        elif not served and loop.time() - self._began >= SETTLE_SECONDS:
            logger.info("no peer has trained yet: serving the initial weights")
            await self._take(*await weights.initial())

    async def _leave(self) -> None:
        self._has_restored = False  # After a pause it goes on with what it served before.
        await super()._leave()

    def _notice(self, is_trained: bool, served: list[Key]) -> bool:
        """Log that the last peer that trains has gone, or that one is back; return ``is_trained``."""
        if is_trained != self._is_trained and served and served[-1][0]:
            what = "a peer trains again" if is_trained else "no peer that trains is here"
            logger.warning("%s: still serving round %d", what, served[-1][0])
        self._is_trained = is_trained
        return is_trained

    async def _take(self, key: Key, stage: Stage) -> None:
        """Copy the weights for serving; before, drop the oldest version, so that never more than two are in memory."""
        if self._host is not None:
            self._host.keep(KEPT_VERSIONS - 1)
        blueprint, weights = self._blueprint, self._config.serving.weights
        exact = await self._peer.runtime.compute(
            ExactStage, stage, blueprint.spec, weights=weights, kernels=self._kernels
        )
        await self._offer(blueprint.number, blueprint.num_stages, key, exact)
