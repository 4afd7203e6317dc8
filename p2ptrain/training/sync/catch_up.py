"""Catch-up with another peer: replay of missed rounds, download of the state, repair of a damaged state.

A stale peer replays the rounds that it missed, or downloads the state if that is fewer bytes (`choose_way`). Both lead
to the same bits.

A catch-up of a peer that has trained runs beside training. It fetches without the model, and changes the state only
while a caller lends it the work at rest (`CatchUp.follow`, `CatchUp.apply_fetched`).

Local work is carried to the new state only where it cannot count twice. The certificates between two states tell
whether the work has counted. If they are known, replay and download treat local work alike. Work on top of a damaged
state is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from p2ptrain.averaging.commit.attempt import AttemptFailedError
from p2ptrain.averaging.commit.round_log import Result
from p2ptrain.averaging.grouping.membership import ACTIVE_STATES
from p2ptrain.averaging.protocol.certificate import Body, Certificate, Head
from p2ptrain.errors import IncompatibleError, IntegrityError, PeerRefusedError, ResourceError, TemporaryError
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.progress import Advance, Progress
from p2ptrain.tasks import Tasks, to_its_end, together, until_ended
from p2ptrain.training.sync.background_download import SOURCE_FAILURES, StateDownload
from p2ptrain.training.sync.replica import Contribution, Replica
from p2ptrain.training.sync.state_server import check_head, fetch_head

logger = logging.getLogger(__name__)
T = TypeVar("T")

DOWNLOAD_BELOW = 0.9
"""A download needs fewer bytes than this part of a replay's. A replay also fills the history, from which other peers
can replay, so it wins near equality."""
MAX_OTHERS_ASKED = 3
"""Peers asked for rounds that the source does not have."""
STALL_SECONDS = 4.0
"""A source that fails after this time is doubted: it must prove its state before this peer follows it again."""
MAX_DOUBTED_ASKED = 4
"""Limit of concurrent checks of doubted peers."""
FOREGROUND_SECONDS = 4.0
"""Time for which a round waits for a catch-up; after that, the catch-up goes on beside training."""
MAX_CATCH_UPS = 4
"""Limit of concurrent catch-ups, one for each source; at most one of them downloads the state."""
MAX_REPAIRS = 10
"""Consecutive failed repairs that end training."""


class _NoFaultError(TemporaryError):
    """A catch-up ended, and its source is not at fault."""


class CatchUp:
    """Brings one peer's shared state to another peer's.

    Attributes:
        resyncs: Full downloads of the state.
        incompatible: By peer: why its state does not fit this model.
    """

    def __init__(self, replica: Replica, jobs: Progress) -> None:
        self._replica = replica
        self._context = replica.context
        self._state = replica.state
        self._round_log = replica.averager.round_log
        self._matchmaker = replica.averager.matchmaker
        self._membership = replica.context.membership
        self._jobs = jobs
        self._downloaded = StateDownload(replica, jobs)
        self._failed_repairs = 0
        self._tasks = Tasks()
        self._checks: dict[str, asyncio.Task[None]] = {}
        self._running: dict[str, asyncio.Task[bool]] = {}
        self._is_downloading = False
        self._waiting: set[asyncio.Task[Any]] = set()
        self._lent = asyncio.Event()
        self._applying = asyncio.Lock()
        self._work: Contribution | None = None
        self.resyncs = 0
        self.incompatible: dict[str, str] = {}

    async def close(self) -> None:
        await self._tasks.close()
        self._downloaded.close()

    @property
    def is_running(self) -> bool:
        """True if a catch-up goes on beside training."""
        return any(not task.done() for task in self._running.values())

    async def follow(self, source: str, work: Contribution | None) -> bool:
        """Catch up with one peer; return True on success.

        A peer that has trained waits for `FOREGROUND_SECONDS`. Then the catch-up goes on beside training, and applies
        its results within `apply_fetched`.
        """
        if self._membership.is_doubted(source):
            self._membership.suspect(source, "let others wait for what it did not hold")
            self.check_soon(source)
            return False
        is_new = source not in self._running
        if is_new:
            if len(self._running) >= MAX_CATCH_UPS:
                return False
            self._running[source] = self._tasks.call(self._follow(source), f"follow-{source[-8:]}")
        task = self._running[source]
        if is_new or not self._has_trained:
            async with self._lend(work):
                await asyncio.wait({task}, timeout=FOREGROUND_SECONDS if self._has_trained else None)
        self._forget_ended()
        if not task.done():  # Until this peer has caught up, its rounds do without the source.
            self._membership.suspect(source, "is ahead, and takes long to follow")
            return False
        return not task.cancelled() and task.result()

    async def apply_fetched(self, work: Contribution | None) -> None:
        """Apply the results that catch-ups beside training have fetched; call while ``work`` is at rest.

        Raises:
            ResourceError: One of them found too little disk or memory.
        """
        self._forget_ended()
        if self._waiting:
            async with self._lend(work):
                await asyncio.wait(set(self._waiting), timeout=FOREGROUND_SECONDS)

    def _forget_ended(self) -> None:
        ended = [(source, task) for source, task in self._running.items() if task.done()]
        for source, task in ended:
            del self._running[source]
            if not task.cancelled():
                task.result()

    def is_following(self, record: PeerRecord) -> bool:
        """True if a catch-up beside training leads to a peer or to its head."""
        is_on_the_way = self._is_downloading and record.lineage in self._downloaded.rounds.positions
        return record.peer in self._running or is_on_the_way

    @property
    def _has_trained(self) -> bool:
        return self._state.head.round > 0

    async def _follow(self, source: str) -> bool:
        started = asyncio.get_running_loop().time()
        try:
            await self._catch_up(source)
        except _NoFaultError:
            return False
        except SOURCE_FAILURES as error:
            self._blame(source, error, started)
            return False
        self._membership.kept_promise(source)
        self._membership.answered(source)
        return True

    @contextlib.asynccontextmanager
    async def _lend(self, work: Contribution | None) -> AsyncIterator[None]:
        """Allow catch-ups to apply results to the state and ``work`` until the body ends."""
        self._work = work
        self._lent.set()
        try:
            yield
        finally:
            self._lent.clear()
            async with self._applying:  # Wait for an application in progress.
                self._work = None

    async def _apply(self, change: Callable[[Contribution | None], Coroutine[Any, Any, T]]) -> T:
        """Run a change of the state, to its end, once the caller lends its work."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            while True:
                await self._lent.wait()
                async with self._applying:
                    if self._lent.is_set():
                        return await to_its_end(change(self._work))
        finally:
            self._waiting.discard(task)

    def _blame(self, source: str, error: Exception, asked_at: float) -> None:
        logger.info("could not follow peer %s: %s", source[-8:], error)
        if isinstance(error, IncompatibleError):
            self.incompatible[source] = str(error)
        if not isinstance(error, PeerRefusedError):  # A peer that refuses is alive: leading without it would fork.
            self._membership.suspect(source, str(error))
        stalled = asyncio.get_running_loop().time() - asked_at > STALL_SECONDS
        self._membership.mistrust(source, stalled=stalled)

    def has_partial_state(self) -> bool:
        """True if this peer has an untrained model and an unfinished download."""
        return self._state.head.round == 0 and self._downloaded.has_begun

    def check_soon(self, peer: str) -> None:
        """Check in the background whether a doubted peer has the state that it announces."""
        self._checks = {peer: task for peer, task in self._checks.items() if not task.done()}
        if peer in self._checks or len(self._checks) >= MAX_DOUBTED_ASKED or self._membership.is_mistrusted(peer):
            return
        self._checks[peer] = self._tasks.start(self._check(peer), f"ask-{peer[-8:]}")

    async def _check(self, peer: str) -> None:
        started = asyncio.get_running_loop().time()
        try:
            if not await self._round_log.certificates_after(peer, self._state.head.lineage):
                await self._head_ahead(peer)
        except SOURCE_FAILURES as error:
            self._blame(peer, error, started)
        else:
            self._membership.vouch(peer)

    async def _catch_up(self, source: str) -> None:
        chain = await self._round_log.certificates_after(source, self._state.head.lineage)
        holder = source
        if not chain:
            holder, chain = await self._chain_of_others(source)
        if not chain:
            return await self._download(source, keep_work=True)
        if chain[0].body.digest != self._state.head.digest:
            logger.warning("the swarm went on from another state than this peer's: its own is wrong")
            return await self._download(source, keep_work=False, chain=chain)
        replay_bytes = sum(self._round_log.num_bytes_of(holder, each.body) for each in chain)
        is_download, reason = choose_way(len(chain), replay_bytes, self._state_bytes())
        logger.info("catching up with peer %s: %s", holder[-8:], reason)
        if is_download:
            try:
                return await self._download(source, keep_work=True, chain=chain)
            except (*SOURCE_FAILURES, ResourceError) as error:
                logger.info("could not download from peer %s: %s", source[-8:], error)
        try:
            with self._jobs("replaying missed rounds", "rounds") as advance:
                await self._replay(holder, chain, advance)
            if not self._is_downloading:
                self._downloaded.discard()
        except SOURCE_FAILURES as error:
            if holder == source and not isinstance(error, PeerRefusedError):
                raise
            # The swarm commits rounds faster than this replay, or another holder than the source failed.
            logger.info("peer %s could not replay it all: %s", holder[-8:], error)
            if not isinstance(error, PeerRefusedError):
                self._membership.mistrust(holder)
            await self._download(source, keep_work=True, chain=chain)

    async def _replay(self, holder: str, chain: Sequence[Certificate], advance: Advance) -> None:
        if self._work is not None and self._work.tokens > 0:
            self._matchmaker.announce_soon(chain[-1].body.next_head(b"", b""))
        others = [peer for peer in self._peers_at(chain[-1].body.next_lineage) if peer != holder]
        for number, certificate in enumerate(chain):
            advance(number, len(chain))
            body, head = certificate.body, self._state.head
            self._check_not_overtaken(body)
            body.check_follows(head)
            if body.levels != self._matchmaker.cells.num_levels(head.present):
                raise IntegrityError("a certificate is of another tree than its lineage has")
            chunks = self._round_log.chunks_of(holder, body)
            report = await self._round_log.fetch(chunks, [holder, *others])
            self._membership.mistrust_sources(report.liars, report.slow)
            await self._apply(partial(self._apply_missed, Result(certificate, chunks.means)))
            logger.info("replayed round %d from peer %s", body.round, holder[-8:])

    async def _apply_missed(self, result: Result, work: Contribution | None) -> None:
        self._check_not_overtaken(result.certificate.body)
        await self._replica.apply_missed(result, work)

    def _check_not_overtaken(self, body: Body) -> None:
        if body.lineage != self._state.head.lineage:
            raise _NoFaultError("this peer's own rounds went on meanwhile")

    async def _chain_of_others(self, source: str) -> tuple[str, list[Certificate]]:
        """Return another peer and its certificates up to the head of ``source``, or ``source`` and no certificates."""
        active = [record for record in self._membership.records() if record.state in ACTIVE_STATES]
        goal = next((record.lineage for record in active if record.peer == source), None)
        if goal is None:
            return source, []
        start, others = self._state.head.lineage, [peer for peer in self._peers_at(goal) if peer != source]

        async def ask(peer: str) -> list[Certificate]:
            try:
                chain = await self._round_log.certificates_after(peer, start)
            except SOURCE_FAILURES as error:
                logger.debug("peer %s tells no history: %s", peer[-8:], error)
                return []
            return chain if between(chain, start, goal) else []

        asked = self._context.runtime.random.sample(others, min(len(others), MAX_OTHERS_ASKED))
        chains = await together("ask", map(ask, asked))
        return next(((peer, chain) for peer, chain in zip(asked, chains, strict=True) if chain), (source, []))

    def _peers_at(self, lineage: bytes) -> list[str]:
        return [record.peer for record in self._membership.trusted_records() if record.lineage == lineage]

    def _state_bytes(self) -> int:
        """Return the size of a download; 0 for a torch optimizer before its first step, which has no state yet."""
        if self._state.head.round == 0 and self._replica.drops_stale:
            return 0
        return sum(tensor.nbytes for _, tensor in self._state.tensors())

    def others_hold_another_state(self) -> bool:
        head = self._state.head
        return any(r.lineage == head.lineage and r.digest != head.digest for r in self._membership.records())

    async def repair(self, work: Contribution, own_digest_is_right: bool) -> None:
        """Replace a wrong state by that of another peer; drop the local work on top of it.

        ``own_digest_is_right`` is True for corrupted memory, and False if the other peers hold another digest.

        Raises:
            AttemptFailedError: No peer could send a right state this time.
            IntegrityError: No peer could for `MAX_REPAIRS` times in a row.
        """
        records = [r for r in self._membership.records() if not self._membership.is_suspect(r.peer)]
        same = [r.peer for r in records if r.lineage == self._state.head.lineage]
        agreeing = [r.peer for r in records if r.peer in same and r.digest == self._state.head.digest]
        first = agreeing if own_digest_is_right else [peer for peer in same if peer not in agreeing]
        for task in self._running.values():
            task.cancel()
        await until_ended(*self._running.values())
        self._running.clear()
        for peer in dict.fromkeys([*first, *self._membership.alive_trainers()]):
            try:
                async with self._lend(work):
                    await self._download(peer, keep_work=False)
                self._failed_repairs = 0
                return
            except SOURCE_FAILURES as error:
                logger.info("could not repair from peer %s: %s", peer[-8:], error)
        self._failed_repairs += 1
        if self._failed_repairs >= MAX_REPAIRS:
            raise IntegrityError(
                "the state in memory is damaged, and no other peer is there to send a right one: check this machine's"
                " memory, and start again from the last checkpoint"
            )
        raise AttemptFailedError("the state in memory is wrong and no peer could send a right one")

    async def _download(self, source: str, keep_work: bool, chain: Sequence[Certificate] = ()) -> None:
        """Fetch the whole state, ``source`` first, and the rounds since, without a deadline.

        ``chain`` holds the known certificates from this peer's lineage on.
        """
        if self._is_downloading:
            raise _NoFaultError("another download of the state is under way")
        self._is_downloading = True
        try:
            await self._download_from(source, keep_work, chain)
        finally:
            self._is_downloading = False

    async def _download_from(self, source: str, keep_work: bool, chain: Sequence[Certificate]) -> None:
        head = await self._head_ahead(source, accepts_own_lineage=not keep_work)
        if chain and between(chain, self._state.head.lineage, head.lineage) is None:  # The source committed more.
            chain = [*chain, *await self._round_log.certificates_after(source, chain[-1].body.next_lineage)]
        async with self._downloaded.fetched(source, head):
            await self._apply(partial(self._take_over, source, keep_work, chain))
        self._downloaded.discard()

    async def _head_ahead(self, source: str, *, accepts_own_lineage: bool = False) -> Head:
        """Return the verified head of a peer; raise `AttemptFailedError` unless it outranks this peer's."""
        head = await fetch_head(self._context.rpc, source)
        check_head(self._context, self._membership, head)
        own = self._state.head
        if not (head.outranks(own) or (accepts_own_lineage and head.lineage == own.lineage)):
            raise AttemptFailedError(f"peer {source[-8:]} is not ahead of this one")
        return head

    async def _take_over(
        self, source: str, keep_work: bool, chain: Sequence[Certificate], work: Contribution | None
    ) -> None:
        """Replace the shared state by the download, and apply the rounds since."""
        position, head, rounds = *self._downloaded.newest(), self._downloaded.rounds
        if keep_work and not head.outranks(self._state.head):
            return logger.info("the downloaded state is not used: this peer's own is ahead of it by now")
        missed = between([*chain, *rounds.certificates], self._state.head.lineage, head.lineage)
        await self._replica.replace(self._downloaded.assemble, missed, work, keep_work)
        self.resyncs += 1
        logger.info("downloaded the state of round %d from peer %s", self._state.head.round, source[-8:])
        while position < len(rounds.certificates):  # The list may grow during the loop.
            await self._replica.apply_missed(rounds.result(position), work)
            position += 1


def choose_way(num_rounds: int, replay_bytes: int, download_bytes: int) -> tuple[bool, str]:
    """Return True if a download moves fewer bytes, and the reason; ``download_bytes`` is 0 if it is not known."""
    rounds, state = f"{replay_bytes} bytes of {num_rounds} rounds", f"{download_bytes} bytes of state"
    if not download_bytes:
        return False, f"{rounds} against a state of unknown size"
    is_download = download_bytes < DOWNLOAD_BELOW * replay_bytes
    return is_download, f"{state} instead of {rounds}" if is_download else f"{rounds} instead of {state}"


def between(chain: Sequence[Certificate], start: bytes, end: bytes) -> list[Certificate] | None:
    """Return the certificates that lead from one lineage to another; None if ``chain`` lacks some."""
    found: list[Certificate] = []
    for certificate in chain:
        if certificate.body.lineage == start:
            found.append(certificate)
            start = certificate.body.next_lineage
        if start == end:
            break
    return found if found and start == end else None
