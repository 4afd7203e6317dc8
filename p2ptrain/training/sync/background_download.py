"""A state download during which the swarm keeps committing rounds.

Sources send chunks of their current round (`p2ptrain.training.sync.download`). The newcomer collects the results of
all rounds since, before chunks, because other peers keep few of them. In the end it replays the rounds in order: for
each it writes the chunks of that round and applies the result. The digest of the newest round verifies the whole state.

Chunks survive failures and, in files, a restart. The download resumes if a peer still has the results since;
otherwise it begins anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence

from p2ptrain.averaging.commit.round_log import Result
from p2ptrain.averaging.protocol.certificate import Certificate, Head
from p2ptrain.averaging.protocol.table import NO_MEMBERS
from p2ptrain.errors import IncompatibleError, IntegrityError, TemporaryError
from p2ptrain.progress import Advance, Progress
from p2ptrain.tasks import Tasks, together
from p2ptrain.training.state.shared_state import Stamp
from p2ptrain.training.sync.download import PartialDownload, download_state
from p2ptrain.training.sync.replica import Replica
from p2ptrain.training.sync.rounds_since import RoundsSince
from p2ptrain.training.sync.state_server import check_head, count_digests, fetch_head

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0
"""Poll interval for new results; short enough that peers still hold them."""
ADMISSION_SECONDS = 60.0
"""Timeout for the result of a chunk's round."""
MAX_AT_ONCE = 8
MAX_BATCH_BYTES = 4 << 20
"""Size limit of `MAX_AT_ONCE` results fetched at once."""
LOG_SECONDS = 60.0
"""Interval between log lines of a long download."""

TOO_SLOW = (
    "this peer needs a faster link or machine, or its organizer longer rounds ('every' in the manifest's [training])"
)

SOURCE_FAILURES = (TemporaryError, IntegrityError, IncompatibleError)
"""Errors that a broken or hostile peer can cause; none of them may end training.

A `ResourceError` is this machine's own: its disk or memory is full."""


