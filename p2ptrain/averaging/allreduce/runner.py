"""One peer's attempts at averaging in one group: prepare, run, settle what broke, remember who was at fault."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from p2ptrain.averaging.allreduce.bandwidth import Speeds, part_codec, plan_shares
from p2ptrain.averaging.allreduce.incoming import QUESTIONS
from p2ptrain.averaging.allreduce.session import Butterfly
from p2ptrain.averaging.allreduce.sessions import Groups
from p2ptrain.averaging.commit.attempt import Attempt, AttemptFailedError, LateError, UnencodableError
from p2ptrain.averaging.commit.contribution_log import OwnWork
from p2ptrain.averaging.commit.encodings import part_codecs
from p2ptrain.averaging.commit.provenance import Origin, Source
from p2ptrain.averaging.commit.recovery import Settlements
from p2ptrain.averaging.commit.round_log import History
from p2ptrain.averaging.grouping.matchmaker import Matchmaker
from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.averaging.protocol.certificate import Certificate, Roster
from p2ptrain.averaging.protocol.head import Head
from p2ptrain.averaging.timing.deadlines import attempt_seconds, beat_seconds
from p2ptrain.averaging.verification.commitments import Slice
from p2ptrain.averaging.verification.evidence import EvidenceStore
from p2ptrain.averaging.verification.opening import Rules
from p2ptrain.codecs import codec_at
from p2ptrain.errors import IntegrityError, ProtocolError
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.client import Rpc
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

ROUNDS_REMEMBERED = 16
MAX_REQUEST_BYTES = 1 << 20
"""A delegate's request holds the certificate of the result that it brings."""


