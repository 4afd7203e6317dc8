"""Certified weights from the peers that train them, for a peer that serves without training."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2ptrain.averaging.commit.round_log import RoundLog
from p2ptrain.averaging.context import PeerContext, founding_of
from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.errors import IntegrityError, TemporaryError
from p2ptrain.models.stage import Stage
from p2ptrain.network.chunks.fetch import fetch
from p2ptrain.node.serving.blueprint import Blueprint, ServedUnit
from p2ptrain.node.serving.held import key_of
from p2ptrain.node.serving.source import COPY, WAIT_SECONDS, AskCopy, Copied, unlinked_memory
from p2ptrain.training.sync.background_download import SOURCE_FAILURES
from p2ptrain.training.sync.state_server import MAX_HEAD_BYTES, check_head
from p2ptrain.training.sync.weights import WEIGHTS, WeightTarget

if TYPE_CHECKING:
    from p2ptrain.node.peer import Peer
    from p2ptrain.serving.host.session import Key

logger = logging.getLogger(__name__)

ANSWER_SECONDS = WAIT_SECONDS + 10.0


@dataclass
class _Followed:
    """A unit, and the newest head of it that this peer believes."""

    unit: ServedUnit
    context: PeerContext
    log: RoundLog
    head: Head


class RemoteWeights:
    """Follows the lineage of a stage's units by their certificates, and fetches the weights of some heads."""

    def __init__(self, peer: Peer, blueprint: Blueprint) -> None:
        self._peer = peer
        self._blueprint = blueprint
        self._units = [self._follow(unit) for unit in blueprint.units]
        self._membership = blueprint.units[0].membership

    def _follow(self, unit: ServedUnit) -> _Followed:
        peer, manifest = self._peer, self._peer.manifest
        context = PeerContext(
            unit.rpc, peer.runtime, peer.identity, unit.swarm, manifest.averaging, unit.membership,
            founding=founding_of(manifest),
        )  # fmt: skip
        return _Followed(unit, context, RoundLog(context, ()), context.genesis(bytes(32)))

    @property
    def newest_round(self) -> int:
        """The newest round of a training peer's record; 0 without any."""
        return max((record.round for record in self._membership.trusted_records()), default=0)

    async def initial(self) -> tuple[Key, Stage]:
        """Return the version before the first round; raises as `Blueprint`."""
        stage, digests = await self._peer.runtime.compute(self._blueprint.initial)
        for each, digest in zip(self._units, digests, strict=True):
            each.head = each.context.genesis(digest)
        return key_of([each.head for each in self._units]), stage

    async def newer(self, has: bytes, every: int) -> tuple[Key, Stage] | None:
        """Fetch a version after the one with this digest, at a round that ``every`` divides; None without one.

        Raises:
            ResourceError: The disk is full.
        """
        sources = [record.peer for record in self._membership.trusted_records() if record.round]
        self._peer.runtime.random.shuffle(sources)
        for source in sources:
            try:
                request = AskCopy(self._blueprint.number, every, has)
                reply = await self._peer.rpc.call(
                    source, COPY, request, Copied, ANSWER_SECONDS, max_reply_bytes=len(self._units) * MAX_HEAD_BYTES
                )
                if reply.heads and reply.heads[0].round:
                    return key_of(reply.heads), await self._fetch(source, reply.heads)
            except SOURCE_FAILURES as error:
                logger.info("no weights from peer %s: %s", source[-8:], error)
                self._membership.mistrust(source)
        return None

    async def _fetch(self, source: str, heads: Sequence[Head]) -> Stage:
        """Return the stage at these heads, which ``source`` holds; raises `SOURCE_FAILURES`, or `ResourceError`."""
        if len(heads) != len(self._units):
            raise IntegrityError("a source has other units than this stage")
        for each, head in zip(self._units, heads, strict=True):
            check_head(each.context, head)
            await each.log.believe(source, each.head, head)
            if head.lineage != each.head.lineage and not head.outranks(each.head):
                raise TemporaryError("a source is not ahead of this peer")
        logger.info("downloading the weights of round %d from peer %s and others", heads[0].round, source[-8:])
        vectors = []
        for each, head in zip(self._units, heads, strict=True):
            layout, rpc = each.unit.layout, self._peer.rpc
            vectors.append(unlinked_memory(self._peer, 4 * layout.num_values))
            with self._peer.jobs("downloading weights") as advance:
                target = WeightTarget(rpc.runtime, layout, head.digest, vectors[-1], advance)
                await fetch(rpc, WEIGHTS, head.digest, target, lambda: self._sources(source))
        for each, head in zip(self._units, heads, strict=True):
            each.log.begin_at(head)
            each.head = head
        logger.info("downloaded the weights of round %d", heads[0].round)
        return await self._peer.runtime.compute(self._blueprint.assemble, vectors)

    def _sources(self, first: str) -> list[str]:
        others = [record.peer for record in self._membership.trusted_records() if record.round]
        return [first, *(peer for peer in others if peer != first)]
