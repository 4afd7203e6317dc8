"""One peer's side of synchronisation: contribute, apply what was certified, catch up when behind.

`Synchronizer.synchronize` is called at the end of a local phase, with the model's thread waiting, so nothing else
changes parameters meanwhile. Whatever happens in it, the shared state is afterwards either bit-identical to before or a
later certified state as a whole, and local work is either counted once or still there to be contributed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from p2ptrain.averaging.attempt import AttemptFailedError, UnencodableError
from p2ptrain.averaging.averager import Averager, RoundOutcome
from p2ptrain.averaging.certificate import Body, Certificate
from p2ptrain.averaging.feedback import ErrorFeedback
from p2ptrain.averaging.head import Head, genesis
from p2ptrain.averaging.history import Means, Result
from p2ptrain.averaging.matchmaking import BehindError, MismatchError, NoGroupError
from p2ptrain.averaging.membership import ACTIVE_STATES, Membership
from p2ptrain.codecs import Codec
from p2ptrain.errors import IncompatibleError, IntegrityError, PeerRefusedError, ResourceError, TemporaryError
from p2ptrain.manifest import Manifest
from p2ptrain.network.records import RoundReport
from p2ptrain.network.rpc import Rpc
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer
from p2ptrain.training.state import SharedState
from p2ptrain.training.transfer import StateServer, download_state, fetch_head
from p2ptrain.training.work import RoundResult, Work

if TYPE_CHECKING:
    import torch

__all__ = ["RoundResult", "Synchronizer", "Work"]

logger = logging.getLogger(__name__)

MAX_STEPS = 12
REPLAY_TIMEOUT_SECONDS = 60.0
DOWNLOAD_TIMEOUT_SECONDS = 600.0
MAX_REPORTS = 8

FAILURES_TO_FOLLOW = (TemporaryError, IntegrityError, IncompatibleError, ResourceError)
"""What another peer, broken or hostile, can make a catch-up raise; none of it may end training."""


class Synchronizer:
    """Keeps one peer's shared state in step with the swarm.

    Attributes:
        state: The shared state.
        averager: Its averaging engine.
        rounds_committed: Certified rounds applied at a synchronisation of this peer.
        rounds_aborted: Synchronisations that ended without one.
        reports: The last rounds, newest last.
        resyncs: Full downloads of state.
        is_paused: Whether the last synchronisation found the swarm below its minimum of peers.
        incompatible: By peer: why its state does not fit this model.
        on_change: Called after every change of head.
    """

    def __init__(
        self,
        rpc: Rpc,
        runtime: Runtime,
        signer: Signer,
        swarm: bytes,
        manifest: Manifest,
        state: SharedState,
        codec: Codec,
        membership: Membership,
        bandwidth: int = 0,
    ) -> None:
        """
        Args:
            rpc: To reach other peers.
            runtime: Time, chance, arithmetic.
            signer: This peer's key.
            swarm: The manifest's digest, 32 bytes.
            manifest: What the swarm agreed on.
            state: Parameters, buffers and shared optimizer state with their head.
            codec: How contributions travel.
            membership: Who is there.
            bandwidth: Upload in bytes per second for share sizes; 0 when unknown.
        """
        self.state = state
        self._rpc = rpc
        self._runtime = runtime
        self._signer = signer
        self._swarm = swarm
        self._spec = manifest.averaging
        self._codec = codec
        self._membership = membership
        self._bandwidth = bandwidth
        target = manifest.training.global_batch if manifest.training.every == 1 else 0
        self._drop_stale = manifest.training.every == 1
        self.averager = Averager(
            rpc, runtime, signer, swarm, self._spec, codec, membership, state.head,
            state.layout.num_values, state.layout.fingerprint, target,
        )  # fmt: skip
        self.feedback = ErrorFeedback(state.layout.num_values, codec)
        self._buffer: torch.Tensor | None = None
        self._server = StateServer(rpc, state, runtime, offered_rounds=self._spec.history_rounds // 2)
        self.rounds_committed = 0
        self.rounds_aborted = 0
        self.resyncs = 0
        self.is_paused = False
        self.incompatible: dict[str, str] = {}
        self.reports: deque[RoundReport] = deque(maxlen=MAX_REPORTS)
        self.on_change: Callable[[], None] = lambda: None

    @property
    def head(self) -> Head:
        """Where this peer stands."""
        return self.state.head

    @property
    def phase(self) -> str:
        """What synchronisation is doing, for reports: idle, matchmaking or averaging."""
        return self.averager.phase

    def is_closing(self) -> bool:
        """Whether the swarm wants to close the round with what this peer has; readable from any thread."""
        return self.averager.matchmaker.is_closing()

    async def report(self, samples: int, batch_samples: int, batch_seconds: float) -> bool:
        """Tell the swarm what is accumulated, and wait while another local batch would be too much.

        Args:
            samples: Samples accumulated for this round.
            batch_samples: Of which in the last local batch.
            batch_seconds: How long that took.

        Returns:
            Whether the swarm's global batch is full.
        """
        return await self.averager.matchmaker.report(samples, batch_samples, batch_seconds)

    async def announce(self) -> None:
        """Tell the peers that train, or will soon, that this one takes part from now on."""
        await self.averager.matchmaker.announce()

    async def close(self) -> None:
        """End everything this synchronizer started."""
        self._server.close()
        await self.averager.close()

    # --- the main path --------------------------------------------------------------------------------------------

    async def synchronize(self, work: Work) -> RoundResult:
        """Contribute ``work`` to the round in progress and apply its result; catch up first if the swarm is ahead."""
        started = asyncio.get_running_loop().time()
        try:
            result = await self._synchronize(work)
        except TemporaryError as error:
            result = RoundResult(False, self.head.round, str(error), paused=self._below_minimum(error))
        seconds = asyncio.get_running_loop().time() - started
        result = replace(result, seconds=seconds)
        self.is_paused = result.paused
        if result.committed:
            self.rounds_committed += 1
        else:
            self.rounds_aborted += 1
            logger.debug("round %d was not committed: %s", self.head.round, result.reason)
        self.reports.append(
            RoundReport(
                max(0, result.round - 1) if result.committed else result.round,
                result.committed,
                result.reason[:120],
                seconds,
                result.members,
                result.contributors,
            )
        )
        self.on_change()
        return result

    def _below_minimum(self, error: TemporaryError) -> bool:
        present = len(self._membership.alive_trainers()) + 1
        pauses = self._spec.below_min == "pause"
        return pauses and isinstance(error, NoGroupError) and present < self._spec.min_peers

    async def _synchronize(self, work: Work) -> RoundResult:
        import torch

        if self._buffer is None:
            self._buffer = torch.empty(self.state.layout.num_values, dtype=torch.float32)
        for _ in range(MAX_STEPS):
            await self.follow_swarm(work)
            if not await self._state_is_intact():
                await self._heal(work, own_digest_is_right=True)
                continue
            if work.tokens <= 0:
                return RoundResult(False, self.head.round, "nothing to contribute yet")
            if not await self._runtime.compute(self._collect, work, self._buffer):
                return await self._drop(work, "the local update is not finite")
            try:
                outcome = await self.averager.average(self._buffer, work.tokens, work.samples, self._bandwidth)
            except BehindError as error:
                if not await self._follow(error.source, work):
                    raise AttemptFailedError(f"{error}, but its source failed") from error
                continue
            except MismatchError as error:
                if not self._others_hold_another_state():
                    raise AttemptFailedError(f"{error}, but nobody announces another: not believed") from error
                logger.warning("round %d: %s", self.head.round, error)
                await self._heal(work, own_digest_is_right=False)
                continue
            except UnencodableError as error:
                return await self._drop(work, str(error))
            return await self._take_home(outcome, work)
        raise AttemptFailedError("the swarm moved on faster than this peer could follow")

    async def _drop(self, work: Work, reason: str) -> RoundResult:
        await self._runtime.compute(work.adopt, False, None)
        self.feedback.reset()
        return RoundResult(False, self.head.round, f"{reason}: it was dropped")

    def _collect(self, work: Work, out: torch.Tensor) -> bool:
        """Fill ``out`` with the contribution and residual; whether all of it is finite."""
        import torch

        work.collect(out)
        self.feedback.add_to(out)
        return bool(torch.isfinite(out.sum(dtype=torch.float64)))

    async def _state_is_intact(self) -> bool:
        tree = await self._runtime.compute(self.state.tree)
        if tree.root == self.head.digest:
            return True
        logger.warning("round %d: parameters in memory do not match their digest", self.head.round)
        return False

    async def _take_home(self, outcome: RoundOutcome, work: Work) -> RoundResult:
        body = outcome.result.certificate.body
        if outcome.contributed:
            assert self._buffer is not None
            await self._runtime.compute(
                self.feedback.update, self._buffer, body.bounds, outcome.sent_parts, outcome.own_index,
                outcome.own_mean_exact, outcome.result.means[outcome.own_index], outcome.total_over_own_weight,
            )  # fmt: skip
        await self._apply(outcome.result, work, outcome.contributed)
        return RoundResult(
            committed=True,
            round=self.head.round,
            reason="" if outcome.contributed else "late: this peer's work waits for the next round",
            contributed=outcome.contributed,
            members=len(body.members),
            contributors=len(body.contributors),
            matchmaking_seconds=outcome.matchmaking_seconds,
            transfer_seconds=outcome.transfer_seconds,
        )

    async def _apply(self, result: Result, work: Work | None, contributed: bool) -> None:
        """Apply one certified result to the shared state and the live model, as a whole."""
        await _whole(self._apply_and_move(result, work, contributed))

    async def _apply_and_move(self, result: Result, work: Work | None, contributed: bool) -> None:
        body = result.certificate.body
        tree_root = await self._runtime.compute(self._apply_means, body, result.means, work, contributed)
        self._move(body.next_head(tree_root, result.certificate.to_bytes()))
        self.averager.history.add(result)

    def _apply_means(self, body: Body, means: Means, work: Work | None, contributed: bool) -> bytes:
        import torch

        carry = None
        if work is not None and not contributed and work.tokens > 0:
            carry = torch.empty(self.state.layout.num_values, dtype=torch.float32)
            work.collect(carry)
        if self._buffer is None:
            self._buffer = torch.empty(self.state.layout.num_values, dtype=torch.float32)
        mean = self._buffer
        for index, encoded in enumerate(means):
            if encoded:
                self._codec.decode_into(encoded, mean[body.bounds[index] : body.bounds[index + 1]])
        self.state.apply(mean)
        if work is not None:
            work.adopt(contributed, carry)
        return self.state.tree().root

    def _move(self, head: Head) -> None:
        self.state.head = head
        self.averager.set_head(head)
        self.on_change()

    # --- following the swarm --------------------------------------------------------------------------------------

    async def follow_swarm(self, work: Work | None) -> bool:
        """Catch up with the best lineage that any known peer announces, if it outranks this peer's.

        Returns:
            Whether this peer's head moved.
        """
        before = self.head
        for _ in range(3):
            best = self._best_source()
            if best is None:
                break
            await self._follow(best, work)
        return self.head != before

    async def _follow(self, source: str, work: Work | None) -> bool:
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
        best, source = self.head, None
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
        certificates = await self.averager.history.certificates_after(source, self.head.lineage)
        if not certificates:
            await self._download(source, work, keep_work=True)
            return
        for certificate in certificates:
            body = certificate.body
            if (body.tokens_before, body.samples_before) != (self.head.tokens, self.head.samples):
                raise IntegrityError("a certificate's counts do not follow from its lineage")
            try:
                means = await self.averager.history.fetch_means(
                    source, body, self.state.layout.num_values, REPLAY_TIMEOUT_SECONDS
                )
            except PeerRefusedError:  # Its rounds are faster than this replay.
                await self._download(source, work, keep_work=True)
                return
            await self._apply(Result(certificate, means), work, self._is_contributor(body))
            logger.info("replayed round %d from peer %s", body.round, source[-8:])

    def _is_contributor(self, body: Body) -> bool:
        """Whether this peer's work is in a result that it did not see completed: then it must not count again."""
        return any(body.members[index] == self._rpc.peer_id for index, *_ in body.contributors)

    def _others_hold_another_state(self) -> bool:
        return any(r.lineage == self.head.lineage and r.digest != self.head.digest for r in self._membership.records())

    async def _heal(self, work: Work, own_digest_is_right: bool) -> None:
        """Replace this peer's state, which is wrong, by that of the others; local work on top of it is dropped.

        Args:
            work: The live model.
            own_digest_is_right: Whether memory changed under its digest; else the others hold another digest.
        """
        records = [r for r in self._membership.records() if not self._membership.is_suspect(r.peer)]
        same = [r.peer for r in records if r.lineage == self.head.lineage]
        agreeing = [r.peer for r in records if r.peer in same and r.digest == self.head.digest]
        first = agreeing if own_digest_is_right else [peer for peer in same if peer not in agreeing]
        for peer in dict.fromkeys([*first, *self._membership.alive_trainers()]):
            try:
                await self._download(peer, work, keep_work=False)
                return
            except FAILURES_TO_FOLLOW as error:
                logger.info("could not heal from peer %s: %s", peer[-8:], error)
        raise AttemptFailedError("the state in memory is wrong and no peer could send a right one")

    async def _download(self, source: str, work: Work | None, keep_work: bool) -> None:
        """Fetch the whole state of ``source``'s lineage, from it and others that announce the same digest."""
        head = await fetch_head(self._rpc, source, self.head.round + int(keep_work))
        self._check_head(head)
        heals = not keep_work and head.lineage == self.head.lineage
        if not heals and not head.outranks(self.head):
            raise AttemptFailedError(f"peer {source[-8:]} is not ahead of this one")
        others = [r.peer for r in self._membership.records() if r.digest == head.digest and r.peer != source]
        downloaded = await download_state(
            self._rpc,
            self._runtime,
            [source, *others[:3]],
            head,
            self.state.layout.fingerprint,
            DOWNLOAD_TIMEOUT_SECONDS,
        )
        # Work of which an attempt was given up may be in that state already, in a round that this peer did not see end.
        keep_work = keep_work and self.averager.gave_up_on != self.head.lineage
        await _whole(self._replace_and_move(downloaded.tensors, head, work, keep_work))
        logger.info("downloaded the state of round %d from peer %s", head.round, source[-8:])

    async def _replace_and_move(
        self, tensors: list[tuple[str, torch.Tensor]], head: Head, work: Work | None, keep_work: bool
    ) -> None:
        await self._runtime.compute(self._replace, tensors, head, work, keep_work)
        self.averager.history.clear()
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
            carry = torch.empty(self.state.layout.num_values, dtype=torch.float32)
            work.collect(carry)
        self.state.replace(tensors, head)
        if self.state.tree().root != head.digest:
            raise IntegrityError("the downloaded state does not have its digest: a defect, please report it")
        self.feedback.reset()
        if work is not None:
            work.adopt(False, carry)


async def _whole(change: Coroutine[Any, Any, None]) -> None:
    """Run a change of the state to its end even if the caller is cancelled meanwhile; then pass the cancellation on."""
    task = asyncio.ensure_future(change)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise
