"""`ServingOnly`: a peer serves a stage that it does not train, in versions that follow the swarm's rounds."""

from __future__ import annotations

import asyncio
import logging

from p2ptrain.config import PeerConfig
from p2ptrain.models.exact import exact_stage
from p2ptrain.models.stage import Stage
from p2ptrain.node.peer import Peer
from p2ptrain.node.serving.blueprint import Blueprint
from p2ptrain.node.serving.hosting import LEAST_VERSION_SECONDS, Serving
from p2ptrain.node.serving.remote import RemoteWeights
from p2ptrain.pipeline.view import PipelineView
from p2ptrain.serving.host.service import KEPT_VERSIONS
from p2ptrain.serving.host.session import Key

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
        self._began = asyncio.get_running_loop().time()
        self._download_seconds = 0.0

    async def _look(self) -> None:
        """Wait for a version that is due, and serve it."""
        if self._weights is None:
            blueprint = await asyncio.to_thread(Blueprint, self._peer, self._config, self._view, self._stage)
            self._blueprint, self._weights = blueprint, RemoteWeights(self._peer, blueprint)
        now, round_ = asyncio.get_running_loop().time(), self._weights.newest_round
        served = self._host.keys if self._host is not None else []
        if not round_:
            if not served and now - self._began >= SETTLE_SECONDS:
                logger.info("no peer has trained yet: serving the initial weights")
                await self._take(*await self._weights.initial())
            return
        self._note((round_, b""), now)
        every = self._every(max(LEAST_VERSION_SECONDS, self._download_seconds / SHARE_OF_LINK))
        if (newer := await self._weights.newer(served[-1][1] if served else b"", every)) is not None:
            await self._take(*newer)

    async def _take(self, key: Key, stage: Stage) -> None:
        """Copy the weights for serving; before, drop the oldest version, so that never more than two are in memory."""
        if self._host is not None:
            self._host.keep(KEPT_VERSIONS - 1)
        blueprint, weights = self._blueprint, self._config.serving.weights
        exact = await self._peer.runtime.compute(exact_stage, stage, blueprint.spec, weights=weights)
        await self._offer(blueprint.number, blueprint.num_stages, key, exact)
