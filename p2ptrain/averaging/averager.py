"""The life of a round at one peer: find a group, all-reduce, certify; retry without the members at fault.

While the swarm fits in one group, its result ends the round. In a larger swarm the result goes up the tree
(`p2ptrain.averaging.grouping.cells`). One delegate averages it in a group of delegates, and the other members wait for
the outcome (`p2ptrain.averaging.commit.broadcast`). If a delegate fails, the next one takes over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from p2ptrain.averaging.allreduce.runner import AttemptRunner, GroupResult
from p2ptrain.averaging.commit.attempt import AttemptFailedError, PeerPart, SpentError
from p2ptrain.averaging.commit.broadcast import DecidedError, ResultBroadcast
from p2ptrain.averaging.commit.round_log import ContributionLog, Path, Result, RoundLog, TreePath
from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping.cells import delegate_order
from p2ptrain.averaging.grouping.matchmaker import Matchmaker
from p2ptrain.averaging.protocol.certificate import Body, Head, Ticket
from p2ptrain.averaging.timing.deadlines import KeepaliveStatus, first_result
from p2ptrain.averaging.timing.goal import NO_GOAL, Goal
from p2ptrain.averaging.vector.error_feedback import Encoded, feedback_scale
from p2ptrain.errors import IntegrityError, NotAdmittedError, TemporaryError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
SPENT = "has work in a sum that its group knows, and that came too late for the round"
BANNED = (
    "this swarm has banned this peer's key: its members have evidence that it signed two results of one round, or a"
    " false mean, as a peer can whose file of votes was deleted or restored; join under a new key"
)
MAX_DELEGATES = 3  # delegates of a group; each takes over after those before failed or fell quiet
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
        refusal: Why this peer's contribution must not be averaged again, if it did not count: the group refused it, or
            knows a sum with it. Empty otherwise.
        part: Another peer's part of this peer's share in its group, drawn at random; None without one.
    """

    result: Result
    contributed: bool
    position: tuple[int, int]
    encoded: tuple[Encoded, ...]
    attempts: int
    matchmaking_seconds: float
    transfer_seconds: float
    refusal: str
    part: PeerPart | None


@dataclass
class _Effort:
    """Number of attempts and time until a group's result; see `RoundOutcome`."""

    attempts: int = 0
    matchmaking_seconds: float = 0.0
    transfer_seconds: float = 0.0


