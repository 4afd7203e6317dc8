"""A download of the state that the swarm does not wait for: rounds go on, and the newcomer catches up with them.

Sources keep nothing for a newcomer. It takes chunks of whatever round a source is in
(`p2ptrain.training.sync.download`). Meanwhile it collects the results of all rounds since it began
(`p2ptrain.training.sync.rounds_since`), before anything else that wants its link: other peers keep few of them. When
all chunks are there, it goes through the rounds in order: it puts the chunks of that round in place, applies the
round's result, and so on. A result moves the right chunks rightly whatever the others hold, because a chunk has all
that a step needs (`p2ptrain.training.state.digest`). The digest of the newest chunks' round tells that the whole is
right.

What is there outlives a failure, and in files the process. After a pause it goes on from where it was if somebody still
has the results since; otherwise it begins anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence

from p2ptrain.averaging.commit.round_log import Result
from p2ptrain.averaging.grouping.membership import ACTIVE_STATES
from p2ptrain.averaging.protocol.certificate import Certificate
from p2ptrain.averaging.protocol.head import Head
from p2ptrain.errors import IncompatibleError, IntegrityError, TemporaryError
from p2ptrain.network.transport import PeerId
from p2ptrain.progress import Advance, Jobs
from p2ptrain.tasks import Tasks, together
from p2ptrain.training.state.digest import CHUNK_BYTES
from p2ptrain.training.state.shared_state import Stamp
from p2ptrain.training.sync.download import download_state
from p2ptrain.training.sync.heads import check_head, fetch_head
from p2ptrain.training.sync.partial_download import PartialDownload
from p2ptrain.training.sync.replica import Replica
from p2ptrain.training.sync.rounds_since import RoundsSince

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0
"""Between two looks for results of new rounds; a peer keeps those of some rounds."""
ADMISSION_SECONDS = 60.0
"""Timeout of a chunk of an unknown round that waits for that round's result."""
MAX_AT_ONCE = 8
MAX_BATCH_BYTES = 4 << 20
"""So many results are fetched at once, if they are not more bytes."""
TELL_SECONDS = 60.0
"""Between two log lines of a download that lasts."""

MAX_STATE_RATIO = 16
"""A state is at most so many times as large as its parameters: no optimizer shares more of them."""

FAILURES = (TemporaryError, IntegrityError, IncompatibleError)


