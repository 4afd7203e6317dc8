"""The life of a round at one peer: find a group, all-reduce, certify; retry without the members at fault.

While the swarm fits in one group, its result ends the round. In a larger swarm the result goes up the tree
(`p2ptrain.averaging.grouping.cells`). One delegate averages it in a group of delegates, and the other members wait for
the outcome (`p2ptrain.averaging.commit.broadcast`). If a delegate fails, the next one takes over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from p2ptrain.averaging.allreduce.runner import AttemptRunner
from p2ptrain.averaging.allreduce.session import SessionResult
from p2ptrain.averaging.commit.attempt import Attempt, AttemptFailedError, decode_means
from p2ptrain.averaging.commit.broadcast import DecidedError, Path, ResultBroadcast, TreePath
from p2ptrain.averaging.commit.result_chunks import Means, Origin
from p2ptrain.averaging.commit.round_log import ContributionLog, Result, RoundLog
from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping.cells import delegate_order
from p2ptrain.averaging.grouping.matchmaker import Matchmaker
from p2ptrain.averaging.grouping.membership import ANSWER_SECONDS, Membership
from p2ptrain.averaging.protocol.certificate import MAX_PRESENT, Body, Certificate, Head, Ticket
from p2ptrain.averaging.timing.deadlines import KeepaliveStatus, first_result
from p2ptrain.averaging.timing.goal import NO_GOAL, Goal
from p2ptrain.averaging.vector.error_feedback import Encoded
from p2ptrain.averaging.vector.rules import feedback_scale
from p2ptrain.codecs import Codec, dense_codec
from p2ptrain.errors import IntegrityError, TemporaryError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
MAX_DELEGATES = 3  # delegates of a group; each takes over after those before failed or fell quiet
MIN_LOG_BYTES = 64 << 20
PhaseListener = Callable[[str, int], None]
"""Called on the event loop with each new phase and the round in progress."""


@dataclass(frozen=True)
class RoundOutcome:
    """A certified round, as one member sees it.

    Attributes:
        contributed: True if this peer's contribution is in the mean.
        position: This peer's index among all peers of the round, and their number; selects the samples of the next.
        encoded: This peer's encoded vectors on each level, for error feedback.
        attempts: Number of attempts until this peer's group had a result.
        transfer_seconds: Time spent reducing and signing, on all levels.
        refusal: Why the group refused this peer's contribution; empty if it did not.
    """

    result: Result
    contributed: bool
    position: tuple[int, int]
    encoded: tuple[Encoded, ...]
    attempts: int
    matchmaking_seconds: float
    transfer_seconds: float
    refusal: str


@dataclass(frozen=True)
class _GroupResult:
    """A group's result on one level, as one member obtained it."""

    attempt: Attempt
    session: SessionResult
    certificate: Certificate
    attempts: int
    matchmaking_seconds: float
    transfer_seconds: float

    @property
    def means(self) -> Means:
        return [mean if mean is not None else b"" for mean in self.attempt.means]


class Averager:
    """Averages one peer's contributions with those of the swarm, round by round.

    Attributes:
        phase: idle, matchmaking, scatter, reduce, gather or commit.
    """

    def __init__(
        self,
        context: PeerContext,
        membership: Membership,
        head: Head,
        parts: Sequence[tuple[Codec, int]],
        layout: bytes,
        goal: Goal = NO_GOAL,
    ) -> None:
        """
        Args:
            parts: Codec and number of values of each of the model's P parts; round r averages part r mod P.
            layout: Fingerprint of codec and parameter layout, 32 bytes; members must agree on it.
            goal: The condition on which a round is due.
        """
        self._context = context
        self._spec = context.spec
        self._membership = membership
        self._layout = layout
        self.phase = "idle"
        self.phase_listeners: list[PhaseListener] = []
        dense_bytes = sum(dense_codec(codec).encoded_bytes(num_values) for codec, num_values in parts)
        self.round_log = RoundLog(context, parts, max(MIN_LOG_BYTES, 2 * dense_bytes))
        self.matchmaker = Matchmaker(context, membership, head, goal, lambda *misled: self.evidence.show(*misled))
        self.contributions = ContributionLog(self.matchmaker.position, len(parts))
        self._runner = AttemptRunner(context, self.matchmaker, self.round_log, self.contributions, self._enter)
        self.evidence = self._runner.evidence
        self._keepalive_status = KeepaliveStatus()
        self._broadcast = ResultBroadcast(context, self.round_log, self._keepalive_status)

    @property
    def head(self) -> Head:
        return self.matchmaker.position.head

    def _enter(self, phase: str) -> None:
        self.phase = phase
        for listen in self.phase_listeners:
            listen(phase, self.head.round)

    async def close(self) -> None:
        await self.matchmaker.close()
        self._broadcast.close()
        await self._runner.close()

    # --- a round --------------------------------------------------------------------------------------------------

    async def average(self, vector: torch.Tensor, tokens: int, samples: int, bandwidth: int = 0) -> RoundOutcome:
        """Average ``vector`` with the other peers' in the round of the current head.

        Args:
            vector: This peer's contribution, fp32, one-dimensional, with the round's length and codec (see
                `RoundLog`); must not change until this returns.
            tokens: Its weight, at least 1.
            samples: Samples read in this round.
            bandwidth: Limit on the send rate in bytes per second; 0 for none.

        Raises:
            BehindError: The swarm is ahead, or on a lineage that wins.
            MismatchError: This peer's state differs from the others'.
            NoGroupError: No group formed before the deadline.
            AttemptFailedError: Every attempt failed, or no delegate brought the group's result to the end of the round.
            UnencodableError: ``vector`` does not fit the codec.
        """
        loop, head = asyncio.get_running_loop(), self.head
        ticket = self._ticket(head, tokens, samples, bandwidth)
        above: list[_GroupResult] = []
        try:
            own_group = await self._average_group(head, vector, ticket)
            certified_at = loop.time()
            if own_group.certificate.body.is_last:
                path = TreePath((), own_group.means)
            else:
                path, above = await self._ascend(head, own_group, ticket)
        finally:
            self._enter("idle")
        return self._outcome(own_group, path, above, loop.time() - certified_at)

    async def _average_group(
        self, head: Head, vector: torch.Tensor, ticket: Ticket, origin: Origin | None = None
    ) -> _GroupResult:
        """Find a group on the ticket's level of the tree, and average with it; raises like `average`."""
        loop = asyncio.get_running_loop()
        matchmaking = transfer = 0.0
        failure = AttemptFailedError("no attempt was made")
        for attempt_number in range(1, MAX_ATTEMPTS + 1):
            started = loop.time()
            self._enter("matchmaking")
            self._keepalive_status.set(joined=False)
            roster = await self.matchmaker.find_group(self._signed(ticket))
            self._keepalive_status.set(joined=ticket.level > 0)
            matched = loop.time()
            matchmaking += matched - started
            session = self._runner.prepare(roster, head, vector, origin)
            self._enter("scatter")
            certificate, result = await self._runner.run(session)
            failure = result.failure or failure
            transfer += loop.time() - matched
            if certificate is not None:
                if len(roster.members) == 1 and ticket.level == 0 and loop.time() - matched > ANSWER_SECONDS:
                    await self.matchmaker.check_alone()
                return _GroupResult(session.attempt, result, certificate, attempt_number, matchmaking, transfer)
        raise failure

    def _ticket(self, head: Head, tokens: int, samples: int, bandwidth: int) -> Ticket:
        """Return this peer's ticket on level 0, which `_signed` completes for each attempt."""
        return Ticket(
            peer=self._context.rpc.peer_id,
            round=head.round,
            lineage=head.lineage,
            digest=head.digest,
            layout=self._layout,
            tokens=tokens,
            samples=samples,
            bandwidth=bandwidth,
            reachable=True,
            rates=b"",
            nonce=bytes(16),
            present=head.present,
        )

    def _signed(self, ticket: Ticket) -> Ticket:
        context = self._context
        complete = replace(
            ticket,
            reachable=context.owner.is_reachable,
            rates=self._runner.rates.encoded(),
            nonce=context.runtime.random.randbytes(16),
            sees=min(MAX_PRESENT, 1 + len(self._membership.alive_trainers())),
        )
        return complete.signed(context.swarm, context.signer)

    # --- up the tree ----------------------------------------------------------------------------------------------

    async def _ascend(
        self, head: Head, result: _GroupResult, ticket: Ticket, on_path: Callable[[Path], None] = lambda path: None
    ) -> tuple[TreePath, list[_GroupResult]]:
        """Take a group's result to the end of the round, as its delegate or through another one.

        Peers that wait for this one receive the certificates above (``on_path``) as soon as it does, and fetch chunks
        of the last result while it does. Returns the path to the last result, and this peer's results above, the lowest
        first.

        Raises:
            AttemptFailedError: No delegate succeeded, or the round ended with a result that was not available.
        """
        body = result.certificate.body
        if body.level == 0:
            self.contributions.add_result(body)
        self._broadcast.expect(body)

        def tell(path: Path) -> None:
            self._broadcast.tell(body, path)
            on_path((result.certificate, *path))

        reachable = {each.peer for each in result.attempt.roster.tickets if each.reachable}
        order = delegate_order(body.lineage, body.round, body.level, body.contributing)
        delegates = sorted(order, key=lambda peer: peer not in reachable)[:MAX_DELEGATES]
        brought: tuple[TreePath, list[_GroupResult]] | None = None
        failure = "no delegate brought the group's result to the others"
        try:
            brought = await first_result(
                [partial(self._ascend_by, each, head, result, ticket, tell) for each in delegates],
                lambda error: isinstance(error, (TemporaryError, IntegrityError)) and type(error) is not DecidedError,
            )
        except DecidedError as error:  # The round has ended: no other delegate may end it again.
            failure = str(error)
        finally:
            self._broadcast.conclude(body, brought[0] if brought else None)
        if brought is None:
            self.contributions.give_up_on(head)
            raise AttemptFailedError(failure)
        return brought

    async def _ascend_by(
        self,
        delegate: str,
        head: Head,
        result: _GroupResult,
        ticket: Ticket,
        on_path: Callable[[Path], None],
        on_quiet: Callable[[], None],
    ) -> tuple[TreePath, list[_GroupResult]]:
        """Take a group's result to the end of the round by one delegate, which may be this peer."""
        body, own = result.certificate.body, delegate == self._context.rpc.peer_id
        try:
            if own:
                return await self._represent(head, result, ticket, on_path)
            self._enter("gather")
            return await self._broadcast.fetch(delegate, body, self._seconds_above(body), on_path, on_quiet), []
        except (TemporaryError, IntegrityError) as error:
            logger.info("round %d: delegate %s failed: %s", body.round, delegate[-8:], error)
            if own:
                self._broadcast.conclude(body, None)
            raise

    def _seconds_above(self, body: Body) -> float:
        spec, levels = self._spec, body.levels - 1 - body.level
        return levels * (spec.matchmaking_seconds + spec.round_seconds + (1 + body.levels) * spec.grace_seconds)

    async def _represent(
        self, head: Head, result: _GroupResult, ticket: Ticket, on_path: Callable[[Path], None]
    ) -> tuple[TreePath, list[_GroupResult]]:
        """As a delegate: average a group's result on the next level, and continue from there."""
        body, means = result.certificate.body, result.means
        vector = await self._context.runtime.compute(self._decoded, body, means)
        ticket = replace(
            ticket,
            tokens=body.tokens,
            samples=body.most_samples,
            level=body.level + 1,
            child=body.body_hash,
            peers=sum(body.peers),
        )
        origin = Origin(result.certificate, means, self.round_log.source_of(ticket.peer, body))
        upper = await self._average_group(head, vector, ticket, origin)
        if upper.certificate.body.is_last:
            return TreePath((upper.certificate,), upper.means), [upper]
        path, above = await self._ascend(head, upper, ticket, on_path)
        return TreePath((upper.certificate, *path.path), path.means), [upper, *above]

    def _decoded(self, body: Body, means: Means) -> torch.Tensor:
        import torch

        vector = torch.empty(body.bounds[-1], dtype=torch.float32)
        decode_means(self._spec, self.round_log.codec_of(body.round), body, means, vector)
        return vector

    # --- the end --------------------------------------------------------------------------------------------------

    def _outcome(
        self, own_group: _GroupResult, path: TreePath, above: list[_GroupResult], seconds_above: float
    ) -> RoundOutcome:
        body, own = own_group.certificate.body, self._context.rpc.peer_id
        last = path.path[-1] if path.path else own_group.certificate
        contributed = path.counts(body) and own in body.contributing
        encoded = self._encoded([own_group, *above]) if contributed else ()
        for result in [own_group, *above]:
            if result.certificate is not last:
                result.attempt.means = []
        return RoundOutcome(
            result=Result(last, path.means),
            contributed=contributed,
            position=path.position_of(body, body.members.index(own)),
            encoded=encoded,
            attempts=own_group.attempts,
            matchmaking_seconds=own_group.matchmaking_seconds,
            transfer_seconds=own_group.transfer_seconds + seconds_above,
            refusal=own_group.session.refusal,
        )

    def _encoded(self, results: list[_GroupResult]) -> tuple[Encoded, ...]:
        """Return this peer's encoded vectors on each level; each level multiplies the scale by `feedback_scale`."""
        encoded, scale, own = [], 1.0, self._context.rpc.peer_id
        for result in results:
            body, session, own_index = result.certificate.body, result.session, result.attempt.roster.index_of(own)
            if own not in body.contributing:
                break
            tokens, position = [tokens for _, tokens, _ in body.contributors], body.contributing.index(own)
            mean_scale = scale * feedback_scale(self._spec, tokens, position)
            encoded.append(
                Encoded(
                    vector=session.contribution.vector,
                    bounds=body.bounds,
                    sent_parts=session.sent_parts,
                    part_codec=session.contribution.codec,
                    part_scale=scale,
                    own_index=own_index,
                    own_mean_exact=session.exact_mean,
                    own_mean=result.means[own_index],
                    mean_codec=dense_codec(result.attempt.codec),
                    mean_scale=mean_scale,
                )
            )
            scale = mean_scale
        return tuple(encoded)
