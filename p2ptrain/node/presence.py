"""Publication of this peer's record, and what it knows of others'.

The directory is for first contact. A peer reads all of it when it starts, and a shard now and then; more often while it
knows few peers. Everything else comes from exchanges with other peers (`p2ptrain.network.records.exchange`), which go
on when the directory does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterable

from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.network.directory import Directory
from p2ptrain.network.records.book import Held
from p2ptrain.network.records.exchange import RecordExchange
from p2ptrain.network.records.record import (
    MAX_LIFETIME_SECONDS,
    MAX_PAYLOAD_BYTES,
    NUM_SHARDS,
    PeerRecord,
    peers_key,
    seal_record,
    shard_of,
)
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.signing import Signer
from p2ptrain.tasks import Tasks, together

logger = logging.getLogger(__name__)

LIFETIME_SECONDS = 30.0
"""Of a record that is written every `PUBLISH_SECONDS`; longer in a large swarm."""
PUBLISH_SECONDS = 5.0
LEAST_PAYLOAD_BYTES = 900
"""Of a record in a large swarm: it has room for one round's report."""
WRITE_BYTES_PER_SECOND = 12_000.0
"""Of all records of a swarm together: those of a large swarm are shorter, and written less often."""
HASTE = 0.75
"""Part of the pause that `WRITE_BYTES_PER_SECOND` asks for, after which a record may tell of changes."""
REFRESH_SECONDS = 1.0
"""Pause between exchanges."""
NUM_PUSHED = 4
"""Partners that get a new record at once."""
FEW_PEERS = 5
"""Met peers, this one included, below which the directory is read often."""
LOOK_SECONDS = 2.0
RARE_LOOK_SECONDS = 45.0
LEAST_PAUSE_SECONDS = 0.5
GATHER_SECONDS = 0.1
"""Pause after a change: what a round changes, changes in several steps."""
DIRECTORY_TIMEOUT_SECONDS = 8.0
FAREWELL_TIMEOUT_SECONDS = 5.0
NO_ANSWER_SECONDS = 15.0
"""Time without an answer of any peer or of the directory, after which this peer is cut off."""