class Averager:
    """Averages one peer's contributions with those of the swarm, round by round.

    Attributes:
        phase: idle, matchmaking, scatter, reduce, gather or commit.
    """

    def __init__(
        self,
        context: PeerContext,
        head: Head,
        round_log: RoundLog,
        layout: bytes,
        goal: Goal = NO_GOAL,
    ) -> None:
        """
        Args:
            layout: Fingerprint of codec and parameter layout, 32 bytes; members must agree on it.
            goal: The condition on which a round is due.
        """
        self._context = context
        self._spec = context.spec
        self._layout = layout
        self.phase = "idle"
        self.phase_listeners: list[PhaseListener] = []
        self.round_log = round_log
        if head.round:
            round_log.begin_at(head)
        self.matchmaker = Matchmaker(context, head, goal, lambda *misled: self.evidence.show(*misled))
        self.contributions = ContributionLog(self.matchmaker.position, round_log.num_parts)
        self._runner = AttemptRunner(context, self.matchmaker, round_log, self.contributions, self._enter)
        self.evidence = self._runner.evidence
        self._keepalive_status = KeepaliveStatus()
        self._broadcast = ResultBroadcast(context, round_log, self._keepalive_status)

    @property
    def head(self) -> Head:
        return self.matchmaker.position.head

    def begin_at(self, head: Head) -> None:
        """Go on from the head of a checkpoint; others may prove this peer's later heads from there."""
        self.round_log.begin_at(head)
        self.matchmaker.set_head(head)

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
            SpentError: The group may have learned a sum with ``vector``, which no round has.
            NotAdmittedError: The lineage's members have banned this peer.
        """
        loop, head = asyncio.get_running_loop(), self.head
        if self._context.rpc.peer_id in head.table.banned:
            raise NotAdmittedError(BANNED)
        ticket = self._ticket(head, tokens, samples, bandwidth)
        effort, above = _Effort(), list[GroupResult]()
        own_group: GroupResult | None = None
        try:
            own_group = await self._average_group(head, vector, ticket, effort)
            certified_at = loop.time()
            if own_group.certificate.body.is_last:
                path = TreePath((), own_group.attempt.complete_means())
            else:
                path, above = await self._ascend(head, own_group, ticket)
                self.contributions.completed()
        except AttemptFailedError as error:
            if own_group is not None and own_group.attempt.is_spent:
                raise SpentError(str(error)) from error
            raise
        finally:
            self._enter("idle")
        effort.transfer_seconds += loop.time() - certified_at
        return self._outcome(own_group, path, above, effort)

    async def _average_group(
        self, head: Head, vector: torch.Tensor, ticket: Ticket, effort: _Effort, below: GroupResult | None = None
    ) -> GroupResult:
        """Find a group on the ticket's level of the tree, and average with it; raises like `average`."""
        loop = asyncio.get_running_loop()
        failure = AttemptFailedError("no attempt was made")
        for _ in range(MAX_ATTEMPTS):
            effort.attempts += 1
            started = loop.time()
            self._enter("matchmaking")
            self._keepalive_status.set(joined=False)
            roster = await self.matchmaker.find_group(lambda: self._signed(ticket))
            self._keepalive_status.set(joined=ticket.level > 0)
            matched = loop.time()
            effort.matchmaking_seconds += matched - started
            session = self._runner.prepare(roster, head, vector, below)
            self._enter("scatter")
            result = await self._runner.run(session)
            effort.transfer_seconds += loop.time() - matched
            if isinstance(result, GroupResult):
                return result
            failure = result
            if not failure.suspects:
                await asyncio.sleep(self.matchmaker.backoff.next())
        raise failure

    def _ticket(self, head: Head, tokens: int, samples: int, bandwidth: int) -> Ticket:
        """Return this peer's ticket on level 0, which `_signed` completes for each attempt."""
        rpc = self._context.rpc
        return Ticket(
            peer=rpc.peer_id,
            round=head.round,
            lineage=head.lineage,
            digest=head.digest,
            layout=self._layout,
            tokens=int(min(tokens, rpc.gate.cap(rpc.peer_id))),
            samples=samples,
            bandwidth=bandwidth,
            reachable=True,
            rates=b"",
            nonce=bytes(16),
            present=head.present,
            credentials=(rpc.credential,) if rpc.credential else (),
        )

    def _signed(self, ticket: Ticket) -> Ticket:
        context = self._context
        position, is_lowest = self.matchmaker.position, ticket.level == 0
        complete = replace(
            ticket,
            view=max(position.attempts, context.ballots.next_view(ticket.lineage, ticket.round)),
            stalled=position.is_stalled,
            leaves=is_lowest and position.leaves,
            accuses=position.head.table.accused_by(self.evidence.convicted) if is_lowest else (),
            reachable=context.owner.is_reachable,
            rates=self._runner.planner.rates.encoded(),
            nonce=self._runner.planner.nonce(ticket.level),
        )
        return complete.signed(context.swarm, context.signer)

    # --- up the tree ----------------------------------------------------------------------------------------------

    async def _ascend(
        self, head: Head, result: GroupResult, ticket: Ticket, on_path: Callable[[Path], None] = lambda path: None
    ) -> tuple[TreePath, list[GroupResult]]:
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
        order = delegate_order(body.lineage, body.round, body.level, body.contributing, head.table.awake)
        delegates = sorted(order, key=lambda peer: peer not in reachable)[:MAX_DELEGATES]
        brought: tuple[TreePath, list[GroupResult]] | None = None
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
        result: GroupResult,
        ticket: Ticket,
        on_path: Callable[[Path], None],
        on_quiet: Callable[[], None],
    ) -> tuple[TreePath, list[GroupResult]]:
        """Take a group's result to the end of the round by one delegate, which may be this peer."""
        body, own = result.certificate.body, delegate == self._context.rpc.peer_id
        try:
            if own:
                return await self._represent(head, result, ticket, on_path)
            self._enter("gather")
            seconds = self._seconds_above(body)
            return await self._broadcast.fetch(delegate, body, head.table, seconds, on_path, on_quiet), []
        except (TemporaryError, IntegrityError) as error:
            logger.info("round %d: delegate %s failed: %s", body.round, delegate[-8:], error)
            if own:
                self._broadcast.conclude(body, None)
            elif self.matchmaker.position.head.lineage == body.lineage:
                self.matchmaker.position.attempts += 1  # Else the next delegate's view would lag behind votes.
            raise

    def _seconds_above(self, body: Body) -> float:
        spec, levels = self._spec, body.levels - 1 - body.level
        return levels * (spec.matchmaking_seconds + spec.round_seconds + (1 + body.levels) * spec.grace_seconds)

    async def _represent(
        self, head: Head, result: GroupResult, ticket: Ticket, on_path: Callable[[Path], None]
    ) -> tuple[TreePath, list[GroupResult]]:
        """As a delegate: average a group's result on the next level, and continue from there."""
        body = result.certificate.body
        vector = await self._context.runtime.compute(self._decoded, result)
        ticket = replace(
            ticket,
            tokens=body.tokens,
            samples=body.most_samples,
            level=body.level + 1,
            child=body.body_hash,
            peers=sum(body.peers),
            census=body.census,
            credentials=result.attempt.roster.credentials_of(body.census.joining),
        )
        upper = await self._average_group(head, vector, ticket, _Effort(), result)
        if upper.certificate.body.is_last:
            return TreePath((upper.certificate,), upper.attempt.complete_means()), [upper]
        path, above = await self._ascend(head, upper, ticket, on_path)
        return TreePath((upper.certificate, *path.path), path.means), [upper, *above]

    def _decoded(self, result: GroupResult) -> torch.Tensor:
        import torch

        body = result.certificate.body
        vector = torch.empty(body.bounds[-1], dtype=torch.float32)
        self.round_log.decode(body, result.attempt.complete_means(), vector)
        return vector

    # --- the end --------------------------------------------------------------------------------------------------

    def _outcome(
        self, own_group: GroupResult, path: TreePath, above: list[GroupResult], effort: _Effort
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
            attempts=effort.attempts,
            matchmaking_seconds=effort.matchmaking_seconds,
            transfer_seconds=effort.transfer_seconds,
            refusal=own_group.session.refusal or (SPENT if own_group.attempt.is_spent else ""),
            part=own_group.session.part,
        )

    def _encoded(self, results: list[GroupResult]) -> tuple[Encoded, ...]:
        """Return this peer's encoded vectors on each level; each level multiplies the scale by `feedback_scale`."""
        encoded, scale, own = [], 1.0, self._context.rpc.peer_id
        for result in results:
            body, session, own_index = result.certificate.body, result.session, result.attempt.roster.index_of(own)
            if own not in body.contributing:
                break
            claims = result.attempt.claims(index for index, *_ in body.contributors)
            mean_scale = scale * feedback_scale(self._spec, claims, body.contributing.index(own))
            encoded.append(
                Encoded(
                    vector=session.contribution.vector,
                    bounds=body.bounds,
                    sent_parts=session.sent_parts if session.contribution.has_error else {},
                    part_codec=session.contribution.codec,
                    part_scale=scale,
                    own_index=own_index,
                    own_mean_exact=session.exact_mean,
                    own_mean=result.attempt.means[own_index] or b"",
                    mean_codec=result.attempt.dense_codec,
                    mean_scale=mean_scale,
                )
            )
            scale = mean_scale
        return tuple(encoded)
