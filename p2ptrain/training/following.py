"""Catching up with the swarm: replay of missed rounds, download of the state, healing of what is damaged.

Work on top of the old state is carried to the new one wherever it can count once: not when it may be in that state
already, and not when the state that it was computed at was wrong.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from p2ptrain.averaging.attempt import AttemptFailedError
from p2ptrain.averaging.averager import Averager
from p2ptrain.averaging.certificate import Body, Certificate
from p2ptrain.averaging.feedback import ErrorFeedback
from p2ptrain.averaging.head import Head, genesis
from p2ptrain.averaging.history import Result
from p2ptrain.averaging.membership import ACTIVE_STATES, Membership
from p2ptrain.errors import (
    IncompatibleError,
    IntegrityError,
    PeerRefusedError,
    ResourceError,
    TemporaryError,
)
from p2ptrain.network.rpc import Rpc
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer
from p2ptrain.training.state import SharedState
from p2ptrain.training.transfer import download_state, fetch_head
from p2ptrain.training.work import Work

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

REPLAY_TIMEOUT_SECONDS = 60.0
DOWNLOAD_TIMEOUT_SECONDS = 600.0
MAX_HEALINGS = 10
"""Times in a row that nobody can send a right state in place of a damaged one, before training ends."""

FAILURES_TO_FOLLOW = (TemporaryError, IntegrityError, IncompatibleError, ResourceError)
"""What another peer, broken or hostile, can make a catch-up raise; none of it may end training."""


class Follower:
    """Brings one peer's shared state to where the swarm is.

    Attributes:
        resyncs: Full downloads of state.
        incompatible: By peer: why its state does not fit this model.
    """

    def __init__(
        self,
        rpc: Rpc,
        runtime: Runtime,
        signer: Signer,
        swarm: bytes,
        membership: Membership,
        state: SharedState,
        averager: Averager,
        feedback: ErrorFeedback,
        apply: Callable[[Result, Work | None, bool], Awaitable[None]],
        move: Callable[[Head], None],
        drop_stale: bool,
    ) -> None:
        """
        Args:
            rpc: To reach other peers.
            runtime: Arithmetic.
            signer: Checks certificates.
            swarm: The manifest's digest, 32 bytes.
            membership: Who is there, and announces what.
            state: The shared state.
            averager: Its history serves and fetches replays.
            feedback: Is reset with the state.
            apply: Applies a certified result to state and work; its flag says whether the work is in it.
            move: Takes note of a new head.
            drop_stale: Whether work is dropped, not carried, when the state is replaced as a whole.
        """
        self._rpc = rpc
        self._runtime = runtime
        self._signer = signer
        self._swarm = swarm
        self._membership = membership
        self._state = state
        self._averager = averager
        self._feedback = feedback
        self._apply = apply
        self._move = move
        self._drop_stale = drop_stale
        self._failed_healings = 0
        self.resyncs = 0
        self.incompatible: dict[str, str] = {}

    async def follow_swarm(self, work: Work | None) -> bool:
        """Catch up with the best lineage that any known peer announces, if it outranks this peer's.

        Returns:
            Whether this peer's head moved.
        """
        before = self._state.head
        for _ in range(3):
            best = self._best_source()
            if best is None:
                break
            await self.follow(best, work)
        return self._state.head != before

    async def follow(self, source: str, work: Work | None) -> bool:
        """Catch up with one peer; whether that worked."""
        try:
            await self._catch_up(source, work)
        except FAILURES_TO_FOLLOW as error:
            logger.info("could not follow peer %s: %s", source[-8:], error)
            if isinstance(error, IncompatibleError):
                self.incompatible[source] = str(error)
            if not isinstance(error, PeerRefusedError):  # Who refuses is there: leading alone would fork.
                self._membership.suspect(source, str(error))
            self._membership.mistrust(source)
            return False
        self._membership.kept_promise(source)
        return True

    def _best_source(self) -> str | None:
        best, source = self._state.head, None
        for record in self._membership.records():
            announced = Head(record.round, record.lineage, record.lineage_tokens, 0, record.digest)
            usable = record.state in ACTIVE_STATES and not self._membership.is_suspect(record.peer)
            if (
                usable
                and not self._membership.is_mistrusted(record.peer)
                and announced.lineage != best.lineage
                and announced.outranks(best)
            ):
                best, source = announced, record.peer
        return source

    async def _catch_up(self, source: str, work: Work | None) -> None:
        """Replay the rounds that ``source`` has beyond this peer's head, or download its state."""
        certificates = await self._averager.history.certificates_after(source, self._state.head.lineage)
        if not certificates:
            await self._download(source, work, keep_work=True)
            return
        for certificate in certificates:
            body = certificate.body
            if (body.tokens_before, body.samples_before) != (self._state.head.tokens, self._state.head.samples):
                raise IntegrityError("a certificate's counts do not follow from its lineage")
            try:
                means = await self._averager.history.fetch_means(
                    source, body, self._state.fragments.of_round(body.round).num_values, REPLAY_TIMEOUT_SECONDS
                )
            except PeerRefusedError:  # Its rounds are faster than this replay.
                await self._download(source, work, keep_work=True)
                return
            await self._apply(Result(certificate, means), work, self._is_contributor(body))
            logger.info("replayed round %d from peer %s", body.round, source[-8:])

    def _is_contributor(self, body: Body) -> bool:
        """Whether this peer's work is in a result that it did not see completed: then it must not count again."""
        return any(body.members[index] == self._rpc.peer_id for index, *_ in body.contributors)

    def others_hold_another_state(self) -> bool:
        """Whether peers announce another digest than this one has, at the same lineage."""
        head = self._state.head
        return any(r.lineage == head.lineage and r.digest != head.digest for r in self._membership.records())

    async def heal(self, work: Work, own_digest_is_right: bool) -> None:
        """Replace this peer's state, which is wrong, by that of the others; local work on top of it is dropped.

        Args:
            work: The live model.
            own_digest_is_right: Whether memory changed under its digest; else the others hold another digest.

        Raises:
            AttemptFailedError: Nobody could send it now.
            IntegrityError: Nobody could for `MAX_HEALINGS` times.
        """
        records = [r for r in self._membership.records() if not self._membership.is_suspect(r.peer)]
        same = [r.peer for r in records if r.lineage == self._state.head.lineage]
        agreeing = [r.peer for r in records if r.peer in same and r.digest == self._state.head.digest]
        first = agreeing if own_digest_is_right else [peer for peer in same if peer not in agreeing]
        for peer in dict.fromkeys([*first, *self._membership.alive_trainers()]):
            try:
                await self._download(peer, work, keep_work=False)
                self._failed_healings = 0
                return
            except FAILURES_TO_FOLLOW as error:
                logger.info("could not heal from peer %s: %s", peer[-8:], error)
        self._failed_healings += 1
        if self._failed_healings >= MAX_HEALINGS:
            raise IntegrityError(
                "the state in memory is damaged, and no other peer is there to send a right one: check this machine's"
                " memory, and start again from the last checkpoint"
            )
        raise AttemptFailedError("the state in memory is wrong and no peer could send a right one")

    async def _download(self, source: str, work: Work | None, keep_work: bool) -> None:
        """Fetch the whole state of ``source``'s lineage, from it and others that announce the same digest."""
        head = await fetch_head(self._rpc, source, self._state.head.round + int(keep_work))
        self._check_head(head)
        heals = not keep_work and head.lineage == self._state.head.lineage
        if not heals and not head.outranks(self._state.head):
            raise AttemptFailedError(f"peer {source[-8:]} is not ahead of this one")
        others = [r.peer for r in self._membership.records() if r.digest == head.digest and r.peer != source]
        downloaded = await download_state(
            self._rpc,
            self._runtime,
            [source, *others[:3]],
            head,
            self._state.layout.fingerprint,
            DOWNLOAD_TIMEOUT_SECONDS,
        )
        # Work of which an attempt was given up may be in that state already, in a round that this peer did not see end.
        keep_work = keep_work and self._averager.gave_up_on != self._state.head.lineage
        await whole(self._replace_and_move(downloaded.tensors, head, work, keep_work))
        logger.info("downloaded the state of round %d from peer %s", head.round, source[-8:])

    async def _replace_and_move(
        self, tensors: list[tuple[str, torch.Tensor]], head: Head, work: Work | None, keep_work: bool
    ) -> None:
        await self._runtime.compute(self._replace, tensors, head, work, keep_work)
        self._averager.history.clear()
        self.resyncs += 1
        self._move(head)

    def _check_head(self, head: Head) -> None:
        """Refuse a head that its certificate does not prove, or whose digest most of those who hold it do not share."""
        votes = Counter(r.digest for r in self._membership.records() if r.lineage == head.lineage)
        if votes and votes[head.digest] < max(votes.values()):
            raise IntegrityError("most peers announce another digest for this state")
        if head.round == 0:
            if head != genesis(self._swarm, head.digest):
                raise IntegrityError("a head at round 0 is not a beginning")
            return
        body = Certificate.from_bytes(head.certificate, self._swarm, self._signer).body
        if body.next_head(head.digest, head.certificate) != head:
            raise IntegrityError("a head does not follow from its certificate")

    def _replace(self, tensors: list[tuple[str, torch.Tensor]], head: Head, work: Work | None, keep: bool) -> None:
        import torch

        if not all(bool(torch.isfinite(tensor).all()) for _, tensor in tensors):
            raise IntegrityError("the downloaded state has values that are not finite")
        carry = None
        if work is not None and keep and work.tokens > 0 and not self._drop_stale:
            carry = torch.empty(self._state.layout.num_values, dtype=torch.float32)
            work.collect(carry)
        self._state.replace(tensors, head)
        if self._state.tree().root != head.digest:
            raise IntegrityError("the downloaded state does not have its digest: a defect, please report it")
        self._feedback.reset()
        if work is not None:
            work.adopt(False, carry)


async def whole(change: Coroutine[Any, Any, None]) -> None:
    """Run a change of the state to its end even if the caller is cancelled meanwhile; then pass the cancellation on."""
    task = asyncio.ensure_future(change)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise
