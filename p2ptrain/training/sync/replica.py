"""One peer's copy of the shared state: its contributions to rounds, and the certified results applied to it.

Each change is atomic: the state is either unchanged or a later certified state as a whole. Local work is either
counted once or still pending.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import torch

from p2ptrain.averaging.averager import Averager
from p2ptrain.averaging.commit.round_log import Result, RoundLog
from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.protocol.certificate import Body, Certificate, Head
from p2ptrain.averaging.timing.goal import Goal
from p2ptrain.averaging.vector.error_feedback import Encoded, ErrorFeedback
from p2ptrain.errors import DivergedError
from p2ptrain.manifest import Manifest
from p2ptrain.tasks import to_its_end
from p2ptrain.training.state.layout import Fragment, vector_codec
from p2ptrain.training.state.shared_state import SharedState
from p2ptrain.training.sync.state_server import StateServer

logger = logging.getLogger(__name__)

MAX_DROPS = 5
"""Consecutive dropped contributions that end this peer's training."""


class Contribution(Protocol):
    """A peer's local work since its last contribution: the live model's side of a synchronisation.

    The caller holds `model_lock`, and calls the methods off the event loop, one at a time. With P fragments a token
    contributes to each fragment in turn, and weighs 1 / P each time. A fragment of None is the whole vector.
    """

    @property
    def model_lock(self) -> AbstractAsyncContextManager[object]:
        """Keeps other threads off the live model; reusable."""

    @property
    def tokens(self) -> int:
        """Tokens of work not contributed yet, over all fragments; 0 if there is nothing to contribute."""

    @property
    def samples(self) -> int:
        """Samples read since the last contribution to any fragment."""

    def tokens_of(self, fragment: Fragment) -> int:
        """Return the weight of a fragment's contribution, in tokens; 0 if there is nothing to contribute."""

    def collect(self, out: torch.Tensor, fragment: Fragment | None = None) -> None:
        """Write shared minus live values, or the mean gradient, into ``out`` (fp32, ``[fragment.num_values]``)."""

    def adopt(
        self,
        contributed: bool,
        carry: torch.Tensor | None,
        fragment: Fragment | None = None,
        counted: tuple[int, int] = (0, 0),
    ) -> None:
        """Set the live model from the shared state, which has just changed in ``fragment``.

        Args:
            contributed: True if the state includes the work. Then only work done since stays pending.
            carry: Without ``contributed``: the output of `collect` from before the change, to put on top of the new
                state; None drops the work.
            fragment: The part of the state that changed.
            counted: With ``contributed``: the tokens and samples that the state includes.
        """

    def reset(self) -> None:
        """Set the live model from the shared state; drop all local work and the local optimizer's state."""


