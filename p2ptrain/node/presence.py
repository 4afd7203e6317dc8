"""Publication of this peer's record, and reads of all peers' records."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.errors import IntegrityError
from p2ptrain.network.admission import Admission
from p2ptrain.network.directory import Directory
from p2ptrain.network.records.record import PeerRecord, open_record, peers_key, seal_record
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer
from p2ptrain.tasks import Tasks

logger = logging.getLogger(__name__)

RECORD_KIND = "peer"
LIFETIME_SECONDS = 30.0
PUBLISH_SECONDS = 5.0
REFRESH_SECONDS = 2.0
LEAST_PAUSE_SECONDS = 0.5
DIRECTORY_TIMEOUT_SECONDS = 8.0
FAREWELL_TIMEOUT_SECONDS = 5.0


class RecordReader:
    """Reads the records of a swarm's peers; each distinct record is verified, or refused and counted, once.

    Attributes:
        admission: Drops the records of strangers, once the manifest is known; None drops none.
        strangers: The record of each peer that the swarm does not admit, and why not.
        rejected: Number of distinct records dropped as invalid, and of strangers.
    """

    def __init__(self, directory: Callable[[], Directory], swarm: bytes, verifier: Signer) -> None:
        self._directory = directory
        self._swarm = swarm
        self._verifier = verifier
        self._seen: dict[str, tuple[bytes, PeerRecord | None, int]] = {}
        self.admission: Admission | None = None
        self.strangers: dict[str, tuple[PeerRecord, str]] = {}
        self.rejected = 0

    async def read(self, timeout_seconds: float) -> list[tuple[PeerRecord, int, float]] | None:
        """Return all (record, sequence, expiry), ordered by peer id; None if the directory does not answer."""
        entries = await self._directory().look_up(peers_key(self._swarm), timeout_seconds)
        if entries is None:
            return None
        result = []
        seen: dict[str, tuple[bytes, PeerRecord | None, int]] = {}
        for peer in sorted(entries):
            value = entries[peer].value
            known = self._seen.get(peer)
            if known is None or known[0] != value:
                known = value, *self._verified(peer, value)
            seen[peer] = known
            if known[1] is not None:
                result.append((known[1], known[2], entries[peer].expires_at))
        self._seen = seen
        return self._admitted(result)

    def _admitted(self, found: list[tuple[PeerRecord, int, float]]) -> list[tuple[PeerRecord, int, float]]:
        """Return the records of admitted peers; keep those of strangers, and count each stranger once."""
        if (admission := self.admission) is None:
            return found
        for record, _, _ in found:
            admission.learn(record.revocations)
        reasons = [admission.admitted(record.peer, record.credential) for record, _, _ in found]
        strangers = {each[0].peer: (each[0], why) for each, why in zip(found, reasons, strict=True) if why}
        for peer in strangers.keys() - self.strangers.keys():
            self.rejected += 1
            logger.info("dropped the records of peer %s: %s", peer[-8:], strangers[peer][1])
        self.strangers = strangers
        return [each for each, why in zip(found, reasons, strict=True) if not why]

    def _verified(self, peer: str, value: bytes) -> tuple[PeerRecord | None, int]:
        """Return a peer's record and its sequence; None and 0 for one that is dropped."""
        try:
            opened = open_record(value, RECORD_KIND, self._swarm, self._verifier)
            if opened.peer != peer:
                raise IntegrityError("it is stored under another peer's id")
            return PeerRecord.from_payload(peer, opened.payload), opened.sequence
        except IntegrityError as error:
            self.rejected += 1
            logger.info("dropped the record of peer %s: %s", peer[-8:], error)
            return None, 0


class Presence:
    """Publishes a peer's own record and updates its membership, until it is closed.

    ``directory`` returns the current one: a move of the peer's network replaces it. ``changed`` publishes soon; call it
    on the event loop.
    """

    def __init__(
        self,
        directory: Callable[[], Directory],
        runtime: Runtime,
        swarm: bytes,
        signer: Signer,
        membership: Membership,
        describe: Callable[[], PeerRecord],
    ) -> None:
        self._directory = directory
        self._runtime = runtime
        self._swarm = swarm
        self._signer = signer
        self._membership = membership
        self._describe = describe
        self.reader = RecordReader(directory, swarm, signer)
        self._sequence = 0
        self._changed = asyncio.Event()
        self.changed = self._changed.set
        self._tasks = Tasks()
        self.listeners: list[Callable[[list[tuple[PeerRecord, int, float]]], None]] = []
        """Called after each read with (record, sequence, expiry) of all peers."""
        self.directory_answers = True

    async def start(self) -> None:
        """Read and publish once, then periodically."""
        await self.refresh()
        await self.publish()
        self._tasks.keep(self._keep_publishing, "presence-publish")
        self._tasks.keep(self._keep_refreshing, "presence-refresh")

    async def publish(self) -> bool:
        """Publish this peer's record now; return True if a peer stored it."""
        now = self._runtime.now()
        self._sequence = max(self._sequence + 1, int(now * 1000))
        payload, expires_at = self._describe().to_payload(), now + LIFETIME_SECONDS
        sealed = seal_record(RECORD_KIND, self._swarm, payload, self._sequence, expires_at, self._signer)
        key, own = peers_key(self._swarm), self._signer.peer_id
        return await self._directory().publish(key, own, sealed, expires_at, DIRECTORY_TIMEOUT_SECONDS)

    async def refresh(self) -> bool:
        """Read all records now; return True if the directory answered."""
        records = await self.reader.read(DIRECTORY_TIMEOUT_SECONDS)
        self.directory_answers = records is not None
        for record, sequence, expires_at in records or []:
            self._membership.update(record, sequence, expires_at)
        self._membership.forget_expired()
        for listener in self.listeners:
            listener(records or [])
        return records is not None

    async def _keep_publishing(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PUBLISH_SECONDS * self._runtime.random.uniform(0.8, 1.2)):
                    await self._changed.wait()
            self._changed.clear()
            await self.publish()
            await asyncio.sleep(LEAST_PAUSE_SECONDS)

    async def _keep_refreshing(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS * self._runtime.random.uniform(0.8, 1.2))
            await self.refresh()

    async def close(self, farewell: bool = True) -> None:
        """Stop; with ``farewell``, publish this peer's record a last time."""
        await self._tasks.close()
        if farewell:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_TIMEOUT_SECONDS):
                    await self.publish()
