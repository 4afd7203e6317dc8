"""Records between peers that know each other, without the directory.

::

    caller                                partner
      | own record                          |
      | ----------------------------------> |
      |           what it holds             |
      | <---------------------------------- |
      | those that are newer there          |
      | ----------------------------------> |   repeated while the caller's budget lasts
      |              records                |
      | <---------------------------------- |

A peer exchanges with a random partner about once a second, so a new record reaches all in O(log N) exchanges. An offer
is bounded, and so are the bytes that a peer reads: `p2ptrain.node.presence` writes less often in a large swarm.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Annotated

from msgspec import Meta

from p2ptrain.buffers import Bounded
from p2ptrain.errors import P2PTrainError, PeerLostError, ProtocolError, ResourceError
from p2ptrain.network.records.book import ENTRY_BYTES, MAX_HELD, Held, RecordBook
from p2ptrain.network.records.record import MAX_RECORD_BYTES
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.schema import Message
from p2ptrain.signing import Signer
from p2ptrain.tasks import Backoff

logger = logging.getLogger(__name__)

EXCHANGE = "records.exchange"
ANSWER_SECONDS = 8.0
"""Timeout of a dial, and of each message: a partner may be seconds away."""
EXCHANGE_SECONDS = 24.0
MAX_RUNNING = 16
"""Exchanges that a peer begins at once, at most two of them with one partner: one may be slow, and a record new."""
NUM_OFFERED = 128
"""Entries of an offer, unless the caller asks for all."""
NUM_WANTED = 16
"""Records asked for at once."""
MAX_WANTS = MAX_HELD // NUM_WANTED
NUM_FIRST = 3
"""The first exchanges ask for all that the partners hold."""
MAX_CONTACTS = 64
FIRST_SILENCE_SECONDS = 5.0
"""Backoff of a partner that did not answer; doubles with each failure."""
LONGEST_SILENCE_SECONDS = 120.0
MAX_SILENT = 2 * MAX_HELD
STRANGERS_SHARE = 0.25
"""Share of the partners that are taken from hearsay, so that peers meet."""
READ_BYTES_PER_SECOND = 16_000.0
"""Bound on the records that a peer asks for."""
FIRST_READ_BYTES = 2 << 20
SERVED_BYTES_PER_SECOND = 32_000.0
"""Bound on the bytes that one caller gets; of all together, eight times as many."""

SealedRecord = Annotated[bytes, Meta(max_length=MAX_RECORD_BYTES)]


class Ask(Message, frozen=True):
    """Opens an exchange: the caller's own record, empty if it publishes none or gave it before."""

    record: SealedRecord
    is_first: bool = False


class Offer(Message, frozen=True):
    """Packed entries of what the partner offers, its own record first (`RecordBook.offer`)."""

    entries: Annotated[bytes, Meta(max_length=MAX_HELD * ENTRY_BYTES)]

    def __post_init__(self) -> None:
        if len(self.entries) % ENTRY_BYTES:
            raise ValueError("entries: not whole")


class Want(Message, frozen=True):
    """Fingerprints of records that the caller lacks."""

    fingerprints: Annotated[list[Annotated[bytes, Meta(min_length=8, max_length=8)]], Meta(max_length=NUM_WANTED)]


class Records(Message, frozen=True):
    """The wanted records that the partner still holds; none if the caller asks too much."""

    records: Annotated[list[SealedRecord], Meta(max_length=NUM_WANTED)]


MAX_OFFER_BYTES = MAX_HELD * ENTRY_BYTES + 256
MAX_RECORDS_BYTES = NUM_WANTED * (MAX_RECORD_BYTES + 8) + 256


class Budget:
    """Bytes that may be spent: ``first`` at once, then ``rate`` a second, of which ten seconds' worth accumulate."""

    def __init__(self, rate: float, first: float) -> None:
        self.most = 10 * rate
        self._rate = rate
        self._left = first
        self._at = asyncio.get_running_loop().time()

    def left(self) -> float:
        """Return the bytes that are left; negative after the last spending exceeded them."""
        now = asyncio.get_running_loop().time()
        self._left = max(self._left, min(self._left + self._rate * (now - self._at), self.most))
        self._at = now
        return self._left

    def spend(self, num_bytes: int) -> bool:
        """Spend bytes; False, and nothing is spent, if none were left."""
        if self.left() <= 0:
            return False
        self._left -= num_bytes
        return True


