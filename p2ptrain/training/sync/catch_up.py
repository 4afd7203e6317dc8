"""Catch-up with another peer: replay of missed rounds, download of the state, repair of a damaged state.

A stale peer replays the rounds that it missed, or downloads the state if that is fewer bytes (`choose_way`). Both lead
to the same bits.

Local work is carried to the new state only where it cannot count twice. The certificates between two states tell
whether the work has counted. If they are known, replay and download treat local work alike. Work on top of a damaged
state is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from itertools import dropwhile
from typing import Any

from p2ptrain.averaging.commit.anchoring import AnchorSearch
from p2ptrain.averaging.commit.attempt import AttemptFailedError
from p2ptrain.averaging.commit.round_log import Result
from p2ptrain.averaging.grouping.membership import HOLDING_STATES
from p2ptrain.averaging.protocol.certificate import Certificate, Head, head_through
from p2ptrain.errors import IncompatibleError, IntegrityError, PeerRefusedError, ResourceError
from p2ptrain.progress import Advance, Progress
from p2ptrain.tasks import Tasks, to_its_end, together
from p2ptrain.training.sync.background_download import SOURCE_FAILURES, StateDownload
from p2ptrain.training.sync.replica import Contribution, Replica
from p2ptrain.training.sync.state_server import announced_digests, check_head, fetch_head

logger = logging.getLogger(__name__)

DOWNLOAD_BELOW = 0.9
"""A download needs fewer bytes than this part of a replay's. A replay also fills the history, from which other peers
can replay, so it wins near equality."""
MAX_OTHERS_ASKED = 3
"""Peers asked for rounds that the source does not have."""
MAX_CHAINS = 4
"""Replays in a row: of the rounds that this peer missed, then of those that ended meanwhile."""
STALL_SECONDS = 4.0
"""A source that fails after this time is doubted: it must prove its state before this peer follows it again."""
MAX_ASKED_AT_ONCE = 4
"""Limit of concurrent checks in the background."""
MAX_REPAIRS = 10
"""Consecutive failed repairs that end training."""


class CatchUp:
    """Brings one peer's shared state to another peer's.

    Attributes:
        resyncs: Full downloads of the state.
        incompatible: By peer: why its state does not fit this model.
        anchors: Looks for newer anchors.
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
        self._told_who_left: dict[str, tuple[bytes, bytes]] = {}
        self.anchors = AnchorSearch(
            self._context, self._round_log, lambda: self._state.head, self._tasks,
            lambda: self._matchmaker.position.is_stalled,
        )  # fmt: skip
        self.resyncs = 0
        self.incompatible: dict[str, str] = {}

    async def close(self) -> None:
        await self._tasks.close()
        self._downloaded.close()

    async def follow(self, source: str, work: Contribution | None) -> bool:
        """Catch up with one peer; return True on success."""
        if self._membership.is_doubted(source):
            self._membership.suspect(source, "let others wait for what it did not hold")
            self.check_soon(source)
            return False
        started = asyncio.get_running_loop().time()
        try:
            await self._catch_up(source, work)
        except SOURCE_FAILURES as error:
            self._blame(source, error, started)
            return False
        self._membership.kept_promise(source)
        self._membership.answered(source)  # It may have been a suspect for a lineage that this peer did not follow yet.
        return True

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
        self._ask_soon(peer, self._check)

    def find_who_left(self, peer: str, lineage: bytes) -> None:
        """Ask a peer in the background, once, for the certificates of a reduced lineage after this peer's head."""
        if self._told_who_left.get(peer) != (self._state.head.lineage, lineage):
            self._ask_soon(peer, partial(self._find_who_left, lineage))

    def _ask_soon(self, peer: str, ask: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        self._checks = {peer: task for peer, task in self._checks.items() if not task.done()}
        if peer in self._checks or len(self._checks) >= MAX_ASKED_AT_ONCE or self._membership.is_mistrusted(peer):
            return
        self._checks[peer] = self._tasks.start(ask(peer), f"ask-{peer[-8:]}")

    async def _check(self, peer: str) -> None:
        started = asyncio.get_running_loop().time()
        try:
            if not await self._round_log.certificates_after(peer, self._state.head):
                await self._head_ahead(peer)
        except SOURCE_FAILURES as error:
            self._blame(peer, error, started)
        else:
            self._membership.vouch(peer)

    async def _find_who_left(self, lineage: bytes, peer: str) -> None:
        head = self._state.head
        try:
            chain = await self._round_log.certificates_after(peer, head, proofs=True, until=lineage)
        except SOURCE_FAILURES as error:  # It may be in a round: nobody is suspected for it, and nobody waits.
            logger.debug("peer %s does not tell who left: %s", peer[-8:], error)
        else:
            self._matchmaker.position.note_left(chain)
            self._told_who_left[peer] = (head.lineage, lineage)

    async def _catch_up(self, source: str, work: Contribution | None) -> None:
        chain = await self._round_log.certificates_after(source, self._state.head)
        holder = source
        if not chain:
            holder, chain = await self._chain_of_others(source)
        if not chain:
            return await self._download(source, work, keep_work=True)
        self._matchmaker.position.note_left(chain)
        self._check_ahead(source, head_through(self._state.head, chain))
        if chain[0].body.digest != self._state.head.digest:
            logger.warning("the swarm went on from another state than this peer's: its own is wrong")
            return await self._download(source, work, keep_work=False, chain=chain)
        replay_bytes = sum(self._round_log.num_bytes_of(holder, each.body) for each in chain)
        is_download, reason = choose_way(len(chain), replay_bytes, self._state_bytes())
        logger.info("catching up with peer %s: %s", holder[-8:], reason)
        if is_download:
            try:
                return await self._download(source, work, keep_work=True, chain=chain)
            except (*SOURCE_FAILURES, ResourceError) as error:
                logger.info("could not download from peer %s: %s", source[-8:], error)
        try:
            with self._jobs("replaying missed rounds", "rounds") as advance:
                await self._replay(holder, chain, work, advance)
            self._downloaded.discard()
        except SOURCE_FAILURES as error:
            if holder == source and not isinstance(error, PeerRefusedError):
                raise
            # The swarm commits rounds faster than this replay, or another holder than the source failed.
            logger.info("peer %s could not replay it all: %s", holder[-8:], error)
            if not isinstance(error, PeerRefusedError):
                self._membership.mistrust(holder)
            await self._download(source, work, keep_work=True, chain=chain)

    async def _replay(
        self, holder: str, chain: Sequence[Certificate], work: Contribution | None, advance: Advance
    ) -> None:
        if work is not None and work.tokens > 0:
            self._matchmaker.announce_soon(head_through(self._state.head, chain))
        others = [peer for peer in self._peers_at(chain[-1].body.next_lineage) if peer != holder]
        for _ in range(MAX_CHAINS):
            async with Tasks() as tasks:
                since = tasks.call(self._certificates_since(holder, head_through(self._state.head, chain)), "since")
                await self._replay_chain([holder, *others], chain, work, advance)
                chain = await since
            if not chain:
                break

    async def _certificates_since(self, peer: str, head: Head) -> list[Certificate]:
        """Return the certificates of the rounds that a peer ended meanwhile: few, where a round trip takes as long."""
        try:
            return await self._round_log.certificates_after(peer, head)
        except SOURCE_FAILURES as error:
            logger.debug("peer %s tells no more history: %s", peer[-8:], error)
            return []

    async def _replay_chain(
        self, sources: Sequence[str], chain: Sequence[Certificate], work: Contribution | None, advance: Advance
    ) -> None:
        holder = sources[0]
        for number, certificate in enumerate(chain):
            advance(number, len(chain))
            body, head = certificate.body, self._state.head
            body.check_follows(head)
            if body.levels != self._matchmaker.cells.num_levels(head.present):
                raise IntegrityError("a certificate is of another tree than its lineage has")
            chunks = self._round_log.chunks_of(holder, body)
            report = await self._round_log.fetch(chunks, sources)
            for liar in report.liars:
                self._membership.mistrust(liar)
            await self._replica.apply_missed(Result(certificate, chunks.means), work)
            logger.info("replayed round %d from peer %s", body.round, holder[-8:])

    async def _chain_of_others(self, source: str) -> tuple[str, list[Certificate]]:
        """Return another peer and its certificates up to the head of ``source``, or ``source`` and no certificates."""
        active = [record for record in self._membership.records() if record.state in HOLDING_STATES]
        goal = next((record.lineage for record in active if record.peer == source), None)
        if goal is None:
            return source, []
        start, others = self._state.head, [peer for peer in self._peers_at(goal) if peer != source]

        async def ask(peer: str) -> list[Certificate]:
            try:
                chain = await self._round_log.certificates_after(peer, start)
            except SOURCE_FAILURES as error:
                logger.debug("peer %s tells no history: %s", peer[-8:], error)
                return []
            return chain if between(chain, start.lineage, goal) else []

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
        """True if as many peers announce another digest for this peer's lineage as its own, this peer included."""
        votes, own = announced_digests(self._context, self._state.head), self._state.head.digest
        return max((count for digest, count in votes.items() if digest != own), default=0) > votes[own]

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
        for peer in dict.fromkeys([*first, *self._membership.alive_trainers()]):
            try:
                await self._download(peer, work, keep_work=False)
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

    async def _download(
        self, source: str, work: Contribution | None, keep_work: bool, chain: Sequence[Certificate] = ()
    ) -> None:
        """Fetch the whole state, ``source`` first, and the rounds since, without a deadline.

        ``chain`` holds the known certificates from this peer's lineage on, of which it may have replayed some.
        """
        anchors, newest = self._context.anchors, self._context.anchors.newest
        head = await self._head_ahead(source, accepts_own_lineage=not keep_work)
        if chain and between(chain, self._state.head.lineage, head.lineage) is None:  # The source committed more.
            left = list(dropwhile(lambda each: each.body.lineage != self._state.head.lineage, chain))
            since = await self._round_log.certificates_after(source, head_through(self._state.head, left))
            chain = [*left, *since]
        async with self._downloaded.fetched(source, head):
            if anchors.newest is not newest:  # The chunks stay, for a head that is proved from the anchor.
                raise AttemptFailedError("an anchor came during the download")
            position = await to_its_end(self._take_over(work, keep_work, chain))
            if anchors.newest is not newest:
                anchors.moved(is_off=True)
            logger.info("downloaded the state of round %d from peer %s", self._state.head.round, source[-8:])
            while position < len(self._downloaded.rounds.certificates):  # The list may grow during the loop.
                await self._replica.apply_missed(self._downloaded.rounds.result(position), work)
                position += 1
        self._downloaded.discard()

    async def _head_ahead(self, source: str, *, accepts_own_lineage: bool = False) -> Head:
        """Return the verified head of a peer; raise `AttemptFailedError` unless it outranks this peer's."""
        head = await fetch_head(self._context.rpc, source)
        check_head(self._context, head)
        is_stalled = self._matchmaker.position.is_stalled
        await self._round_log.believe(source, self._state.head, head, is_stalled=is_stalled)
        if not (accepts_own_lineage and head.lineage == self._state.head.lineage):
            self._check_ahead(source, head)
        return head

    def _check_ahead(self, source: str, head: Head) -> None:
        is_ahead = self._matchmaker.position.follows(head)
        if not (is_ahead or self._context.anchors.is_off):
            raise AttemptFailedError(f"peer {source[-8:]} is not ahead of this one")

    async def _take_over(self, work: Contribution | None, keep_work: bool, chain: Sequence[Certificate]) -> int:
        """Replace the shared state by the download; return how many of the rounds since it includes."""
        count, lineage = self._downloaded.newest()
        missed = between([*chain, *self._downloaded.rounds.certificates], self._state.head.lineage, lineage)
        await self._replica.replace(self._downloaded.assemble, missed, work, keep_work)
        self.resyncs += 1
        return count


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
