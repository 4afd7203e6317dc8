"""One peer's side of synchronisation: contribute, apply what was certified, catch up when behind.

`Synchronizer.synchronize` is called at the end of a local phase. The model's thread waits meanwhile or, where rounds
run under compute, lets it have the model between two steps (`Work.at_rest`). Whatever happens in it, the shared state
is afterwards either bit-identical to before or a later certified state as a whole, and local work is either counted
once or still there to be contributed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from p2ptrain.averaging.averager import Averager, RoundOutcome
from p2ptrain.averaging.commit.attempt import AttemptFailedError, UnencodableError
from p2ptrain.averaging.commit.encodings import decode_means
from p2ptrain.averaging.commit.round_log import Means, Result
from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping.matchmaker import BehindError, MismatchError, NoGroupError
from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.averaging.protocol.certificate import Body
from p2ptrain.averaging.protocol.head import Head
from p2ptrain.averaging.timing.global_batch import Goal
from p2ptrain.averaging.vector.error_feedback import ErrorFeedback
from p2ptrain.codecs import Codec
from p2ptrain.errors import DivergedError, TemporaryError
from p2ptrain.manifest import Manifest
from p2ptrain.network.records.record import RoundReport
from p2ptrain.network.rpc.client import Rpc
from p2ptrain.progress import Jobs, untold
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer
from p2ptrain.tasks import to_its_end
from p2ptrain.training.data.windows import Place, place_among
from p2ptrain.training.state.shared_state import SharedState
from p2ptrain.training.state.vector_codec import vector_codec
from p2ptrain.training.sync.agreement import check_agreement, serve_agreement
from p2ptrain.training.sync.catch_up import Follower
from p2ptrain.training.sync.contribution import RoundResult, Work
from p2ptrain.training.sync.state_server import StateServer

if TYPE_CHECKING:
    import torch

    from p2ptrain.training.state.fragments import Fragment

__all__ = ["RoundResult", "Synchronizer", "Work"]

logger = logging.getLogger(__name__)

MAX_STEPS = 12
MAX_REPORTS = 8
MAX_DROPS = 5
"""Contributions of this peer in a row that are dropped before its training ends."""


class Synchronizer:
    """Keeps one peer's shared state in step with the swarm.

    Attributes:
        state: The shared state.
        feedback: What codecs dropped of this peer's contributions, fragment after fragment.
        averager: Its averaging engine.
        rounds_committed: Certified rounds applied at a synchronisation of this peer.
        rounds_aborted: Synchronisations that ended without one.
        trained_tokens: Of this peer's work, tokens that count in committed rounds.
        trained_rounds: In how many.
        reports: The last rounds, newest last.
        rested_since: When the last synchronisation ended, by the event loop's clock; None before the first.
        last_round: Contribute to no round from this one on; 0 for no end.
        is_paused: Whether the last synchronisation found the swarm below its minimum of peers.
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
        jobs: Jobs = untold,
    ) -> None:
        """
        Args:
            rpc: To reach other peers.
            runtime: Time, chance, arithmetic.
            signer: This peer's key.
            swarm: The manifest's digest, 32 bytes.
            manifest: What the swarm agreed on.
            state: Parameters, buffers and shared optimizer state with their head.
            codec: How contributions travel: `vector_codec` of the manifest, for the whole vector.
            membership: Who is there.
            bandwidth: What this peer is willing to send in bytes per second; 0 for no limit.
            jobs: Told how far a catch-up is.
        """
        self.state = state
        self._rpc = rpc
        self._runtime = runtime
        self._signer = signer
        self._swarm = swarm
        self._spec = manifest.averaging
        self._membership = membership
        self._bandwidth = bandwidth
        training = manifest.training
        goal = Goal(samples=training.global_batch) if training.every == 1 else Goal(steps=training.steps_per_round)
        self._codecs = [vector_codec(self._spec, fragment.layout) for fragment in state.fragments]
        sizes = [fragment.num_values for fragment in state.fragments]
        parts = list(zip(self._codecs, sizes, strict=True))
        context = PeerContext(rpc, runtime, signer, swarm, self._spec)
        self.averager = Averager(context, membership, state.head, parts, state.layout.fingerprint, goal)
        self.feedback = ErrorFeedback(state.layout.num_values, codec, self._spec.feedback_decay)
        self._feedbacks = self.feedback.split(self._codecs, sizes)
        self._buffer: torch.Tensor | None = None
        self._place: tuple[bytes, Place] | None = None
        self.jobs = jobs
        self._follower = Follower(
            rpc, runtime, signer, swarm, membership, state, self.averager, self._feedbacks, self._apply, self._step,
            self._move, drop_stale=manifest.training.every == 1, late_decay=self._spec.late_decay,
            jobs=jobs,
        )  # fmt: skip
        self.averager.matchmaker.pacing.is_behind = self._follower.is_behind
        serve_agreement(rpc, state.layout)
        self.averager.history.is_followed = StateServer(rpc, state, runtime).is_serving
        self.rounds_committed = 0
        self.rounds_aborted = 0
        self.trained_tokens = 0
        self.trained_rounds = 0
        self.rested_since: float | None = None
        self.last_round = 0
        self.is_paused = False
        self._drops_in_a_row = 0
        self.reports: deque[RoundReport] = deque(maxlen=MAX_REPORTS)
        self.on_change: Callable[[], None] = lambda: None

    @property
    def head(self) -> Head:
        """Where this peer stands."""
        return self.state.head

    @property
    def place(self) -> Place | None:
        """This peer's place among the peers of the last round, by which it reads samples; None if it was not there."""
        if self._place is not None and self._place[0] == self.head.lineage:
            return self._place[1]
        return place_among(self.head.members, self._rpc.peer_id)

    @property
    def resyncs(self) -> int:
        """Full downloads of state."""
        return self._follower.resyncs

    @property
    def incompatible(self) -> dict[str, str]:
        """By peer: why its state does not fit this model."""
        return self._follower.incompatible

    @property
    def phase(self) -> str:
        """What synchronisation is doing, for reports: idle, matchmaking or averaging."""
        return self.averager.phase

    def sees_others(self) -> bool:
        """Whether other trainers are there, as far as this peer knows."""
        return bool(self._membership.alive_trainers())

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
            True if the swarm's global batch is full, or others are ahead of this peer already.
        """
        return await self.averager.matchmaker.report(samples, batch_samples, batch_seconds, self.is_behind)

    def note_steps(self, steps: int, seconds: float = 0.0) -> None:
        """Take note of the local steps done for the round in progress (``every = H``); on the event loop.

        Args:
            steps: How many.
            seconds: How long the last one took; 0 at the start of a round.
        """
        self.averager.matchmaker.pacing.note(steps, seconds)

    def is_due(self, steps: int) -> bool:
        """True if a peer that has done so many steps for the round should contribute them now; from any thread."""
        return self.is_closing() or self.averager.matchmaker.pacing.is_due(steps)

    async def announce(self) -> None:
        """Tell the peers that train, or will soon, that this one takes part from now on."""
        await self.averager.matchmaker.announce()

    async def close(self) -> None:
        """End everything this synchronizer started."""
        await self._follower.close()
        await self.averager.close()

    def restore_residual(self, residual: torch.Tensor) -> None:
        """Take up the error-feedback residual of a checkpoint, before this peer catches up from that checkpoint's head.

        Catching up drops what the rounds since then already hold.

        Args:
            residual: fp32, ``[num_values]``; one of another size, or with values that are not finite, is dropped.
        """
        own = self.feedback.residual
        if own is None:
            return
        if residual.shape != own.shape or not bool(residual.isfinite().all()):
            logger.warning("the checkpoint's error-feedback residual does not fit, or is not finite: dropped")
            return
        own.copy_(residual)
        self.averager.own_work.forget()

    async def check_agreement(self) -> None:
        """Compare model and rule with some of the peers that train; before this peer follows them.

        Raises:
            IncompatibleError: They differ.
        """
        await check_agreement(self._rpc, self.state.layout, self._membership.alive_trainers())

    async def follow_swarm(self, work: Work | None) -> bool:
        """Catch up with the best lineage that any known peer announces; whether this peer's head moved."""
        return await self._follower.follow_swarm(work)

    async def follow(self, source: str, work: Work | None) -> bool:
        """Catch up with one peer; whether that worked."""
        return await self._follower.follow(source, work)

    def lacks_a_state(self) -> bool:
        """True if this peer has begun to download the swarm's state, and has no other to train from."""
        return self._follower.lacks_a_state()

    def is_behind(self) -> bool:
        """Whether a known peer announces a head that outranks this one's."""
        return self._follower.is_behind()

    # --- the main path --------------------------------------------------------------------------------------------

    async def synchronize(self, work: Work) -> RoundResult:
        """Contribute ``work`` to the round in progress and apply its result; catch up first if the swarm is ahead."""
        started = asyncio.get_running_loop().time()
        computed = 0.0 if self.rested_since is None else started - self.rested_since
        try:
            with self.averager.matchmaker.pacing.handing_in():
                result = await self._synchronize(work)
        except TemporaryError as error:
            result = RoundResult(False, self.head.round, str(error), paused=self._below_minimum(error))
        self.rested_since = asyncio.get_running_loop().time()
        seconds = self.rested_since - started
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
                result.contributed,
                self.head.digest if result.committed else bytes(32),
                computed,
                result.matchmaking_seconds,
                result.transfer_seconds,
            )
        )
        self.on_change()
        return result

    def _below_minimum(self, error: TemporaryError) -> bool:
        present = len(self._membership.alive_trainers()) + 1
        pauses = self._spec.below_min == "pause"
        return pauses and isinstance(error, NoGroupError) and present < self._spec.min_peers

    async def _synchronize(self, work: Work) -> RoundResult:
        before, pacing = self.head, self.averager.matchmaker.pacing
        for _ in range(MAX_STEPS):
            async with work.at_rest():
                ready = await self._prepare(work, before)
            if isinstance(ready, RoundResult):
                return ready
            if self.head != before:
                await pacing.refresh()
                if pacing.has_time:
                    return RoundResult(True, self.head.round, "caught up: this peer's work goes into the next round")
            await pacing.until_closing()
            try:
                outcome = await self.averager.average(*ready, self._bandwidth)
            except (BehindError, MismatchError, UnencodableError) as error:
                async with work.at_rest():
                    result = await self._recover(error, work)
                if result is not None:
                    return result
                continue
            async with work.at_rest():
                return await self._take_home(outcome, work)
        raise AttemptFailedError("the swarm moved on faster than this peer could follow")

    async def _prepare(self, work: Work, before: Head) -> tuple[torch.Tensor, int, int] | RoundResult:
        """Catch up, and collect the contribution to the round in progress, with its tokens and samples."""
        for _ in range(MAX_STEPS):
            await self._follower.follow_swarm(work)
            if 0 < self.last_round <= self.head.round:
                return RoundResult(self.head != before, self.head.round, "the last round is over")
            if await self._state_is_intact():
                break
            await self._follower.heal(work, own_digest_is_right=True)
        else:
            raise AttemptFailedError("the state in memory was damaged again and again")
        fragment = self.state.fragments.of_round(self.head.round)
        tokens, contribution = work.tokens_of(fragment), self._room_for(fragment)
        if tokens <= 0:
            return RoundResult(False, self.head.round, "nothing to contribute yet")
        if not await self._runtime.compute(self._collect, work, contribution, fragment):
            return await self._drop(work, "the local update is not finite")
        return contribution, tokens, work.samples

    async def _recover(self, error: BehindError | MismatchError | UnencodableError, work: Work) -> RoundResult | None:
        """Do what it takes to try again; a result where that would not help."""
        if isinstance(error, UnencodableError):
            return await self._drop(work, str(error))
        if isinstance(error, BehindError):
            if not await self._follower.follow(error.source, work):
                raise AttemptFailedError(f"{error}, but its source failed") from error
            return None
        if not self._follower.others_hold_another_state():
            raise AttemptFailedError(f"{error}, but nobody announces another: not believed") from error
        logger.warning("round %d: %s", self.head.round, error)
        await self._follower.heal(work, own_digest_is_right=False)
        return None

    async def begin_anew(self, work: Work) -> None:
        """Drop all local work, the local optimizer's state and the residual; while ``work`` is at rest."""
        await self._runtime.compute(work.begin_anew)
        self.averager.own_work.consumed(range(len(self._codecs)))
        self.feedback.reset()

    async def _drop(self, work: Work, reason: str) -> RoundResult:
        """Drop a contribution that cannot count.

        Raises:
            DivergedError: It is the last of `MAX_DROPS` in a row.
        """
        await self.begin_anew(work)
        self._drops_in_a_row += 1
        if self._drops_in_a_row >= MAX_DROPS:
            raise DivergedError(
                f"{MAX_DROPS} contributions of this peer in a row had to be dropped, the last to round"
                f" {self.head.round} because {reason}: look for bad samples, lower the rate, or check its memory"
            )
        logger.warning("round %d: %s: it was dropped, and this peer begins anew", self.head.round, reason)
        return RoundResult(False, self.head.round, f"{reason}: it was dropped")

    def _room_for(self, fragment: Fragment) -> torch.Tensor:
        """Memory for the values of one fragment, which is used again in every round; fp32."""
        import torch

        if self._buffer is None:
            size = max(fragment.num_values for fragment in self.state.fragments)
            self._buffer = torch.empty(size, dtype=torch.float32)
        return self._buffer[: fragment.num_values]

    def _collect(self, work: Work, out: torch.Tensor, fragment: Fragment) -> bool:
        """Fill ``out`` with the contribution and residual; whether all of it is finite."""
        import torch

        work.collect(out, fragment)
        self._feedbacks[fragment.index].add_to(out)
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
            fragment = self.state.fragments.of_round(body.round)
            await self._runtime.compute(self._feedbacks[fragment.index].update, outcome.encoded)
        reason = "" if outcome.contributed else "late: this peer's work waits for the next round"
        if outcome.refusal and not outcome.contributed:
            # It would be refused again and again, and longer each time.
            reason = (await self._drop(work, f"this peer {outcome.refusal}")).reason
        await self._apply(outcome.result, work, outcome.contributed)
        self._place = (self.head.lineage, outcome.place)
        return RoundResult(
            committed=True,
            round=self.head.round,
            reason=reason,
            contributed=outcome.contributed,
            members=sum(body.peers),
            contributors=sum(body.peers[index] for index, *_ in body.contributors),
            matchmaking_seconds=outcome.matchmaking_seconds,
            transfer_seconds=outcome.transfer_seconds,
        )

    async def _apply(self, result: Result, work: Work | None, contributed: bool) -> None:
        """Apply one certified result to the shared state and the live model, as a whole."""
        await to_its_end(self._apply_and_move(result, work, contributed))

    async def _apply_and_move(self, result: Result, work: Work | None, contributed: bool) -> None:
        body = result.certificate.body
        tree_root = await self._runtime.compute(self._apply_means, body, result.means, work, contributed)
        if contributed:
            self._drops_in_a_row = 0
            tokens, _ = self.averager.own_work.counts_in(body) or (0, 0)
            self.trained_tokens += tokens
            self.trained_rounds += 1
            self.averager.own_work.consumed([self.state.fragments.of_round(body.round).index])
        self._move(body.next_head(tree_root, result.certificate.to_bytes()))
        self.averager.history.add(result)

    def _apply_means(self, body: Body, means: Means, work: Work | None, contributed: bool) -> bytes:
        import torch

        carry = None
        fragment = self.state.fragments.of_round(body.round)
        if work is not None and not contributed and work.tokens_of(fragment) > 0:
            carry = torch.empty(fragment.num_values, dtype=torch.float32)
            work.collect(carry, fragment)
            carry.mul_(self._spec.late_decay)
        self._step(body, means)
        if work is not None:
            counted = (0, 0)
            if contributed:  # All that waits is given up where it cannot be told how much of it is in the result.
                counted = self.averager.own_work.counts_in(body) or (work.tokens_of(fragment), work.samples)
            work.adopt(contributed, carry, fragment, counted)
        return self.state.tree().root

    def _step(self, body: Body, means: Means) -> None:
        """Take the shared step on a certified result, and nothing else."""
        fragment = self.state.fragments.of_round(body.round)
        mean = self._room_for(fragment)
        decode_means(self._spec, self._codecs[fragment.index], body, means, mean)
        self.state.apply(mean, body.round, fragment)

    def _move(self, head: Head) -> None:
        self.state.head = head
        self.averager.set_head(head)
        self.on_change()