class Attempts:
    """Runs this peer's attempts, and answers the other members of their groups.

    Attributes:
        on_phase: Called with each new phase of an attempt.
        is_reachable: Whether others can open streams to this peer; otherwise it owns no share.
        speeds: How fast others send.
        evidence: Against owners that falsified a mean.
        sizes: By part of the model: its number of values; round r averages part r mod P.
    """

    def __init__(
        self,
        rpc: Rpc,
        runtime: Runtime,
        signer: Signer,
        swarm: bytes,
        spec: AveragingSpec,
        membership: Membership,
        matchmaker: Matchmaker,
        history: History,
        own_work: OwnWork,
        num_values: int,
    ) -> None:
        """See `p2ptrain.averaging.averager.Averager`, whose arguments these are."""
        self._rpc = rpc
        self._runtime = runtime
        self._signer = signer
        self._swarm = swarm
        self._spec = spec
        self._membership = membership
        self._matchmaker = matchmaker
        self._history = history
        self._own_work = own_work
        self.sizes: Sequence[int] = (num_values,)
        self.on_phase: Callable[[str], None] = lambda phase: None
        self.speeds = Speeds()
        self.evidence = EvidenceStore(rpc, runtime, signer, swarm, self._rules_of, membership, self._on_conviction)
        if spec.spot_checks:  # Without checks nobody signs what could convict it.
            self.evidence.serve()
            matchmaker.on_misled(self.evidence.show)
        self._slow_to_clear: set[str] = set()
        self._durations: dict[int, deque[float]] = {}
        self._settlements = Settlements(rpc, signer, history)
        self._groups = Groups(rpc.peer_id)
        rpc.serve_channel("butterfly", dict, self._serve_butterfly, max_request_bytes=MAX_REQUEST_BYTES)

    async def close(self) -> None:
        """End everything that was started here."""
        await self.evidence.close()
        await self._groups.close()

    def prepare(self, roster: Roster, head: Head, vector: torch.Tensor, origin: Origin | None) -> Butterfly:
        """Get ready for an attempt; the others may open their streams from now on.

        Args:
            roster: Who takes part.
            head: Whose round it is.
            vector: This peer's contribution, fp32, as long as all of its round; must not change until this is over.
            origin: Above level 0: what it comes from.
        """
        tickets, spec, level = roster.tickets, self._spec, roster.tickets[0].level
        codec, num_values = codec_at(self._history.codec_of(head.round), level), vector.numel()
        rates, weights, bounds = plan_shares(tickets, num_values, codec.block_size)
        usual, *smaller = part_codecs(spec, codec, num_values)
        part = part_codec(
            usual, smaller, rates, weights, roster.index_of(self._rpc.peer_id), num_values, spec.grace_seconds
        )
        levels = self._matchmaker.cells.num_levels(head.present)
        credential = origin.credential if origin else b""
        attempt = Attempt(roster, head, bounds, codec, self._swarm, spec, levels, credential)
        butterfly = Butterfly(
            attempt, vector, self._rpc, self._runtime, self._signer, spec, self.on_phase,
            attempt_seconds(self._durations_of(level), spec), part,
            lambda peer, num_bytes, seconds: self.speeds.observe(peer, num_bytes, seconds, len(tickets) - 1),
            origin,
        )  # fmt: skip
        butterfly.exchange.slow_to_clear = self._slow_to_clear
        butterfly.exchange.on_evidence = self.evidence.add_soon
        self._settlements.remember(attempt)
        self._groups.add(butterfly)
        return butterfly

    def _rules_of(self, share: Slice) -> Rules:
        """The arithmetic of the attempt that a share is of."""
        codec = codec_at(self._history.codec_of(share.round), share.level)
        return Rules(self._swarm, self._spec, codec, self.sizes[share.round % len(self.sizes)])

    def _durations_of(self, level: int) -> deque[float]:
        return self._durations.setdefault(level, deque(maxlen=ROUNDS_REMEMBERED))

    async def run(
        self, butterfly: Butterfly, failure: AttemptFailedError
    ) -> tuple[Certificate | None, AttemptFailedError]:
        """Run one attempt to a certificate, settling it when it breaks; (None, why) when it is given up."""
        attempt = butterfly.attempt
        durations = self._durations_of(attempt.roster.tickets[0].level)
        certificate = None
        started = asyncio.get_running_loop().time()
        try:
            try:
                certificate = await butterfly.run()
                durations.append(asyncio.get_running_loop().time() - started)
            except AttemptFailedError as error:
                failure = error
                if isinstance(error, LateError):
                    durations.clear()  # Perhaps all have become slower: no deadline but the manifest's holds.
                logger.info("round %d: attempt failed: %s", attempt.head.round, error)
                unproven = isinstance(error, LateError) and bool(butterfly.exchange.faults)
                if not unproven:
                    self._blame(error, butterfly)
                butterfly.give_up(error.suspects)
                await butterfly.stop_sending()
                if butterfly.exchange.evidence:
                    with contextlib.suppress(IntegrityError):  # Too large to be shown to others, in a very large group.
                        await self.evidence.add(butterfly.exchange.evidence)
                elapsed = asyncio.get_running_loop().time() - started
                silent = butterfly.exchange.silent | butterfly.exchange.opening
                certificate = await self._settlements.settle(attempt, elapsed, silent)
                for peer in sorted(attempt.fell_silent.keys() - silent - set(error.suspects)):
                    self._matchmaker.lost(peer)
                    self._membership.suspect(peer, attempt.fell_silent[peer])
                if certificate is None:
                    if unproven:  # Or was it only that this peer asked when the others had gone on?
                        self._blame(error, butterfly)
                    if not attempt.withholds:
                        self._own_work.give_up_on(attempt.head)
                    self._matchmaker.group_broke()
                    if isinstance(error, UnencodableError):
                        raise
            self._judge(butterfly, certificate)
        finally:
            await self._groups.leave(butterfly, certificate is not None)
        return certificate, failure

    def _blame(self, error: AttemptFailedError, butterfly: Butterfly) -> None:
        exchange = butterfly.exchange
        for peer in sorted(exchange.silent.difference(error.suspects)):
            self._matchmaker.lost(peer)
            self._membership.suspect(peer, exchange.lost[peer])
        for peer in error.suspects:
            self._matchmaker.lost(peer)
            if butterfly.attempt.roster.index_of(peer) in exchange.faults:
                self._membership.broke_with(peer, str(error))  # Whoever put the group together.
            elif isinstance(error, LateError):
                self._membership.suspect(peer, str(error))
                if error.as_owners:  # How slowly it sends was measured.
                    self.speeds.was_late(peer)
            elif peer in exchange.cut_short:
                self._membership.suspect(peer, str(error))
            else:
                self._membership.broke_with(peer, str(error), self._matchmaker.last_leader)

    def _judge(self, butterfly: Butterfly, certificate: Certificate | None) -> None:
        """Remember with whom a round came to its end, and who sent what had to be refused."""
        for peer, reason in (butterfly.exchange.refused | butterfly.exchange.contradicts).items():
            self._membership.broke_with(peer, reason)
        if certificate is not None:
            body = certificate.body
            if self._spec.spot_checks:
                self.evidence.ask([peer for peer in body.members if peer != self._rpc.peer_id])
            for index, *_ in body.contributors:
                self._membership.finished_with(body.members[index])
                self.speeds.was_in_time(body.members[index])

    def _on_conviction(self, peer: str, fault: str) -> None:
        """Go on without a peer that was proved to have falsified a mean."""
        logger.warning("peer %s is kept out from now on: there is evidence against it: %s", peer[-8:], fault)
        self._matchmaker.abandon(peer)
        for butterfly in self._groups:
            butterfly.accuse(peer, fault)

    async def _serve_butterfly(self, channel: Channel, request: dict[str, Any]) -> None:
        channel.beat(beat_seconds(self._spec.grace_seconds))
        butterfly = await self._groups.find(request.get("group"), self._settlements.knows)
        source = None
        if butterfly.attempt.roster.tickets[0].level and QUESTIONS.isdisjoint(request):
            try:
                source = await self._runtime.offload(
                    self._check_credential, butterfly.attempt, channel.remote, request.get("credential")
                )
            except (IntegrityError, ProtocolError) as error:
                if butterfly.attempt.roster.index_of(channel.remote) >= 0:
                    butterfly.exchange.refuse(channel.remote, f"peer {channel.remote[-8:]} stands for nobody: {error}")
                raise ProtocolError(channel.remote, f"stands for nobody: {error}") from error
        await butterfly.serve(channel, request, source)

    def _check_credential(self, attempt: Attempt, peer: str, raw: object) -> Source:
        """The result that a delegate's ticket speaks of, which it holds and may bring here.

        Raises:
            IntegrityError, ProtocolError: It does not, or may not.
        """
        roster = attempt.roster
        index = roster.index_of(peer)
        if index < 0 or type(raw) is not bytes:
            raise IntegrityError("its result's certificate is missing")
        ticket = roster.tickets[index]
        body = Certificate.from_bytes(raw, self._swarm, self._signer).body
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
        return self._history.source_of(peer, body, attempt.bounds[-1])
