"""One peer's attempts in its groups: prepare, run, recover, and record the members at fault."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from p2ptrain.averaging.allreduce.bandwidth import SendRates, plan_shares
from p2ptrain.averaging.allreduce.member import ALLREDUCE
from p2ptrain.averaging.allreduce.messages import GAVE_UP, Bring, Request
from p2ptrain.averaging.allreduce.session import AllReduceSession, Observer, SessionResult, Trouble
from p2ptrain.averaging.commit.attempt import Attempt, Contribution, LateError, UnencodableError
from p2ptrain.averaging.commit.recovery import AttemptRecovery
from p2ptrain.averaging.commit.result_chunks import Origin, Source
from p2ptrain.averaging.commit.round_log import ContributionLog, RoundLog
from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping.matchmaker import Matchmaker
from p2ptrain.averaging.protocol.certificate import Certificate, Head, Roster
from p2ptrain.averaging.timing.deadlines import attempt_seconds, keepalive_seconds
from p2ptrain.averaging.verification.evidence import EvidenceStore
from p2ptrain.codecs import codec_at
from p2ptrain.errors import IntegrityError, PeerRefusedError, ProtocolError
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.tasks import Tasks

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

ROUNDS_REMEMBERED = 16
ROSTER_WAIT_SECONDS = 5.0  # how long another member's stream waits for this peer to learn the roster
MAX_REQUEST_BYTES = 1 << 20  # a delegate's request holds the certificate of its group's result


class AttemptRunner:
    """Runs this peer's attempts, and serves the streams of the other members."""

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
        self._membership = matchmaker.leaders.membership
        self._matchmaker = matchmaker
        self._round_log = round_log
        self._contributions = contributions
        self.rates = SendRates()
        self.evidence = EvidenceStore(context, round_log.rules_of, self._membership, self._on_conviction)
        if context.spec.spot_checks:  # Without checks no member signs anything that could convict it.
            self.evidence.serve()
        self._observer = Observer(on_phase, self.rates.observe, self.evidence.add_soon)
        self._slow_checkers: set[str] = set()
        self._durations: dict[int, deque[float]] = {}
        self._recovery = AttemptRecovery(context, round_log)
        self._sessions: dict[bytes, AllReduceSession] = {}
        self._roster_arrived = asyncio.Event()
        self._lingering = Tasks()
        context.rpc.serve_channel(ALLREDUCE, Request, self._serve, max_request_bytes=MAX_REQUEST_BYTES)

    async def close(self) -> None:
        await self.evidence.close()
        running = list(self._sessions.values())
        await self._lingering.close()
        for session in running:
            await session.close(linger=False)

    def prepare(self, roster: Roster, head: Head, vector: torch.Tensor, origin: Origin | None) -> AllReduceSession:
        """Return the session of a new attempt; the other members may open their streams from now on.

        Args:
            vector: This peer's contribution, fp32, as long as the round's vector; must not change until `run` returns.
            origin: Above level 0: the group result from which the vector was decoded.
        """
        context, spec, level = self._context, self._context.spec, roster.tickets[0].level
        codec, num_values = codec_at(self._round_log.codec_of(head.round), level), vector.numel()
        plan = plan_shares(roster.tickets, num_values, codec.block_size)
        levels = self._matchmaker.cells.num_levels(head.present)
        seconds = attempt_seconds(self._durations_of(level), spec)
        attempt = Attempt(roster, head, plan.bounds, codec, context.swarm, spec, levels, seconds, plan.shareless)
        own = roster.index_of(context.rpc.peer_id)
        contribution = Contribution(vector, plan.part_codec(attempt.part_codecs, own, spec.grace_seconds), origin)
        session = AllReduceSession(context, attempt, contribution, self._observer, self._slow_checkers)
        self._round_log.remember(attempt)
        self._sessions[roster.group_id] = session
        self._roster_arrived.set()
        self._roster_arrived = asyncio.Event()
        return session

    def _durations_of(self, level: int) -> deque[float]:
        return self._durations.setdefault(level, deque(maxlen=ROUNDS_REMEMBERED))

    async def run(self, session: AllReduceSession) -> tuple[Certificate | None, SessionResult]:
        """Run one attempt, and recover it if it breaks; raise `UnencodableError` if the codec rejects the vector."""
        attempt, loop = session.attempt, asyncio.get_running_loop()
        durations, started = self._durations_of(attempt.roster.tickets[0].level), loop.time()
        certificate = None
        try:
            result = await session.run()
            certificate = result.certificate
            if result.failure is None:
                durations.append(loop.time() - started)
            else:
                if isinstance(result.failure, LateError):
                    durations.clear()  # All members may be slower now: only the manifest's deadline holds.
                certificate = await self._recover(attempt, result, loop.time() - started)
            self._judge(result, certificate)
        finally:
            self._lingering.start(self._leave(session, committed=certificate is not None), "linger")
        return certificate, result

    async def _leave(self, session: AllReduceSession, *, committed: bool) -> None:
        """Close a session; after a commit, let the others fetch mean and signature first."""
        try:
            await session.close(linger=committed)
        finally:
            self._sessions.pop(session.attempt.roster.group_id, None)

    async def _recover(self, attempt: Attempt, result: SessionResult, seconds: float) -> Certificate | None:
        """Complete a broken attempt from the other members' state, or give it up."""
        logger.info("round %d: attempt failed: %s", attempt.head.round, result.failure)
        if result.is_proven:
            self._blame(result)
        if result.evidence:
            with contextlib.suppress(IntegrityError):  # In a very large group it may exceed the size limit.
                await self.evidence.add(result.evidence)
        certificate = await self._recovery.recover(attempt, seconds, result.silent)
        blamed = {blame.peer for blame in result.blamed}
        for peer in sorted(attempt.fell_silent.keys() - result.silent - blamed):
            self._matchmaker.leaders.lost(peer, attempt.fell_silent[peer])
        if certificate is None:
            if not result.is_proven:  # Blame for late checks counts only if recovery failed, too.
                self._blame(result)
            if not attempt.withholds:
                self._contributions.give_up_on(attempt.head)
            self._matchmaker.group_broke()
            if isinstance(result.failure, UnencodableError):
                raise result.failure
        return certificate

    def _blame(self, result: SessionResult) -> None:
        for blame in result.blamed:
            self._matchmaker.leaders.lost(blame.peer)
            match blame.trouble:
                case Trouble.LATE:
                    self._membership.suspect(blame.peer, blame.reason)
                case Trouble.SLOW:
                    self._membership.suspect(blame.peer, blame.reason)
                    self.rates.was_late(blame.peer)
                case Trouble.FAULT:
                    self._membership.broke_with(blame.peer, blame.reason)  # No leader can cause this.
                case Trouble.BROKE:
                    self._membership.broke_with(blame.peer, blame.reason, self._matchmaker.last_leader)

    def _judge(self, result: SessionResult, certificate: Certificate | None) -> None:
        """Record the members that completed the round, and those whose contributions were refused."""
        for peer, reason in result.refused.items():
            self._membership.broke_with(peer, reason)
        if certificate is not None:
            body = certificate.body
            if self._context.spec.spot_checks:
                self.evidence.ask([peer for peer in body.members if peer != self._context.rpc.peer_id])
            for peer in body.contributing:
                self._membership.finished_with(peer)
                self.rates.was_in_time(peer)

    def _on_conviction(self, peer: str, fault: str) -> None:
        """Exclude a peer that falsified a mean, and fail the running attempts with it."""
        logger.warning("peer %s is kept out from now on: there is evidence against it: %s", peer[-8:], fault)
        self._matchmaker.abandon(peer)
        for session in self._sessions.values():
            session.accuse(peer, fault)

    # --- streams of other members

    async def _serve(self, channel: Channel, request: Request) -> None:
        channel.heartbeat.beat(keepalive_seconds(self._context.spec.grace_seconds))
        session = await self._session_of(request.group)
        source = None
        if session.attempt.roster.tickets[0].level and isinstance(request, Bring):
            try:
                source = await self._context.runtime.offload(
                    self._check_credential, session.attempt, channel.remote, request.credential
                )
            except (IntegrityError, ProtocolError) as error:
                session.refuse(channel.remote, f"stands for nobody: {error}")
                raise ProtocolError(channel.remote, f"stands for nobody: {error}") from error
        await session.incoming.serve(channel, request, source)

    async def _session_of(self, group: bytes) -> AllReduceSession:
        """Return the session of a group; wait up to `ROSTER_WAIT_SECONDS` for one that is new.

        Raises:
            PeerRefusedError: This peer is not in that group, or has left it.
        """
        known = self._round_log.attempts
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROSTER_WAIT_SECONDS):
                while group not in self._sessions and group not in known:
                    await self._roster_arrived.wait()
        if group not in self._sessions:
            reason = GAVE_UP if group in known else "this peer is not in that group"
            raise PeerRefusedError(self._context.rpc.peer_id, reason)
        return self._sessions[group]

    def _check_credential(self, attempt: Attempt, peer: str, raw: bytes) -> Source:
        """Return a delegate's group result; raise `IntegrityError` unless its certificate and ticket agree."""
        roster = attempt.roster
        index = roster.index_of(peer)
        if index < 0 or not raw:
            raise IntegrityError("its result's certificate is missing")
        ticket = roster.tickets[index]
        body = Certificate.from_bytes(raw, self._context.swarm, self._context.signer).body
        if (
            (body.body_hash, body.tokens, body.most_samples, sum(body.peers))
            != (ticket.child, ticket.tokens, ticket.samples, ticket.peers)
            or (body.round, body.lineage, body.level + 1) != (ticket.round, ticket.lineage, ticket.level)
            or peer not in body.members
        ):
            raise IntegrityError("its ticket says otherwise than its result's certificate")
        cells = self._matchmaker.cells
        if len({cells.key_of(ticket, member, body.level) for member in body.members}) != 1:
            raise IntegrityError("its result is not one of a cell")
        return self._round_log.source_of(peer, body)