class StateDownload:
    """One peer's download of the swarm's state; implements `Admission`.

    Attributes:
        rounds: The rounds since the download began.
    """

    def __init__(self, replica: Replica, jobs: Progress) -> None:
        self._replica = replica
        self._context = replica.context
        self._state = replica.state
        self._round_log = replica.averager.round_log
        self._membership = replica.context.membership
        self._jobs = jobs
        scratch, swarm = self._context.runtime.scratch, self._context.swarm
        self._folder = scratch / f"download-{swarm.hex()[:16]}" if scratch else None
        self._part = self._folder / "state" if self._folder else None
        self._partial: PartialDownload | None = None
        self.rounds = RoundsSince()
        self._claims: dict[bytes, dict[str, bytes]] = {}
        self._failures: Counter[str] = Counter()
        self._source = ""
        self._must_be_one_round = False
        self._num_anew = 0
        self._link = asyncio.Lock()
        self._extending = asyncio.Lock()
        self._waiting: dict[str, Stamp] = {}
        self._wanted = asyncio.Event()
        self._news = asyncio.Event()

    @property
    def has_begun(self) -> bool:
        """True if some chunks are present, those of an earlier process included."""
        if self._partial is not None:
            return self._partial.num_done > 0
        return self._part is not None and self._part.is_dir()

    @contextlib.asynccontextmanager
    async def fetched(self, source: str, head: Head) -> AsyncIterator[None]:
        """Download the missing chunks, from ``source`` first; collect results until the body ends.

        ``head`` is the verified head of ``source``. Raises the errors of `download_state`; received chunks stay.
        """
        self._source = source
        partial = await self._open(source, head)
        async with Tasks() as tasks:
            tasks.start(self._collect(), "collect rounds")
            with self._jobs("downloading the state") as advance:
                logged = _logged(advance)
                while not await self._is_over(partial):
                    await download_state(self._context.rpc, self._sources, self._state, partial, self, advance=logged)
            yield

    async def _open(self, source: str, head: Head) -> PartialDownload:
        if self._partial is None:
            rounds, context = self._folder / "rounds" if self._folder else None, self._context
            self._partial = await context.runtime.offload(PartialDownload.open, self._part)
            self.rounds = await context.runtime.offload(RoundsSince.open, rounds, context.certificate)
            for _, stamp in self._partial.chunks():  # Their digests were believed when they were kept.
                self._claims.setdefault(stamp.lineage, {})[self._context.rpc.peer_id] = stamp.digest
            if self._partial.num_done:
                logger.info(
                    "going on with a download: %d of %d MiB are there",
                    self._partial.bytes_done >> 20, self._partial.num_bytes >> 20,
                )  # fmt: skip
        if self.rounds.base is not None:
            await self._extend()
        if head.lineage not in self.rounds.positions:
            self._begin_at(head)
        self._claims.setdefault(head.lineage, {})[source] = head.digest
        return self._partial

    def _begin_at(self, head: Head) -> None:
        """Collect results from this head on; `_fits_together` drops chunks of other rounds later."""
        if self.rounds.base is not None and self._partial is not None and self._partial.num_done:
            why = f"no peer has the rounds since round {self.rounds.base.round}"
            self._num_anew += 1
            if self._num_anew > 1:  # The first time, it may have been away.
                why += f", again: {TOO_SLOW}"
            logger.warning("the download begins anew at round %d: %s", head.round, why)
        self.rounds.start(head)
        self._claims = {}

    def _sources(self) -> list[str]:
        """Return the trusted peers, the current source first, then peers at a known round."""
        records = [record for record in self._membership.trusted_records() if record.peer != self._source]
        records.sort(key=lambda record: record.lineage not in self.rounds.positions)
        return [self._source, *(record.peer for record in records)]

    # Which chunks to take

    async def admit(self, source: str, stamp: Stamp) -> None:
        """See `Admission`: the round's result must be here, and no other digest may be more frequent."""
        try:
            async with asyncio.timeout(ADMISSION_SECONDS):
                while stamp.lineage not in self.rounds.positions:
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
        async with self._link:
            pass

    def _believed(self, lineage: bytes) -> bytes:
        """Return the digest at a lineage: the one that the next certificate vouches for, or the most frequent.

        Until a later round is certified, peers' records and the stamps that they sent count.
        """
        position = self.rounds.positions.get(lineage, len(self.rounds.certificates))
        if position < len(self.rounds.certificates):
            return self.rounds.certificates[position].body.digest
        votes = {record.peer: record.digest for record in self._membership.records() if record.lineage == lineage}
        table = self.rounds.tip.table if self.rounds.tip is not None else NO_MEMBERS
        counted = count_digests({**votes, **self._claims.get(lineage, {})}, table)
        return counted.most_common(1)[0][0] if counted else b""

    async def _is_over(self, partial: PartialDownload) -> bool:
        """True if all chunks are here and fit, also with the newest certificate, which vouches for the state before."""
        if partial.is_complete:
            async with self._extending:
                await self._extend()
        return partial.is_complete and self._fits_together(partial)

    def _fits_together(self, partial: PartialDownload) -> bool:
        """Drop chunks that do not fit the others; return True if all fit.

        All common chunks must be of one round, and no chunk may be older.
        """
        known = self.rounds.positions
        dropped = partial.retain(lambda _, s: s.lineage in known and self._believed(s.lineage) == s.digest)
        positions = {index: known.get(stamp.lineage, 0) for index, stamp in partial.chunks()}
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
            async with self._extending:
                if not await self._extend() and was_wanted:
                    await self._skip_a_gap()

    async def _extend(self) -> bool:
        """Fetch the newer results of the first peer that has any; return True if there were some."""
        for peer in sorted(self._sources(), key=self._failures.__getitem__):
            if (tip := self.rounds.tip) is None:
                return False
            try:
                chain = await self._round_log.certificates_after(peer, tip)
                for some in self._batches(peer, chain):
                    async with self._link:
                        sources = [peer, *(other for other in self._sources() if other != peer)]
                        bodies = [certificate.body for certificate in some]
                        fetching = (self._round_log.fetch_means(sources, b) for b in bodies)
                        for certificate, means in zip(some, await together("fetch", fetching), strict=True):
                            await self._context.runtime.offload(self.rounds.append, Result(certificate, means))
                    self._notify()
            except SOURCE_FAILURES as error:
                logger.debug("peer %s has no results for the download: %s", peer[-8:], error)
                self._failures[peer] += 1
                continue
            if chain:
                return True
        return False

    def _batches(self, peer: str, chain: Sequence[Certificate]) -> Iterator[Sequence[Certificate]]:
        """Split a chain into batches to fetch at once: several results if they are small, else one."""
        sizes = [self._round_log.num_bytes_of(peer, each.body) for each in chain[:1]]
        step = MAX_AT_ONCE if sizes and sizes[0] * MAX_AT_ONCE <= MAX_BATCH_BYTES else 1
        for start in range(0, len(chain), step):
            yield chain[start : start + step]

    async def _skip_a_gap(self) -> None:
        """Begin anew, best at a waiting chunk's head, if no peer is at a known round and none has the results since."""
        best: Head | None = None
        for peer in sorted(self._sources(), key=self._waiting.__contains__):
            try:
                head = await self._head_of(peer)
                if head.lineage in self.rounds.positions:
                    return
                check_head(self._context, head)
                await self._round_log.believe(peer, self._state.head, head)
            except SOURCE_FAILURES:
                continue
            if best is None or peer in self._waiting or head.outranks(best):
                best = head
        if best is not None and self.rounds.base is not None and best.outranks(self.rounds.base):
            self._begin_at(best)
            self._notify()

    async def _head_of(self, peer: str) -> Head:
        """Return the head of the chunk that a peer waits to send, or its present head if no certificate is found."""
        stamp, head = self._waiting.get(peer), self.rounds.tip
        if stamp is not None and head is not None:
            for certificate in await self._round_log.certificates_after(peer, head, proofs=True):
                head = head.after(certificate, stamp.digest)
                if head.lineage == stamp.lineage:
                    return head
        return await fetch_head(self._context.rpc, peer)

    def _notify(self) -> None:
        event, self._news = self._news, asyncio.Event()
        event.set()

    # Putting it together

    def newest(self) -> tuple[int, bytes]:
        """Return the position of the newest chunks among the rounds since, and their lineage."""
        assert self._partial is not None
        stamps = {stamp.lineage for _, stamp in self._partial.chunks()}
        return max((self.rounds.positions.get(lineage, 0), lineage) for lineage in stamps)

    async def assemble(self) -> Head:
        """Overwrite the shared state with the chunks, each brought to the newest round; return its head.

        Raises:
            IntegrityError: The result has the wrong digest; the shared state is invalid until a new download. If the
                chunks were of several rounds, the next download takes them from one round.
        """
        partial, rounds = self._partial, self.rounds
        assert partial is not None
        newest, lineage = self.newest()
        by_position: dict[int, list[int]] = {}
        for index, stamp in partial.chunks():
            by_position.setdefault(rounds.positions.get(stamp.lineage, 0), []).append(index)
        oldest = min(by_position)
        with self._jobs("applying the rounds since", "rounds") as advance:
            for position in range(oldest, newest + 1):
                chunks = [(index, partial.chunk(index)) for index in by_position.get(position, [])]
                if chunks:
                    await self._context.runtime.compute(self._state.patch, partial.specs, chunks)
                if position < newest:
                    await self._context.runtime.compute(self._replica.step, rounds.result(position))
                advance(position - oldest, newest - oldest)
        root = (await self._context.runtime.compute(self._state.tree)).root
        if root != self._believed(lineage):
            self._must_be_one_round = newest > oldest
            self.discard()
            raise IntegrityError("the downloaded state does not have its digest: it is downloaded anew")
        return rounds.head_at(newest, root)

    def discard(self) -> None:
        """Forget the download and delete its files, those of an earlier process included."""
        if self._partial is not None:
            self._partial.discard()
        self.rounds.discard()
        self._claims = {}
        if self._folder is not None and self._folder.exists():
            shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Release the memory; keep the files for the next process."""
        if self._partial is not None:
            self._partial.close()
            self._partial = None


def _logged(advance: Advance) -> Advance:
    """Return ``advance``, extended by a log line every `LOG_SECONDS`."""
    loop, since, before = asyncio.get_running_loop(), 0.0, -1

    def report(done: int, total: int) -> None:
        nonlocal since, before
        advance(done, total)
        now = loop.time()
        if before < 0:
            since, before = now, done
        elif now - since >= LOG_SECONDS:
            rate = (done - before) / (now - since)
            logger.info(
                "downloading the state: %.0f of %.0f MB (%.0f %%), %.2f MB/s",
                done / 1e6, total / 1e6, 100 * done / max(1, total), rate / 1e6,
            )  # fmt: skip
            since, before = now, done

    return report
