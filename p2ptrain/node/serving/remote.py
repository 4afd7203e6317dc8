"""Certified weights from the peers that train them, for a peer that serves without training."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.errors import IntegrityError
from p2ptrain.models.stage import Stage
from p2ptrain.network.chunks import fetch
from p2ptrain.node.serving.blueprint import Blueprint
from p2ptrain.node.serving.held import key_of
from p2ptrain.node.serving.source import COPY, WAIT_SECONDS, AskCopy, Copied
from p2ptrain.training.sync.background_download import SOURCE_FAILURES
from p2ptrain.training.sync.state_server import MAX_HEAD_BYTES
from p2ptrain.training.sync.weights import WEIGHTS, WeightTarget

if TYPE_CHECKING:
    from p2ptrain.node.peer import Peer
    from p2ptrain.serving.host.session import Key

logger = logging.getLogger(__name__)

ANSWER_SECONDS = WAIT_SECONDS + 10.0


class RemoteWeights:
    """Fetches the weights of some heads of a stage's units, and keeps the newest for the next process.

    Attributes:
        seconds: The time that the last download took.
    """

    def __init__(self, peer: Peer, blueprint: Blueprint) -> None:
        self.seconds = 0.0
        self._peer = peer
        self._blueprint = blueprint
        self._units = blueprint.units
        self._first = blueprint.units[0].lineage

    @property
    def is_trained(self) -> bool:
        """True if a peer trains, by its record, and has ended a round."""
        return self._first.is_trained

    async def initial(self) -> tuple[Key, Stage]:
        """Return the version before the first round; raises as `Blueprint`."""
        stage, digests = await self._peer.runtime.compute(self._blueprint.initial)
        for unit, digest in zip(self._units, digests, strict=True):
            unit.lineage.head = unit.lineage.context.genesis(digest)
        return self._key(), stage

    async def restored(self) -> tuple[Key, Stage] | None:
        """Return the version that an earlier process kept; None if there is none, or it is damaged."""
        read = [await self._peer.runtime.offload(unit.kept.read) for unit in self._units]
        kept = [each for each in read if each is not None]
        if len(kept) < len(self._units):
            return None
        for unit, (_, head) in zip(self._units, kept, strict=True):
            unit.lineage.adopt(head)
        return await self._assembled([vector for vector, _ in kept])

    async def newer(self, has: bytes, every: int) -> tuple[Key, Stage] | None:
        """Fetch a version after the one with this digest, at a round that ``every`` divides; None without one.

        Raises:
            ResourceError: The disk is full.
        """
        if not (sources := self._first.holders):
            return None
        source = self._peer.runtime.random.choice(sources)
        try:
            request, limit = AskCopy(self._blueprint.number, every, has), len(self._units) * MAX_HEAD_BYTES
            reply = await self._peer.rpc.call(source, COPY, request, Copied, ANSWER_SECONDS, max_reply_bytes=limit)
            if reply.heads and reply.heads[0].round:
                return await self._fetch(source, reply.heads)
        except SOURCE_FAILURES as error:
            logger.info("no weights from peer %s: %s", source[-8:], error)
            self._first.context.membership.mistrust(source)
        return None

    async def _fetch(self, source: str, heads: Sequence[Head]) -> tuple[Key, Stage]:
        """Fetch the version of these heads, which ``source`` holds; raises `SOURCE_FAILURES`, or `ResourceError`."""
        if len(heads) != len(self._units):
            raise IntegrityError("a source has other units than this stage")
        for unit, head in zip(self._units, heads, strict=True):
            await unit.lineage.check(source, head)
        began, vectors = asyncio.get_running_loop().time(), []
        logger.info("downloading the weights of round %d from peer %s and others", heads[0].round, source[-8:])
        for unit, head in zip(self._units, heads, strict=True):
            vectors.append(unit.kept.allocate())
            with self._peer.jobs("downloading weights") as advance:
                target = WeightTarget(self._peer.runtime, unit.layout, head.digest, vectors[-1], advance)
                await fetch.fetch(self._peer.rpc, WEIGHTS, head.digest, target, lambda: self._sources(source))

        def keep() -> None:
            for unit, head, vector in zip(self._units, heads, vectors, strict=True):
                unit.kept.keep(vector, head)

        await self._peer.runtime.offload(keep)  # All of them, also if a pause ends this.
        for unit, head in zip(self._units, heads, strict=True):
            unit.lineage.adopt(head)
        self.seconds = asyncio.get_running_loop().time() - began
        logger.info("downloaded the weights of round %d", heads[0].round)
        return await self._assembled(vectors)

    def _sources(self, first: str) -> list[str]:
        return list(dict.fromkeys([first, *self._first.holders]))

    async def _assembled(self, vectors: Sequence[memoryview]) -> tuple[Key, Stage]:
        return self._key(), await self._peer.runtime.compute(self._blueprint.assemble, vectors)

    def _key(self) -> Key:
        return key_of([unit.lineage.head for unit in self._units])