class Presence:
    """Publishes a peer's own record and updates its membership, until it is closed.

    ``directory`` returns the current one: a move of the peer's network replaces it. ``changed`` publishes soon; call it
    on the event loop.

    Attributes:
        exchange: With the records that this peer holds.
        directory_answers: False while neither the directory nor another peer answers.
        listeners: Called after each read with (record, sequence, expiry) of all peers.
    """

    def __init__(
        self,
        directory: Callable[[], Directory],
        rpc: Rpc,
        signer: Signer,
        membership: Membership,
        describe: Callable[[], PeerRecord],
    ) -> None:
        self._directory = directory
        self._rpc = rpc
        self._runtime = rpc.runtime
        self._signer = signer
        self._membership = membership
        self._describe = describe
        self.exchange = RecordExchange(rpc, signer, self._on_record)
        self.book = self.exchange.book
        self._sequence = 0
        self._expires_at = self._stored_until = 0.0
        self._least_pause = 0.0
        self._shard = self._runtime.random.randrange(NUM_SHARDS)
        self._answered_at = -math.inf
        self._changed = asyncio.Event()
        self.changed = self._changed.set
        self._tasks = Tasks()
        self.listeners: list[Callable[[list[tuple[PeerRecord, int, float]]], None]] = []
        self.directory_answers = True

    async def start(self) -> None:
        """Read and publish once, then periodically."""
        await self._look(range(NUM_SHARDS))
        await self.publish()
        self._tasks.keep(self._keep_publishing, "presence-publish")
        self._tasks.keep(self._keep_exchanging, "presence-exchange")
        self._tasks.keep(self._keep_looking, "presence-directory")

    async def publish(self) -> bool:
        """Publish this peer's record now, and read others; return True if the directory or another peer took it."""
        self._write()
        is_taken = any(await together("publish", (self._store(), self._push())))
        self._tell()
        return is_taken

    async def refresh(self) -> bool:
        """Read now: from other peers, and while few are known all of the directory; return True if any answered."""
        answers = len(self.book.met()) < FEW_PEERS and await self._look(range(NUM_SHARDS))
        answers |= await self._push()
        self._tell()
        return answers

    def _tell(self) -> None:
        """Tell the listeners what is known now."""
        now = asyncio.get_running_loop().time()
        self.directory_answers = now - self._answered_at < NO_ANSWER_SECONDS
        self._membership.forget_expired()
        records = [(held.record, held.sequence, held.expires_at) for held in self.book.held()]
        for listener in self.listeners:
            listener(records)

    def _on_record(self, held: Held) -> None:
        self._membership.update(held.record, held.sequence, held.expires_at)

    @property
    def _pause(self) -> float:
        return max(PUBLISH_SECONDS, self._least_pause)

    def _write(self) -> None:
        """Seal this peer's record anew."""
        now, num_peers = self._runtime.now(), max(1, len(self.book.known()))
        room = int(PUBLISH_SECONDS * WRITE_BYTES_PER_SECOND / num_peers)
        payload = self._describe().to_payload(min(max(room, LEAST_PAYLOAD_BYTES), MAX_PAYLOAD_BYTES))
        self._least_pause = num_peers * len(self.exchange.own) / WRITE_BYTES_PER_SECOND
        self._sequence = max(self._sequence + 1, int(now * 1000))
        self._expires_at = now + min(LIFETIME_SECONDS / PUBLISH_SECONDS * self._pause, 0.9 * MAX_LIFETIME_SECONDS)
        self.exchange.own = seal_record(self._rpc.swarm, payload, self._sequence, self._expires_at, self._signer)
        self.book.take(self.exchange.own)
        self.book.meet(self._signer.peer_id)

    async def _push(self) -> bool:
        """Exchange with some partners; return True if any answered, after as long again for those that are slower."""
        loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        tasks = {self._tasks.call(self._exchange(each), "push") for each in self.exchange.partners(NUM_PUSHED)}
        waiting = tasks
        while waiting and not any(task.done() and task.result() for task in tasks):
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if waiting:
            await asyncio.wait(waiting, timeout=loop.time() - began)
        return any(task.done() and task.result() for task in tasks)

    async def _exchange(self, partner: str) -> bool:
        is_answered = await self.exchange.exchange(partner)
        self._answered_at = asyncio.get_running_loop().time() if is_answered else self._answered_at
        return is_answered

    async def _store(self) -> bool:
        """Store the newest record in the directory."""
        own, sealed, expires_at = self._signer.peer_id, self.exchange.own, self._expires_at
        key = peers_key(self._rpc.swarm, shard_of(own))
        is_stored = await self._directory().publish(key, own, sealed, expires_at, DIRECTORY_TIMEOUT_SECONDS)
        self._stored_until = expires_at
        return is_stored

    async def _look(self, shards: Iterable[int]) -> bool:
        """Read shards of the directory; return True if it answered."""
        keys = [peers_key(self._rpc.swarm, shard) for shard in shards]
        directory = self._directory()
        found = await together("look", (directory.look_up(key, DIRECTORY_TIMEOUT_SECONDS) for key in keys))
        for entries in found:
            for peer, entry in (entries or {}).items():
                if not self.book.take(entry.value):
                    logger.info("dropped the record of peer %s", peer[-8:])
        is_answered = any(entries is not None for entries in found)
        self._answered_at = asyncio.get_running_loop().time() if is_answered else self._answered_at
        return is_answered

    async def _keep_publishing(self) -> None:
        while True:
            least = max(LEAST_PAUSE_SECONDS, HASTE * self._least_pause)
            await asyncio.sleep(least)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause * self._runtime.random.uniform(0.8, 1.2) - least):
                    await self._changed.wait()
                    await asyncio.sleep(GATHER_SECONDS)
            self._changed.clear()
            self._write()
            self._tasks.start(self._push(), "push")

    async def _keep_exchanging(self) -> None:
        while True:
            # In a swarm of a few, each new record is pushed to all of them.
            pause = REFRESH_SECONDS * (1 if len(self.book.met()) > 2 * NUM_PUSHED else 2)
            await asyncio.sleep(pause * self._runtime.random.uniform(0.8, 1.2))
            for partner in self.exchange.partners(1):
                self._tasks.start(self._exchange(partner), "exchange")
            self._tell()

    async def _keep_looking(self) -> None:
        loop, next_look = asyncio.get_running_loop(), 0.0
        while True:
            await asyncio.sleep(LOOK_SECONDS * self._runtime.random.uniform(0.8, 1.2))
            has_few = len(self.book.met()) < FEW_PEERS
            if has_few or self._stored_until < (self._runtime.now() + self._expires_at) / 2:
                await self._store()
            if has_few or loop.time() >= next_look:
                pause = max(RARE_LOOK_SECONDS, self._pause)  # A large swarm's shards are full.
                next_look = loop.time() + pause * self._runtime.random.uniform(0.8, 1.2)
                self._shard = (self._shard + 1) % NUM_SHARDS
                await self._look([self._shard])
                self._tell()

    async def close(self, farewell: bool = True) -> None:
        """Stop; with ``farewell``, publish this peer's record a last time."""
        await self._tasks.close()
        if farewell:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_TIMEOUT_SECONDS):
                    await self.publish()
        await self._tasks.close()