class Replica:
    """One peer's copy of the shared state, and its pending contributions to it.

    Attributes:
        drops_stale: True if local work is dropped when no known certificates lead to a replacement state.
        feedback: Compression error and momentum of this peer's contributions, for all fragments in order.
        trained_tokens: Tokens of this peer's work in committed rounds.
        trained_rounds: Committed rounds with this peer's work.
    """

    def __init__(self, context: PeerContext, manifest: Manifest, state: SharedState) -> None:
        self.context = context
        self.state = state
        if state.head.round == 0:
            state.head = context.genesis(state.head.digest)
        spec, layout, fragments = context.spec, state.layout, state.fragments
        training = manifest.training
        goal = Goal(steps=training.steps_per_round, each=manifest.private is not None)
        if training.every == 1:
            goal = Goal(samples=training.global_batch)
        codecs = [vector_codec(spec, fragment.layout) for fragment in fragments]
        sizes = [fragment.num_values for fragment in fragments]
        round_log = RoundLog(context, list(zip(codecs, sizes, strict=True)))
        self.averager = Averager(context, state.head, round_log, layout.fingerprint, goal)
        codec = vector_codec(spec, layout)
        self.feedback = ErrorFeedback(
            layout.num_values, codec, spec.feedback_decay, spec.worker_momentum, layout.num_parameters
        )
        num_parameters = [fragment.layout.num_parameters for fragment in fragments]
        self._feedbacks = self.feedback.split(codecs, sizes, num_parameters)
        self.drops_stale = training.every == 1
        self._buffer: torch.Tensor | None = None
        self._drops_in_a_row = 0
        self._server = StateServer(context.rpc, state)
        self.trained_tokens = self.trained_rounds = 0

    def fragment_of(self, body: Body) -> Fragment:
        return self.state.fragments.of_round(body.round)

    async def is_intact(self) -> bool:
        """True if the state in memory has its digest."""
        tree = await self.context.runtime.compute(self.state.tree)
        if tree.root == self.state.head.digest:
            return True
        logger.warning("round %d: parameters in memory do not match their digest", self.state.head.round)
        return False

    # --- contributing

    async def collect(self, work: Contribution, fragment: Fragment) -> torch.Tensor | None:
        """Return the contribution with momentum and residual, in a reused buffer; None if it is not finite."""
        out = self._buffer_for(fragment)
        return out if await self.context.runtime.compute(self._collect, work, out, fragment) else None

    def _buffer_for(self, fragment: Fragment) -> torch.Tensor:
        if self._buffer is None:
            size = max(fragment.num_values for fragment in self.state.fragments)
            self._buffer = torch.empty(size, dtype=torch.float32)
        return self._buffer[: fragment.num_values]

    def _collect(self, work: Contribution, out: torch.Tensor, fragment: Fragment) -> bool:
        work.collect(out, fragment)
        self._feedbacks[fragment.index].add_to(out)
        return bool(torch.isfinite(out.sum(dtype=torch.float64)))

    async def update_feedback(self, body: Body, encoded: Sequence[Encoded]) -> None:
        """Record the compression error and the momentum of a contribution that is in a result."""
        await self.context.runtime.compute(self._feedbacks[self.fragment_of(body).index].update, encoded)

    def restore_residual(self, residual: torch.Tensor) -> None:
        """Load a checkpoint's residual (fp32, ``[num_values]``) before the catch-up from the checkpoint's head.

        Catching up resets it if a later round includes the contribution. A residual of another shape, or one that is
        not finite, is dropped.
        """
        own = self.feedback.residual
        if own is None:
            return
        if residual.shape == own.shape and bool(residual.isfinite().all()):
            own.copy_(residual)
            self.averager.contributions.forget()
        else:
            logger.warning("the checkpoint's error-feedback residual does not fit, or is not finite: dropped")

    async def reset(self, work: Contribution) -> None:
        """Drop all local work, the local optimizer's state and the residual; call while ``work`` is at rest."""
        await self.context.runtime.compute(work.reset)
        self.averager.contributions.consumed(range(len(self.state.fragments)))
        for feedback in self._feedbacks:
            feedback.reset()

    async def drop(self, work: Contribution, reason: str) -> str:
        """Drop a contribution that cannot count; return why. Raise `DivergedError` at `MAX_DROPS` in a row."""
        await self.reset(work)
        self._drops_in_a_row += 1
        if self._drops_in_a_row >= MAX_DROPS:
            raise DivergedError(
                f"{MAX_DROPS} contributions of this peer in a row had to be dropped, the last to round"
                f" {self.state.head.round} because {reason}: look for bad samples, lower the rate, or check its memory"
            )
        logger.warning("round %d: %s: it was dropped, and this peer begins anew", self.state.head.round, reason)
        return f"{reason}: it was dropped"

    # --- applying results

    async def apply(self, result: Result, work: Contribution | None, contributed: bool) -> None:
        """Apply the certified result of the round in progress to the shared state and the live model, atomically."""
        await to_its_end(self._apply(result, work, contributed))

    async def apply_missed(self, result: Result, work: Contribution | None) -> None:
        """Apply the result of a missed round, which may include this peer's work."""
        body = result.certificate.body
        contributed = self.averager.contributions.is_in(body)
        if contributed:  # The old residual is in the state; the new error is not known.
            await self.context.runtime.compute(self._feedbacks[self.fragment_of(body).index].reset)
        await self.apply(result, work, contributed)

    async def _apply(self, result: Result, work: Contribution | None, contributed: bool) -> None:
        body = result.certificate.body
        body.check_follows(self.state.head)
        table = self.state.head.table.check(result.certificate)
        tree_root = await self.context.runtime.compute(self._take_step, result, work, contributed)
        if contributed:
            self._drops_in_a_row = 0
            tokens, _ = self.averager.contributions.counts_in(body) or (0, 0)
            self.trained_tokens += tokens
            self.trained_rounds += 1
            self.averager.contributions.consumed([self.fragment_of(body).index])
        before = self.state.head
        self._set_head(result.certificate.next_head(tree_root, table))
        self.context.anchors.reached(self.state.head)
        self.averager.round_log.add(result, before, bool(self._server.chunks.active))

    def _take_step(self, result: Result, work: Contribution | None, contributed: bool) -> bytes:
        body = result.certificate.body
        carry, fragment = None, self.fragment_of(body)
        if work is not None and not contributed:
            carry = self._carry(work, fragment, self.context.spec.late_decay)
        self.step(result)
        if work is not None:
            counted = (0, 0)
            if contributed:  # If the result does not tell the count, all pending work is taken as counted.
                counted = self.averager.contributions.counts_in(body) or (work.tokens_of(fragment), work.samples)
            work.adopt(contributed, carry, fragment, counted)
        return self.state.tree().root

    def step(self, result: Result) -> None:
        """Take the shared step on a certified result; leave the live model and the head alone."""
        body = result.certificate.body
        fragment = self.fragment_of(body)
        mean = self._buffer_for(fragment)
        self.averager.round_log.decode(body, result.means, mean)
        self.state.apply(mean, body.round, fragment)

    def _carry(self, work: Contribution, fragment: Fragment, part: float) -> torch.Tensor | None:
        """Return the work to put on top of the next state, scaled by ``part``; None if there is none."""
        if work.tokens_of(fragment) <= 0:
            return None
        carry = torch.empty(fragment.num_values, dtype=torch.float32)
        work.collect(carry, fragment)
        return carry.mul_(part)

    def _set_head(self, head: Head) -> None:
        self.state.head = head
        self.averager.matchmaker.set_head(head)
        self.context.owner.state_changed()

    # --- replacing the whole

    async def replace(
        self,
        assemble: Callable[[], Awaitable[Head]],
        missed: Sequence[Certificate] | None,
        work: Contribution | None,
        keeps_work: bool,
    ) -> None:
        """Replace the shared state by another one, atomically.

        ``assemble`` overwrites the state, and returns its head. ``missed`` are the certificates from this peer's head
        to the new one; None if they are not known. With ``keeps_work`` work may be carried to the new state.
        """
        before, log = self.state.head, self.averager.round_log
        kept = self._kept(missed) if keeps_work else [None] * len(self.state.fragments)
        carries = await self.context.runtime.compute(self._carries, work, kept)
        head = await assemble()
        self.state.head = head
        await self.context.runtime.compute(self._adopt, work, kept, carries, missed is not None)
        self.averager.contributions.consumed(index for index, part in enumerate(kept) if part is None)
        if head.lineage not in {before.lineage, *log.lineages()}:
            self.context.anchors.moved()
        log.begin_at(head)
        self._set_head(head)

    def _kept(self, missed: Sequence[Certificate] | None) -> list[float | None]:
        """Return by fragment the factor of local work carried to a later state; None to drop it."""
        if missed is None:
            # The new state may include an abandoned attempt that other peers completed.
            parts = range(len(self.state.fragments))
            return [None if self.drops_stale or self.averager.contributions.may_count(part) else 1.0 for part in parts]
        kept: list[float | None] = [1.0] * len(self.state.fragments)
        for certificate in missed:
            index = self.fragment_of(certificate.body).index
            before = kept[index]
            is_counted = before is None or self.averager.contributions.is_in(certificate.body)
            kept[index] = None if before is None or is_counted else before * self.context.spec.late_decay
        return kept

    def _carries(self, work: Contribution | None, kept: Sequence[float | None]) -> list[torch.Tensor | None]:
        return [
            None if work is None or part is None else self._carry(work, fragment, part)
            for fragment, part in zip(self.state.fragments, kept, strict=True)
        ]

    def _adopt(
        self,
        work: Contribution | None,
        kept: Sequence[float | None],
        carries: Sequence[torch.Tensor | None],
        follows: bool,
    ) -> None:
        """Set the live model; keep residual and momentum of carried work if the new state ``follows`` from the old."""
        for feedback, part in zip(self._feedbacks, kept, strict=True):
            if part is None or not follows:
                feedback.reset()
        if work is not None:
            for fragment in self.state.fragments:
                work.adopt(False, carries[fragment.index], fragment)
