"""One peer's attempts in its groups: prepare, run, recover, and record the members at fault."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2ptrain.averaging.allreduce.planning import AttemptPlanner
from p2ptrain.averaging.allreduce.serving import RunningSessions
from p2ptrain.averaging.allreduce.session import AllReduceSession, Observer, SessionResult, Trouble
from p2ptrain.averaging.commit.attempt import Attempt, AttemptFailedError, LateError, SpentError, UnencodableError
from p2ptrain.averaging.commit.recovery import AttemptRecovery
from p2ptrain.averaging.commit.round_log import ContributionLog, RoundLog
from p2ptrain.averaging.commit.votes import endorsed
from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping.matchmaker import Matchmaker
from p2ptrain.averaging.protocol.certificate import Certificate, Head, Roster
from p2ptrain.averaging.verification.evidence import EvidenceStore
from p2ptrain.tasks import Tasks

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

LATE_SHARE = 0.5
"""Share of a break with which a late contribution counts."""


@dataclass(frozen=True)
class GroupResult:
    """A group's certified result, as one member obtained it."""

    attempt: Attempt
    session: SessionResult
    certificate: Certificate


class AttemptRunner:
    """Runs this peer's attempts.

    Attributes:
        planner: Plans them, by the send rates that it keeps.
    """

    def __init__(
        self,
        context: PeerContext,
        matchmaker: Matchmaker,
        round_log: RoundLog,
        contributions: ContributionLog,
        on_phase: Callable[[str], None],
    ) -> None:
        """``on_phase`` is called with each phase of a session."""
        self._context = context
        self._membership = context.membership
        self._matchmaker = matchmaker
        self._round_log = round_log
        self._contributions = contributions
        self.planner = AttemptPlanner(context, matchmaker.cells, round_log)
        self.evidence = EvidenceStore(context, round_log.rules_of, self._on_conviction)
        self.evidence.serve()
        self._observer = Observer(on_phase, self.planner.rates.observe, self.evidence.add_soon)
        self._slow_checkers: set[str] = set()
        self._recovery = AttemptRecovery(context, round_log, lambda: matchmaker.position.head)
        self.sessions = RunningSessions(context, matchmaker.cells, round_log)
        self._lingering = Tasks()

    async def close(self) -> None:
        await self.evidence.close()
        running = list(self.sessions.by_group.values())
        await self._lingering.close()
        for session in running:
            await session.close(linger=False)

    def prepare(self, roster: Roster, head: Head, vector: torch.Tensor, below: GroupResult | None) -> AllReduceSession:
        """Return the session of a new attempt; the other members may open their streams from now on.

        Args:
            vector: This peer's contribution, fp32, as long as the round's vector; must not change until `run` returns.
            below: Above level 0: the group result from which the vector was decoded.

        Raises:
            AttemptFailedError: See `AttemptPlanner.plan`.
        """
        origin = self._round_log.origin_of(below.certificate, below.attempt.complete_means()) if below else None
        try:
            attempt, contribution = self.planner.plan(roster, head, vector, origin)
        except AttemptFailedError:
            self._matchmaker.group_broke()
            raise
        if origin is not None:
            attempt.children[roster.index_of(self._context.rpc.peer_id)] = origin.credential
        session = AllReduceSession(self._context, attempt, contribution, self._observer, self._slow_checkers)
        self.sessions.add(session)
        return session

    async def run(self, session: AllReduceSession) -> GroupResult | AttemptFailedError:
        """Run one attempt, and recover it if it breaks; return why it failed if that is impossible.

        Raises:
            UnencodableError: The codec rejects the vector.
            SpentError: The group may have learned the sum with the vector, which must not be averaged again.
        """
        attempt, loop = session.attempt, asyncio.get_running_loop()
        durations, started = self.planner.durations_of(attempt.roster.tickets[0].level), loop.time()
        certificate = None
        try:
            result = await self._logged(session)
            certificate = result.certificate
            if result.failure is None:
                durations.append(loop.time() - started)
            else:
                if isinstance(result.failure, LateError):
                    durations.clear()  # All members may be slower now: only the manifest's deadline holds.
                certificate = await self._recover(attempt, result, loop.time() - started)
            self._judge(result, certificate)
            for voter, first, second in self._context.seen_votes.take():
                await self.evidence.add_double_vote(voter, first, second)
        finally:
            self._lingering.start(self._leave(session, committed=certificate is not None), "linger")
        if certificate is not None:
            self._lingering.start(self._endorse(attempt), "endorse")
            return GroupResult(attempt, result, certificate)
        assert result.failure is not None
        return result.failure

    async def _endorse(self, attempt: Attempt) -> None:
        """Ask the founders to sign a certified result, if it is this peer's turn; see `endorsed`."""
        self._round_log.endorse(await endorsed(self._context, attempt))

    async def _logged(self, session: AllReduceSession) -> SessionResult:
        """Run a session, and note in this peer's log, if there is one, which parts leave."""
        log, offload = self._context.sending_log, self._context.runtime.offload
        if log is None:
            return await session.run()
        sending = session.describe_sending()
        await offload(log.sending, sending)
        result = await session.run()
        own = session.own.index
        parts = {index: memoryview(part) for index, part in result.sent_parts.items() if index != own}
        await offload(log.sent, sending, parts)
        return result

    async def _leave(self, session: AllReduceSession, *, committed: bool) -> None:
        """Close a session; after a commit, let the others fetch mean and signature first."""
        try:
            await session.close(linger=committed)
        finally:
            self.sessions.by_group.pop(session.attempt.roster.group_id, None)

    async def _recover(self, attempt: Attempt, result: SessionResult, seconds: float) -> Certificate | None:
        """Complete a broken attempt from the other members' state, or give it up."""
        logger.info("round %d: attempt failed: %s", attempt.head.round, result.failure)
        if result.is_proven:
            self._blame(result)
        if result.evidence:
            await self.evidence.add_own(result.evidence)
        certificate = await self._recovery.recover(attempt, seconds, result.silent)
        blamed = {blame.peer for blame in result.blamed}
        for peer in sorted(attempt.fell_silent.keys() - result.silent - blamed):
            self._matchmaker.leaders.lost(peer, attempt.fell_silent[peer])
        if certificate is None and not result.is_proven:  # Blame for late checks counts only if recovery failed, too.
            self._blame(result)
        late = {blame.peer for blame in result.blamed if blame.trouble in (Trouble.LATE, Trouble.SLOW)}
        for peer in sorted(late & attempt.answering):  # It lives, and its record may say that it is ahead of this peer.
            self._membership.answered(peer)
        if certificate is None:
            if not attempt.withholds:
                self._contributions.give_up_on(attempt.head)
            self._matchmaker.group_broke()
            if isinstance(result.failure, UnencodableError):
                raise result.failure
            if attempt.is_spent:
                raise SpentError(str(result.failure))
        return certificate

    def _blame(self, result: SessionResult) -> None:
        leader = self._matchmaker.last_leader
        for blame in result.blamed:
            self._matchmaker.leaders.lost(blame.peer)
            match blame.trouble:
                case Trouble.LATE:  # It may be slow, and send fewer bits next time; or fall silent again and again.
                    self._membership.broke_with(blame.peer, blame.reason, leader, *blame.excuses, share=LATE_SHARE)
                case Trouble.SLOW:  # It owns less now. One that holds up all the same is left out for a while.
                    self._membership.broke_with(blame.peer, blame.reason, leader, *blame.excuses)
                    self.planner.rates.was_late(blame.peer)
                case Trouble.FAULT:
                    self._membership.broke_with(blame.peer, blame.reason)  # No leader can cause this.
                case Trouble.BROKE:
                    self._membership.broke_with(blame.peer, blame.reason, leader)
                case Trouble.ACCUSED:
                    self._membership.broke_with(blame.peer, blame.reason, *blame.excuses or (leader,))
                    self._membership.answered(blame.peer)  # It lives: rounds wait for it.

    def _judge(self, result: SessionResult, certificate: Certificate | None) -> None:
        """Record the members that completed the round, and those whose contributions were refused."""
        for peer, reason in result.refused.items():
            self._membership.broke_with(peer, reason)
        if certificate is not None:
            body = certificate.body
            self._context.seen_votes.add(body, certificate.proofs, is_own=True)
            if self._context.spec.spot_checks:  # Otherwise evidence is rare, and shown where it is needed.
                self.evidence.ask([peer for peer in body.members if peer != self._context.rpc.peer_id])
            held_up = {blame.peer for blame in result.blamed}  # Others may have completed the attempt without it.
            in_time = set(body.contributing) - held_up
            self._membership.finished_with(in_time)
            for peer in in_time:
                self.planner.rates.was_in_time(peer)

    def _on_conviction(self, peer: str, fault: str) -> None:
        """Exclude a peer that lied, and fail the running attempts with it."""
        logger.warning("peer %s is kept out from now on: there is evidence against it: %s", peer[-8:], fault)
        self._matchmaker.abandon(peer)
        for session in self.sessions.by_group.values():
            session.accuse(peer, fault)
