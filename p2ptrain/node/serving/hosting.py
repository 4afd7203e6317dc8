"""`Serving`: a peer serves what it holds, its stage or the whole model, in versions that follow its rounds."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from p2ptrain.config import PeerConfig
from p2ptrain.models.exact import PAGE, ExactStage, checked_kernels
from p2ptrain.models.pretrained import served_context
from p2ptrain.native.exact import AnyKernels
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.node.peer import Peer
from p2ptrain.node.roles.materials import choose_device
from p2ptrain.node.serving.held import Held, load_grammars, newest
from p2ptrain.serving.host.pool import PagePool, pages_within
from p2ptrain.serving.host.service import ServingHost
from p2ptrain.serving.host.session import Key
from p2ptrain.serving.host.sessions import Offer, SessionBook

logger = logging.getLogger(__name__)

PACE_SHARE = 0.2
"""Weight of the newest round in the mean seconds a round."""
LOOK_SECONDS = 0.1
"""Interval of looks at the head; shorter than rounds, so that all hosts copy the same ones."""
LEAST_VERSION_SECONDS = 20.0
"""Time from one version to the next; > the spread of a record and the start of a session, by far."""
IDLE_SECONDS = 10.0
"""Age of a head that is served whatever its round: training rests."""


class Serving:
    """Serves a peer's share of the model while `run` runs."""

    def __init__(self, peer: Peer, config: PeerConfig) -> None:
        self._peer = peer
        self._config = config
        self._spec = peer.manifest.model
        self._held: Held | None = None
        self._host: ServingHost | None = None
        self._key: Key | None = None
        self._kernels: AnyKernels | None = None
        self._since = 0.0
        self._seconds_per_round = 0.0
        self._is_paused = self._has_copied = False
        peer.record.parts.append(self._describe)

    async def run(self) -> None:
        """Follow the peer's head, and serve every version that is due.

        Raises `IntegrityError` if this machine computes other bits than the kernels promise.
        """
        self._kernels = await self._peer.runtime.offload(checked_kernels, choose_device(self._config))
        try:
            while True:
                await (self._leave() if self._is_paused else self._look())
                if self._has_copied:  # What was copied is free now.
                    self._has_copied = False
                    await self._peer.runtime.trim_heap()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            await self._leave()
            self._peer.record.parts.remove(self._describe)

    def pause(self, paused: bool) -> None:
        """Serve nobody while paused; clients go on with other hosts."""
        self._is_paused = paused

    async def _look(self) -> None:
        held = newest(self._peer, self._held)
        if held is None or (self._held is not None and held.number != self._held.number):
            await self._leave()
        if held is None:
            return
        self._held = held
        key, now = held.key, asyncio.get_running_loop().time()
        self._note(key, now)
        if self._is_due(key, now):
            await self._serve(held, now)

    def _note(self, key: Key, now: float) -> None:
        """Take note of the newest head, and of the pace of rounds."""
        if key != self._key:
            if self._key is not None and key[0] > self._key[0]:
                pace = (now - self._since) / (key[0] - self._key[0])
                share = PACE_SHARE if self._seconds_per_round else 1.0
                self._seconds_per_round += share * (pace - self._seconds_per_round)
            self._key, self._since = key, now

    def _every(self) -> int:
        """Return the rounds from one version to the next, which take `LEAST_VERSION_SECONDS` or more."""
        every = self._config.serving.every_rounds
        # Powers of two: hosts that measure rounds a little differently have every second version in common.
        while 0 < every * self._seconds_per_round < LEAST_VERSION_SECONDS:
            every *= 2
        return every

    def _is_due(self, key: Key, now: float) -> bool:
        served = self._host.keys if self._host is not None else []
        is_at_rest = key == self._key and now - self._since >= IDLE_SECONDS
        return key not in served and (key[0] % self._every() == 0 or is_at_rest or not served)

    async def _serve(self, held: Held, now: float) -> None:
        """Copy the weights, and serve them if their round is still due."""

        def copy() -> tuple[Key, ExactStage] | None:
            key, module = held.key, held.module()
            if module is None or not self._is_due(key, now):
                return None
            return key, ExactStage(module, self._spec, weights=self._config.serving.weights, kernels=self._kernels)

        if (copied := await self._peer.runtime.compute(copy)) is None:
            return
        await self._offer(held.number, held.num_stages, *copied)

    async def _offer(self, number: int, num_stages: int, key: Key, stage: ExactStage) -> None:
        """Serve a version of a stage."""
        if self._host is None:
            peer, offload, grammars = self._peer, self._peer.runtime.offload, None
            context = await offload(served_context, self._spec, self._config.weights, self._config.serving.context)
            if number == num_stages - 1:
                grammars = await offload(load_grammars, peer, self._config, stage.vocabulary)
            speculates = self._config.serving.speculation == "ngram"
            offer = Offer(number, num_stages, stage.arithmetic, context, speculates, grammars)
            offer = offer.with_wire(self._config.serving.wire)
            num_pages = pages_within(self._config.serving.cache, stage, offer.arithmetic)
            book = SessionBook(peer.rpc, peer.identity, offer, PagePool(num_pages))
            self._host = ServingHost(peer.rpc, book, self._config.resources.serving_share, self._is_training)
            logger.info(
                "serving stage %d of %d in %s, with room for %d tokens", number, num_stages, offer.arithmetic,
                num_pages * PAGE,
            )  # fmt: skip
        self._host.serve(key, stage)
        self._has_copied = True
        logger.info("serving round %d", key[0])
        self._peer.presence.changed()

    def _is_training(self) -> bool:
        return self._held is not None and self._held.is_training()

    async def _leave(self) -> None:
        host, self._host, self._held = self._host, None, None
        if host is not None:
            await host.close()
            self._peer.presence.changed()

    def _describe(self, record: PeerRecord) -> PeerRecord:
        return record if self._host is None else replace(record, serving=self._host.report())
