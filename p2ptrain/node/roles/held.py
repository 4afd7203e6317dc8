"""`HeldState`: the shared state that a peer holds and averages."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from p2ptrain.averaging.context import PeerContext, ballots_in, founding_of
from p2ptrain.network.records.record import PeerRecord, StageReport
from p2ptrain.node.site.departures import Departures
from p2ptrain.tasks import Tasks

if TYPE_CHECKING:
    from p2ptrain.node.peer import Peer
    from p2ptrain.node.serving.source import WeightSource
    from p2ptrain.pipeline.stage.hosted_stage import HostedStage
    from p2ptrain.training.state.shared_state import SharedState
    from p2ptrain.training.sync.synchronizer import Synchronizer


class HeldState:
    """The state of the whole model (`train`), or of the stages that the peer hosts (`host`).

    Attributes:
        stages: The hosted stages, the newest last; `close` closes them.
        departures: A site's policy, and the log of what leaves it.
        intended: The stages in the record before the peer hosts any.
    """

    def __init__(self, peer: Peer) -> None:
        self.stages: list[HostedStage] = []
        self.intended: tuple[StageReport, ...] = ()
        self._peer = peer
        self._trained: Synchronizer | None = None
        self._source: WeightSource | None = None
        self._warming = Tasks()

    @property
    def synchronizer(self) -> Synchronizer | None:
        """The whole model's, or that of the newest stage; None while the peer holds no state."""
        return self.stages[-1].units[0].synchronizer if self.stages else self._trained

    @cached_property
    def context(self) -> PeerContext:
        """Of the whole model's rounds, the same for votes before `train` and after it; raise as `ballots_in`."""
        peer = self._peer
        return PeerContext(
            peer.rpc, peer.runtime, peer.identity, peer.swarm, peer.manifest.averaging, peer.membership, peer,
            founding_of(peer.manifest), ballots_in(peer.runtime.scratch, peer.swarm),
            sending_log=self.departures if self.departures.is_logged else None,
            secure_aggregation=peer.manifest.secure_aggregation,
            participation=peer.manifest.private.participation if peer.manifest.private else 1.0,
        )  # fmt: skip

    async def check_departures(self) -> None:
        """Check the site's policy, and open its log; raise as `Departures.of`."""
        peer = self._peer
        offload = peer.runtime.offload  # It verifies each entry of the log, and waits for the disk.
        self.departures = await offload(Departures.of, peer.manifest, peer.options, peer.identity, peer.runtime)
        peer.on_close(lambda: offload(self.departures.close))

    def train(self, state: SharedState) -> Synchronizer:
        """Join averaging with this state of the whole model; raise as `check_extensions`."""
        from p2ptrain.training.sync.replica import Replica
        from p2ptrain.training.sync.synchronizer import Synchronizer

        peer = self._peer
        peer.on_close(self.close)
        self._prepare()
        replica = Replica(self.context, peer.manifest, state)
        self._trained = Synchronizer(replica, peer.options.upload_bandwidth, peer.jobs)
        return self._trained

    def host(self, stage: HostedStage) -> None:
        """Publish a stage that this peer hosts; raise as `train`."""
        self._prepare()
        self.stages.append(stage)

    def _prepare(self) -> None:
        """Check the manifest's codec and rule, warm up the codecs, and offer weights to peers that only serve."""
        from p2ptrain.node.extensions import check_extensions
        from p2ptrain.node.serving.source import WeightSource

        check_extensions(self._peer.manifest)
        self._warm_up()
        self._source = self._source or WeightSource(self._peer)

    def _warm_up(self) -> None:
        """Make codecs fast in the background; if that fails, they keep using torch, which gives the same bits."""
        from p2ptrain.codecs import warm_up

        def warm() -> None:
            with self._peer.jobs("preparing the codecs", ""):
                warm_up()

        self._warming.start(asyncio.to_thread(warm), "warm-up")

    def describe(self, record: PeerRecord) -> PeerRecord:
        """Return the record with this state's head, rounds and stages."""
        sync = self.synchronizer
        reports = tuple(report for stage in self.stages for report in stage.reports())
        record = replace(record, stages=reports or self.intended)
        if sync is None:
            return record
        return replace(
            record,
            round=sync.head.round,
            lineage=sync.head.lineage,
            digest=sync.head.digest,
            lineage_tokens=sync.head.tokens,
            lineage_full=sync.head.full,
            lineage_returned=sync.head.returned,
            last_rounds=tuple(sync.reports),
            trained_tokens=sync.replica.trained_tokens,
            trained_rounds=sync.replica.trained_rounds,
        )

    async def close(self) -> None:
        """End averaging and hosting; idempotent."""
        await self._warming.close()
        for stage in self.stages:
            await stage.close()
        if self._trained is not None:
            await self._trained.close()