class StateDownload:
    """One peer's download of the swarm's state, and the rounds since; implements `Admission`.

    Args:
        replica: The shared state that is to be brought to where the swarm is.
        jobs: Told how far the download is.
    """

    def __init__(self, replica: Replica, jobs: Jobs) -> None:
        self._replica = replica
        self._context = replica.context
        self._state = replica.state
        self._history = replica.averager.history
        self._membership = replica.membership
        self._jobs = jobs
        scratch, swarm = self._context.runtime.scratch, self._context.swarm
        self._folder = scratch / f"download-{swarm.hex()[:16]}" if scratch is not None else None
        self._part = self._folder / "state" if self._folder is not None else None
        self._partial: PartialDownload | None = None
        self._rounds = RoundsSince()
        self._claims: dict[bytes, dict[PeerId, bytes]] = {}
        self._failures: Counter[PeerId] = Counter()
        self._source = ""
        self._must_be_one_round = False
        self._is_collecting = asyncio.Lock()
        self._waiting: dict[PeerId, Stamp] = {}
        self._wanted = asyncio.Event()
        self._news = asyncio.Event()

    @property
    def has_begun(self) -> bool:
        """True if a part of a state is here; also if an earlier process left it."""
        if self._partial is not None:
            return self._partial.num_done > 0
        return self._part is not None and self._part.is_dir()

    @property
    def certificates(self) -> list[Certificate]:
        """Of the rounds since the download began, in order."""
        return self._rounds.certificates

    @contextlib.asynccontextmanager
    async def fetched(self, source: PeerId, head: Head) -> AsyncIterator[RoundsSince]:
        """Download what is missing; the rounds since are collected until the body ends.

        Args:
            source: Whom to ask first.
            head: What it says that it holds; checked.

        Raises:
            See `p2ptrain.training.sync.download.download_state`; what has arrived stays.
        """
        self._source = source
        partial = await self._open(source, head)
        async with Tasks() as tasks:
            tasks.start(self._collect(), "collect rounds")
            with self._jobs("downloading the state") as advance:
                told = _Teller(advance)
                while not (partial.is_complete and self._fits_together(partial)):
                    layout = self._state.layout.fingerprint
                    await download_state(self._context.rpc, self._sources, layout, partial, self, advance=told)
            yield self._rounds

    async def _open(self, source: PeerId, head: Head) -> PartialDownload:
        if self._partial is None:
            rounds = self._folder / "rounds" if self._folder is not None else None
            self._partial = await self._context.runtime.offload(PartialDownload.open, self._part)
            self._rounds = await self._context.runtime.offload(
                RoundsSince.open, rounds, self._context.swarm, self._context.signer
            )
            for _, stamp in self._partial.chunks():  # They were believed before they were kept.
                self._claims.setdefault(stamp.lineage, {})[self._context.peer_id] = stamp.digest
            if self._partial.num_done:
                logger.info(
                    "going on with a download: %d of %d MiB are there",
                    self._partial.bytes_done >> 20, self._partial.num_bytes >> 20,
                )  # fmt: skip
        if self._rounds.base is not None:
            await self._extend()
        if self._rounds.position(head.lineage) is None:
            self._begin_at(head)
        self._claims.setdefault(head.lineage, {})[source] = head.digest
        return self._partial

    def _begin_at(self, head: Head) -> None:
        """Collect the rounds from this head on; chunks of other rounds turn out to be of no use in the end."""
        if self._rounds.base is not None and self._partial is not None and self._partial.num_done:
            logger.warning("the download begins anew at round %d: no peer has the rounds since", head.round)
        self._rounds.start(head)
        self._claims = {}

    def _sources(self) -> list[PeerId]:
        """Peers to be asked for chunks and results: those first that hold what is wanted."""
        records = [
            record for record in self._membership.records()
            if record.state in ACTIVE_STATES and record.peer != self._source
            and not self._membership.is_suspect(record.peer) and not self._membership.is_mistrusted(record.peer)
        ]  # fmt: skip
        records.sort(key=lambda record: self._rounds.position(record.lineage) is None)
        return [self._source, *(record.peer for record in records)]

    # Which chunks to take

    def check_size(self, num_bytes: int) -> None:
        """See `Admission`: a full disk ends this peer, and no liar may bring that about."""
        most = MAX_STATE_RATIO * self._state.vector.nbytes + CHUNK_BYTES
        if num_bytes > most:
            raise IntegrityError(f"a state of {num_bytes >> 20} MiB is more than a model of this size can have")

    async def admit(self, source: PeerId, stamp: Stamp) -> None:
        """See `Admission`: the round's result has to be here, and most have to hold the same digest."""
        try:
            async with asyncio.timeout(ADMISSION_SECONDS):
                while self._rounds.position(stamp.lineage) is None:
                    self._waiting[source] = stamp
                    self._wanted.set()
                    await self._news.wait()
        except TimeoutError:
            raise TemporaryError(f"peer {source[-8:]} holds a round that no result leads to") from None
        finally:
            self._waiting.pop(source, None)
        self._claims.setdefault(stamp.lineage, {})[source] = stamp.digest
        if stamp.digest != self._believed(stamp.lineage):
            raise IntegrityError(f"peer {source[-8:]} has another digest for its round than most")

    async def wait_for_turn(self) -> None:
        """See `Admission`: results first."""
        async with self._is_collecting:
            pass

    def _believed(self, lineage: bytes) -> bytes:
        """The digest that most peers have at a lineage, by their records and by the chunks that they sent."""
        votes = {record.peer: record.digest for record in self._membership.records() if record.lineage == lineage}
        counted = Counter({**votes, **self._claims.get(lineage, {})}.values())
        return counted.most_common(1)[0][0] if counted else b""

    def _is_usable(self, index: int, stamp: Stamp) -> bool:
        return self._rounds.position(stamp.lineage) is not None and self._believed(stamp.lineage) == stamp.digest

    def _fits_together(self, partial: PartialDownload) -> bool:
        """Forget chunks that do not go with the others; whether none did.

        What is common to all chunks has to be of one round, and no chunk may be older.
        """
        dropped = partial.retain(self._is_usable)
        positions = {index: self._rounds.position(stamp.lineage) or 0 for index, stamp in partial.chunks()}
        if not positions:
            return False
        common = [position for index, position in positions.items() if index < partial.cut.num_common]
        oldest = max(positions.values()) if self._must_be_one_round else max(common, default=0)
        dropped += partial.retain(lambda index, stamp: positions[index] >= oldest)
        return not dropped

    # The rounds since

    async def _collect(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._wanted.wait()
            was_wanted = self._wanted.is_set()
            self._wanted.clear()
            if not await self._extend() and was_wanted:
                await self._look_for_a_gap()

    async def _extend(self) -> bool:
        """Fetch the results of the rounds that the first peer to have any has; whether there were some."""
        for peer in sorted(self._sources(), key=self._failures.__getitem__):
            try:
                chain = await self._history.certificates_after(peer, self._rounds.tip)
                for some in self._batches(peer, chain):
                    async with self._is_collecting:
                        sources = [peer, *(other for other in self._sources() if other != peer)]
                        bodies = [certificate.body for certificate in some]
                        fetching = (self._history.fetch_means(sources, b, self._replica.num_values(b)) for b in bodies)
                        for certificate, means in zip(some, await together("fetch", fetching), strict=True):
                            await self._context.runtime.offload(self._rounds.append, Result(certificate, means))
                    self._tell_news()
            except FAILURES as error:
                logger.debug("peer %s has no results for the download: %s", peer[-8:], error)
                self._failures[peer] += 1
                continue
            if chain:
                return True
        return False

    def _batches(self, peer: PeerId, chain: Sequence[Certificate]) -> Iterator[Sequence[Certificate]]:
        """Results to be fetched at once: one, or several where they are small and rounds may be short."""
        sizes = [self._history.num_bytes_of(peer, each.body, self._replica.num_values(each.body)) for each in chain[:1]]
        step = MAX_AT_ONCE if sizes and sizes[0] * MAX_AT_ONCE <= MAX_BATCH_BYTES else 1
        for start in range(0, len(chain), step):
            yield chain[start : start + step]

    async def _look_for_a_gap(self) -> None:
        """Begin anew where no peer is at a known round any more, and none has the results since.

        If it can, it begins at the round of a chunk that is here already.
        """
        best: Head | None = None
        for peer in sorted(self._sources(), key=self._waiting.__contains__):
            try:
                head = await self._head_of(peer)
                if self._rounds.position(head.lineage) is not None:
                    return
                check_head(self._context, self._membership, head)
            except FAILURES:
                continue
            if best is None or peer in self._waiting or head.outranks(best):
                best = head
        if best is not None and self._rounds.base is not None and best.outranks(self._rounds.base):
            self._begin_at(best)
            self._tell_news()

    async def _head_of(self, peer: PeerId) -> Head:
        """The head of the chunk by a peer that waits for its round; of what it holds now, where that cannot be told."""
        stamp = self._waiting.get(peer)
        if stamp is not None:
            for certificate in await self._history.certificates_after(peer, self._rounds.tip, proofs=True):
                if certificate.body.next_lineage == stamp.lineage:
                    return certificate.body.next_head(stamp.digest, certificate.to_bytes())
        return await fetch_head(self._context.rpc, peer)

    def _tell_news(self) -> None:
        event, self._news = self._news, asyncio.Event()
        event.set()

    # Putting it together

    def newest(self) -> tuple[int, bytes]:
        """Return how many of the rounds since are in the newest chunks, and their lineage."""
        assert self._partial is not None
        stamps = {stamp.lineage for _, stamp in self._partial.chunks()}
        return max((self._rounds.position(lineage) or 0, lineage) for lineage in stamps)

    async def assemble(self) -> Head:
        """Overwrite the shared state with the chunks, and bring them to the round of the newest ones.

        Returns:
            Its head, which is to be set.

        Raises:
            IntegrityError: It has not the digest that it should. The shared state is nothing then, and has to be
                downloaded again: this time with all chunks of one round, for a step that moves a value by others.
        """
        partial, rounds = self._partial, self._rounds
        assert partial is not None
        newest, lineage = self.newest()
        by_position: dict[int, list[int]] = {}
        for index, stamp in partial.chunks():
            by_position.setdefault(rounds.position(stamp.lineage) or 0, []).append(index)
        oldest = min(by_position)
        with self._jobs("applying the rounds since", "rounds") as advance:
            for position in range(oldest, newest + 1):
                chunks = [(index, partial.chunk(index)) for index in by_position.get(position, [])]
                if chunks:
                    await self._context.runtime.compute(self._state.patch, partial.specs, chunks)
                if position < newest:
                    result = rounds.result(position)
                    await self._context.runtime.compute(self._replica.step, result.certificate.body, result.means)
                advance(position - oldest, newest - oldest)
        root = (await self._context.runtime.compute(self._state.tree)).root
        if root != self._believed(lineage):
            self._must_be_one_round = newest > oldest
            self.discard()
            raise IntegrityError("the downloaded state does not have its digest: it is downloaded anew")
        return rounds.head_at(newest, root)

    def discard(self) -> None:
        """Forget what was downloaded, files included; also what an earlier process left."""
        if self._partial is not None:
            self._partial.discard()
        self._rounds.discard()
        self._claims = {}
        if self._folder is not None and self._folder.exists():
            shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Give memory back; files stay for the next process."""
        if self._partial is not None:
            self._partial.close()
            self._partial = None


class _Teller:
    """Passes on how far a download is, and has the log say so once a minute."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._loop = asyncio.get_running_loop()
        self._told = (self._loop.time(), -1)

    def __call__(self, done: int, total: int) -> None:
        self._advance(done, total)
        now = self._loop.time()
        since, before = self._told
        if before < 0:
            self._told = (now, done)
        elif now - since >= TELL_SECONDS:
            rate = (done - before) / (now - since)
            logger.info(
                "downloading the state: %.0f of %.0f MB (%.0f %%), %.2f MB/s",
                done / 1e6, total / 1e6, 100 * done / max(1, total), rate / 1e6,
            )  # fmt: skip
            self._told = (now, done)
