"""`OwnRecord`: a peer's record, put together from what its parts tell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2ptrain._version import __version__
from p2ptrain.manifest import PROTOCOL_VERSION
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.node.options import PeerOptions
from p2ptrain.node.peer_network import PeerNetwork
from p2ptrain.node.reports.jobs import JobBook
from p2ptrain.runtime import Runtime

EMPTY_HASH = bytes(32)


class OwnRecord:
    """One peer's record; `Presence.changed` publishes a change.

    Attributes:
        state, note: Of the record; without a note it is that of a long job, or of the network.
        jobs: The peer's long-running jobs.
        parts: Each returns the record with its own values, once for each record, on the event loop. A new field of
            `PeerRecord` is set here, or by the part that knows it.
    """

    def __init__(self, peer: str, options: PeerOptions, runtime: Runtime, network: PeerNetwork) -> None:
        self.state = "starting"
        self.note = ""
        self.jobs = JobBook(asyncio.get_running_loop())
        self.parts: list[Callable[[PeerRecord], PeerRecord]] = []
        self._peer = peer
        self._options = options
        self._runtime = runtime
        self._network = network
        self._started_at = runtime.now()

    def describe(self) -> PeerRecord:
        network, standing = self._network, self._network.reach.standing
        record = PeerRecord(
            peer=self._peer,
            name=self._options.name,
            version=__version__,
            protocol=PROTOCOL_VERSION,
            role=self._options.role,
            state=self.state,
            device=self._options.device,
            round=0,
            lineage=EMPTY_HASH,
            digest=EMPTY_HASH,
            lineage_tokens=0,
            round_tokens=0,
            loss=None,
            tokens_per_second=0.0,
            bytes_sent=network.rpc.traffic.sent,
            bytes_received=network.rpc.traffic.received,
            reachability=standing.reachability,
            addresses=standing.addresses,
            started_at=self._started_at,
            last_rounds=(),
            direct_refusals=network.transport.num_refused,
            clock_skew_seconds=-self._runtime.clock_offset_seconds,
            note=self.note or self.jobs.note() or network.clock_note or standing.note,
        )
        for part in self.parts:
            record = part(record)
        return record