class RecordExchange:
    """Exchanges records with partners, and answers theirs.

    Attributes:
        own: This peer's newest sealed record; empty if it publishes none.
        contacts: Peers to ask while few others are known: those of the link, and those met before; bounded.
    """

    def __init__(self, rpc: Rpc, signer: Signer, on_record: Callable[[Held], None]) -> None:
        self.own = b""
        self.book = RecordBook(rpc.swarm, signer, rpc.runtime, rpc.gate, on_record)
        self.contacts = Bounded[str, None](MAX_CONTACTS)
        self._rpc = rpc
        self._num_done = 0
        self._silent = Bounded[str, tuple[Backoff, float]](MAX_SILENT)
        self._running: Counter[str] = Counter()
        self._given = Bounded[str, bytes](MAX_SILENT)
        self._asked = set[bytes]()
        """Fingerprints of the records that partners are sending. On a slow link, each would be sent by many at once."""
        self._reading = Budget(READ_BYTES_PER_SECOND, FIRST_READ_BYTES)
        self._served = Bounded[str, Budget](MAX_SILENT)
        self._serving = Budget(8 * SERVED_BYTES_PER_SECOND, 4 * FIRST_READ_BYTES)
        rpc.serve_channel(EXCHANGE, Ask, self._serve, max_request_bytes=MAX_RECORD_BYTES + 64)

    def partners(self, count: int) -> list[str]:
        """Choose partners at random: mostly met ones, some others (known ones first), contacts while those are few."""
        now, random = asyncio.get_running_loop().time(), self._rpc.runtime.random

        silent = {peer for peer, (_, until) in self._silent.items() if until > now}
        silent |= {peer for peer, running in self._running.items() if running > 1}
        count = min(count, MAX_RUNNING - self._running.total())

        def shuffled(peers: Iterable[str]) -> list[str]:
            found = sorted({*peers} - silent - {self._rpc.peer_id})
            return random.sample(found, len(found))

        met, known, held = self.book.met(), self.book.known(), self.book.peers()
        others = shuffled(self.contacts.keys() - held)
        strangers = [*shuffled({*known} - {*met}), *shuffled(held - {*known})]
        met = shuffled(met)
        num_strangers = int(count * STRANGERS_SHARE + random.random())
        chosen = [*strangers[:num_strangers], *met, *strangers[num_strangers:], *others]
        if not met:  # What a directory says, strangers made up as easily.
            chosen = [*shuffled(self.contacts), *chosen]
        if others and random.random() < STRANGERS_SHARE / 2:  # After a partition, it may be the way to the others.
            chosen.insert(0, others[0])
        return list(dict.fromkeys(chosen))[:count]

    async def exchange(self, peer: str) -> bool:
        """Give a partner this peer's record and take newer ones from it; False if it did not answer."""
        is_answered = False
        self._running[peer] += 1
        try:
            async with asyncio.timeout(EXCHANGE_SECONDS):
                own = self.own
                ask = Ask(b"" if self._given.get(peer) is own else own, self._num_done < NUM_FIRST)
                async with self._rpc.open(peer, EXCHANGE, ask, ANSWER_SECONDS) as channel:
                    offer = await channel.receive(Offer, ANSWER_SECONDS, MAX_OFFER_BYTES)
                    is_answered = True
                    self._given[peer] = own
                    await self._take(channel, offer)
        except (P2PTrainError, TimeoutError) as error:
            logger.debug("no exchange of records with peer %s: %s", peer[-8:], error)
            if not is_answered or isinstance(error, ProtocolError):
                self._note_silence(peer)
                return False
        finally:
            self._running -= Counter({peer: 1})
        self._silent.pop(peer, None)
        self._num_done += 1
        return True

    async def _take(self, channel: Channel, offer: Offer) -> None:
        """Take newer records: of known peers while the budget lasts, of others while half of it is left."""
        known, others = (
            [each for each in entries if each not in self._asked]
            for entries in self.book.missing(offer.entries, channel.remote)
        )
        wanted = [*known, *others]
        for start in range(0, len(wanted), NUM_WANTED):
            if self._reading.left() <= (0.0 if start < len(known) else self._reading.most / 2):
                break
            some = wanted[start : start + NUM_WANTED]
            self._asked.update(some)
            try:
                await channel.send(Want(some))
                reply = await channel.receive(Records, ANSWER_SECONDS, MAX_RECORDS_BYTES)
            finally:
                self._asked.difference_update(some)
            self._reading.spend(sum(map(len, reply.records)))
            for value in reply.records:
                if not self.book.take(value, wanted=some):
                    raise ProtocolError(channel.remote, "sent a record that is invalid, or not asked for")
        if self.book.meet(channel.remote):
            self._remember(channel.remote)

    def _remember(self, peer: str) -> None:
        self.contacts[peer] = None

    def _note_silence(self, peer: str) -> None:
        backoff, _ = self._silent.get(peer, (Backoff(FIRST_SILENCE_SECONDS, LONGEST_SILENCE_SECONDS), 0.0))
        self._silent[peer] = backoff, asyncio.get_running_loop().time() + backoff.next()

    async def _serve(self, channel: Channel, ask: Ask) -> None:
        peer = channel.remote
        num_offered = MAX_HELD if ask.is_first else NUM_OFFERED
        if not self._may_get(peer, min(num_offered, len(self.book) + 1) * ENTRY_BYTES + len(ask.record)):
            raise ResourceError("asked for records too often")
        if ask.record and not self.book.take(ask.record, peer):
            raise ProtocolError(peer, "sent a record that is invalid")
        self.book.meet(peer)
        self._silent.pop(peer, None)
        await channel.send(Offer(self.book.offer(num_offered)))
        for _ in range(MAX_WANTS):
            try:
                want = await channel.receive(Want, ANSWER_SECONDS)
            except PeerLostError:  # It has all that it wants.
                return
            values = self.book.values(want.fingerprints)
            may = self._may_get(peer, sum(map(len, values)))
            await channel.send(Records(values if may else []))

    def _may_get(self, peer: str, num_bytes: int) -> bool:
        budget = self._served.get(peer) or Budget(SERVED_BYTES_PER_SECOND, 2 * FIRST_READ_BYTES)
        self._served[peer] = budget
        # Strangers leave some of what all may get to peers that this one knows.
        reserve = 0.0 if self.book.has_met(peer) else self._serving.most / 2
        return self._serving.left() > reserve and budget.spend(num_bytes) and self._serving.spend(num_bytes)
