"""An auxiliary: a peer without a model that lends its bandwidth to the averaging of others.

It offers itself to the leader of the round in progress, is put on the roster if it is there when the group forms, and
owns a share: it receives the members' parts of it, reduces them, and sends everybody the mean. It contributes nothing,
signs nothing, and nobody waits for it; all that it opens itself is the stream to the leader.

::

    members → auxiliary   the part of its share, as to any owner
    auxiliary → members   that the part is there; whose parts are
    members → auxiliary   who contributes, by the masks of all owners; what most say is so, because most sign the result
    auxiliary → members   the mean, and what checks ask for
    members → auxiliary   the certificate

It follows the swarm lightly: certificates lead it from head to head, without any state. Where they do not, it believes
the trainer that announces the best head for as long as something comes of it.

**What encoding its means loses** it keeps by position, and adds to the next mean that it makes there. As each mean
there takes up all that was kept, this is never more than what one encoding loses, half a step of the codec; so much is
lost for good when an auxiliary leaves, or comes to a lineage to which no certificates lead. Nothing is kept in trees,
where a group's result may yet miss the round's, and where members check means
(`p2ptrain.averaging.verification.audit`), since those have to follow from the parts alone. There what is lost is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from p2ptrain.averaging.allreduce.bandwidth import plan_shares
from p2ptrain.averaging.allreduce.session import Butterfly
from p2ptrain.averaging.allreduce.sessions import Groups
from p2ptrain.averaging.commit.attempt import Attempt, AttemptFailedError
from p2ptrain.averaging.commit.round_log import History
from p2ptrain.averaging.grouping.cells import Cells
from p2ptrain.averaging.grouping.coordinator import CALL_HEAD, LEND, MAX_HOPS
from p2ptrain.averaging.grouping.membership import ACTIVE_STATES, Membership, rank
from p2ptrain.averaging.grouping.pending_group import Answer, agrees_with_itself, roster_from_wire
from p2ptrain.averaging.grouping.round_position import probe_seconds
from p2ptrain.averaging.lending.ticket import AuxiliaryTicket
from p2ptrain.averaging.protocol.certificate import Certificate, Roster
from p2ptrain.averaging.protocol.head import DIGEST_BYTES, Head
from p2ptrain.averaging.timing.deadlines import beat_seconds, leader_allowance_seconds
from p2ptrain.averaging.timing.keepalive import answer_after_beats
from p2ptrain.codecs import Codec
from p2ptrain.errors import DeadlineError, IntegrityError, PeerError, PeerRefusedError, ProtocolError, TemporaryError
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.client import Rpc
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer
from p2ptrain.tasks import Tasks

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_SECONDS = 8.0
OFFER_SECONDS = 300.0
"""How long an offer may wait for a group; then whoever announced that head is not believed for a while."""
WATCH_SECONDS = 1.0
PAUSE_SECONDS = 0.25
IDLE_SECONDS = 2.0
MAX_ROSTER_BYTES = 1 << 20


@dataclass(frozen=True)
class Plan:
    """What an auxiliary has to know of the model.

    Attributes:
        layout: The fingerprint that members' tickets carry, 32 bytes.
        codecs: By part of the model: how it travels; round r averages part r mod P.
        sizes: By part: its number of values.
    """

    layout: bytes
    codecs: Sequence[Codec]
    sizes: Sequence[int]


Learn = Callable[[str], Awaitable[Plan]]
"""Asks a trainer for the plan; raises `PeerError`, `DeadlineError` or `IntegrityError`."""


class Lender:
    """One auxiliary at work. Use once: `run` until `stop`, then `close`.

    Attributes:
        head: Where the swarm is; None before anybody told.
        rounds_helped: Certified rounds in which it owned a share.
        rounds_broken: Groups of its that came to nothing.
        is_reachable: Whether others can open streams to it; otherwise it offers nothing.
        on_change: Called when one of these has changed.
        on_helped: Called after each round that it helped with.
        on_phase: Called with each phase of an attempt: scatter, reduce, gather.
    """

    def __init__(
        self,
        rpc: Rpc,
        runtime: Runtime,
        signer: Signer,
        swarm: bytes,
        spec: AveragingSpec,
        membership: Membership,
        learn: Learn,
        bandwidth: int = 0,
    ) -> None:
        """
        Args:
            rpc: To reach other peers.
            runtime: Time, chance, arithmetic.
            signer: This peer's key.
            swarm: The manifest's digest, 32 bytes.
            spec: What the swarm agreed on.
            membership: Who is there.
            learn: How to ask a trainer about the model.
            bandwidth: What this peer is willing to send in bytes per second; 0 for no limit.
        """
        from p2ptrain.codecs import get_codec

        self._rpc = rpc
        self._runtime = runtime
        self._signer = signer
        self._swarm = swarm
        self._spec = spec
        self._membership = membership
        self._learn = learn
        self._bandwidth = bandwidth
        self._cells = Cells(spec.group_size)
        self._history = History(rpc, runtime, signer, swarm, get_codec(spec.codec), spec, 0)
        self._plan: Plan | None = None
        self._told_by = ""
        self._losses: dict[int, torch.Tensor] = {}
        self._losses_of = b""
        self._source = ""
        self._groups = Groups(rpc.peer_id)
        self._stopping = asyncio.Event()
        self.new_butterfly: Callable[..., Butterfly] = Butterfly
        self.head: Head | None = None
        self.rounds_helped = 0
        self.rounds_broken = 0
        self.is_reachable: Callable[[], bool] = lambda: True
        self.on_change: Callable[[], None] = lambda: None
        self.on_helped: Callable[[], None] = lambda: None
        self.on_phase: Callable[[str], None] = lambda phase: None
        rpc.serve_channel("butterfly", self._serve_butterfly)

    def stop(self) -> None:
        """Let `run` return once the round in progress is over, or at once if there is none."""
        self._stopping.set()

    async def close(self) -> None:
        """End what lingers."""
        await self._groups.close()

    async def run(self) -> None:
        """Help with one round after the other until `stop`; whatever others do, this goes on."""
        while not self._stopping.is_set():
            pause = PAUSE_SECONDS
            try:
                pause = await self._help_once()
            except (TemporaryError, IntegrityError) as error:
                logger.info("no round was helped: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()

    async def _help_once(self) -> float:
        """Follow the swarm, offer, and own a share if the offer is taken; returns how long to pause afterwards."""
        if (source := self._best_source()) is not None:
            await self._follow(source)
        if self.head is None or not self.is_reachable():
            return IDLE_SECONDS
        if self._plan is None:
            self._plan = await self._ask_for_plan()
        head, plan = self.head, self._plan
        ticket = AuxiliaryTicket(
            self._rpc.peer_id, head.round, head.lineage, head.present, plan.layout, self._bandwidth,
            self._runtime.random.randbytes(16),
        ).signed(self._swarm, self._signer)  # fmt: skip
        answer = await self._offer(ticket, head)
        if answer is None:
            return PAUSE_SECONDS
        if answer["kind"] == "behind":
            if isinstance(answer.get("peer"), str) and answer["peer"] != self._rpc.peer_id:
                await self._follow(answer["peer"])
            return 0.0 if self.head is not head else PAUSE_SECONDS
        if answer["kind"] != "roster":
            logger.debug("round %d: not needed: %s", head.round, str(answer.get("reason", ""))[:200])
            if answer.get("mismatch") is True:  # Who told of the model, or this leader, does not say how it is.
                self._plan = None
                self._membership.mistrust(self._told_by)
            return PAUSE_SECONDS
        await self._take_part(self._checked_roster(answer, ticket), head, plan)
        return 0.0

    # --- following the swarm --------------------------------------------------------------------------------------

    def _trainers(self) -> list[str]:
        return [peer for peer in self._membership.alive_trainers() if not self._membership.is_mistrusted(peer)]

    def _best_source(self) -> str | None:
        """The trainer that announces the best head, if that is better than this peer's."""
        best, source, trusted = self.head, None, set(self._trainers())
        for record in self._membership.records():
            announced = Head(record.round, record.lineage, record.lineage_tokens, 0, record.digest)
            if record.peer not in trusted or record.state not in ACTIVE_STATES:
                continue
            if best is None or (announced.lineage != best.lineage and announced.outranks(best)):
                best, source = announced, record.peer
        return source

    async def _follow(self, source: str) -> None:
        """Go to a trainer's head; what was lost before goes along only if certificates lead there."""
        try:
            reply = await self._rpc.call(source, CALL_HEAD, {}, probe_seconds(self._spec))
            head = Head.from_dict(reply.get("head"))
            if self.head is not None and (head.lineage == self.head.lineage or not head.outranks(self.head)):
                return
            known = self._losses_of
            chain = await self._history.certificates_after(source, known, proofs=True) if known else []
        except (PeerError, DeadlineError, IntegrityError) as error:
            if not isinstance(error, PeerRefusedError):
                self._membership.suspect(source, str(error))
            self._membership.mistrust(source)
            raise
        ways = {self._losses_of, *(certificate.body.next_lineage for certificate in chain)}
        if head.lineage not in ways:
            self._losses.clear()
        self._move(head, source)

    def _move(self, head: Head, source: str = "") -> None:
        self.head, self._source = head, source or self._source
        self._losses_of = head.lineage
        self.on_change()

    async def _ask_for_plan(self) -> Plan:
        trainers = self._trainers()
        first = [self._source] if self._source in trainers else []
        for peer in dict.fromkeys([*first, *self._runtime.random.sample(trainers, len(trainers))]):
            try:
                plan = await self._learn(peer)
                self._told_by = peer
                return plan
            except (PeerError, DeadlineError, IntegrityError) as error:
                logger.info("peer %s does not tell of the model: %s", peer[-8:], error)
        raise AttemptFailedError("no trainer tells what the model looks like")

    # --- offering -------------------------------------------------------------------------------------------------

    async def _offer(self, ticket: AuxiliaryTicket, head: Head) -> Answer | None:
        """What comes of an offer to the leader of the round in progress; None if no leader was found."""
        key = self._cells.key_of(head, self._rpc.peer_id)
        there = [peer for peer in self._trainers() if self._cells.includes(key, peer)]
        candidates = sorted(there, key=lambda peer: rank(peer, key))
        tried, target = list[str](), ""
        for _ in range(1 + MAX_HOPS):
            leader = target or next((peer for peer in candidates if peer not in tried), "")
            if not leader:
                return None
            answer = await self._hand_in(leader, ticket, head, tried)
            wanted = answer.get("peer") if answer is not None and answer["kind"] == "redirect" else None
            if answer is not None and answer["kind"] != "redirect":
                return answer
            tried.append(leader)
            target = wanted if isinstance(wanted, str) and wanted not in (*tried, self._rpc.peer_id) else ""
        return None

    async def _hand_in(self, leader: str, ticket: AuxiliaryTicket, head: Head, tried: list[str]) -> Answer | None:
        """One leader's answer; None when it failed and the next should be asked."""
        request = {"ticket": ticket.to_wire(), "head": head.without_proof().to_dict(), "tried": tried}
        began = asyncio.get_running_loop().time()
        try:
            async with self._rpc.open(leader, LEND, request, OPEN_TIMEOUT_SECONDS) as channel:
                answer = await self._wait_for_answer(channel, asyncio.get_running_loop().time() - began)
            if answer.get("kind") not in ("roster", "redirect", "behind", "refused"):
                raise ProtocolError(leader, "answered an offer with nonsense")
            return answer
        except PeerRefusedError as error:
            return {"kind": "refused", "reason": error.reason}  # Perhaps for a while: what broke with this peer.
        except (PeerError, DeadlineError) as error:
            self._membership.suspect(leader, str(error))
            logger.info("leader %s of round %d failed: %s", leader[-8:], ticket.round, error)
        return None

    async def _wait_for_answer(self, channel: Channel, round_trip_seconds: float) -> Answer:
        loop, grace = asyncio.get_running_loop(), self._spec.grace_seconds
        until, patience = loop.time() + OFFER_SECONDS, leader_allowance_seconds(grace)
        answer = answer_after_beats(channel, 2 * OFFER_SECONDS, grace, patience, round_trip_seconds, MAX_ROSTER_BYTES)
        async with Tasks() as tasks:
            receiving = tasks.call(answer, "offer")
            stopping = tasks.call(self._stopping.wait(), "stop")
            waiting: set[asyncio.Future[Any]] = {receiving, stopping}
            while True:
                await asyncio.wait(waiting, timeout=WATCH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if receiving.done():
                    return receiving.result()
                if stopping.done():
                    return {"kind": "refused", "reason": "stopping"}
                if (source := self._best_source()) is not None:
                    return {"kind": "behind", "peer": source}
                if loop.time() >= until:
                    self._membership.mistrust(self._source)
                    self.head = None
                    return {"kind": "refused", "reason": "no group for long"}

    def _checked_roster(self, answer: Answer, ticket: AuxiliaryTicket) -> Roster:
        """The roster that a leader sent.

        Raises:
            IntegrityError: It is not one of members of the round that was offered for.
        """
        roster = roster_from_wire(answer, ticket, self._spec, self._swarm, self._signer)
        if ticket not in roster.auxiliaries or not agrees_with_itself(roster, self._cells):
            raise IntegrityError("the leader sent a roster that does not agree with itself")
        return roster

    # --- owning a share -------------------------------------------------------------------------------------------

    async def _take_part(self, roster: Roster, head: Head, plan: Plan) -> None:
        """Own a share of one group, if there is one for this peer."""
        part = roster.tickets[0].round % len(plan.sizes)
        codec, num_values = plan.codecs[part], plan.sizes[part]
        _, _, bounds = plan_shares(roster, num_values, codec.block_size)
        levels, index = self._cells.num_levels(head.present), roster.index_of(self._rpc.peer_id)
        if bounds[index] == bounds[index + 1]:
            return
        attempt = Attempt(roster, head, bounds, codec, self._swarm, self._spec, levels)
        losses = self._losses_at(part, codec, num_values) if levels == 1 else None
        butterfly = self.new_butterfly(
            attempt, _zeros(num_values) if losses is None else losses, self._rpc, self._runtime, self._signer,
            self._spec, self.on_phase,
        )  # fmt: skip
        self._groups.add(butterfly)
        self.on_phase("scatter")
        certificate: Certificate | None = None
        try:
            certificate = await butterfly.lend()
        except AttemptFailedError as error:
            logger.info("round %d: nothing came of the group: %s", head.round, error)
        finally:
            await self._groups.leave(butterfly, certificate is not None)
        if certificate is None or certificate.body.hashes[index] != attempt.hashes[index]:
            self.rounds_broken += 1
            self.on_change()
            return
        if losses is not None:
            await self._runtime.compute(_keep_loss, butterfly, losses)
        self.rounds_helped += 1
        logger.debug("round %d: helped %d trainers", head.round, len(roster.tickets))
        if certificate.body.is_last:
            self._move(certificate.body.next_head(bytes(DIGEST_BYTES), b""))
        self.on_change()
        self.on_helped()

    def _losses_at(self, part: int, codec: Codec, num_values: int) -> torch.Tensor | None:
        """What the means of a part of the model lost here, fp32, ``[num_values]``; None if nothing is kept."""
        import torch

        if not codec.lossy or self._spec.spot_checks:
            return None
        if part not in self._losses:
            self._losses[part] = torch.zeros(num_values, dtype=torch.float32)
        return self._losses[part]

    async def _serve_butterfly(self, channel: Channel, request: dict[str, Any]) -> None:
        channel.beat(beat_seconds(self._spec.grace_seconds))
        butterfly = await self._groups.find(request.get("group"))
        await butterfly.serve(channel, request)


def _zeros(num_values: int) -> torch.Tensor:
    """As many zeros in the memory of one."""
    import torch

    return torch.zeros(1, dtype=torch.float32).expand(num_values)


def _keep_loss(butterfly: Butterfly, losses: torch.Tensor) -> None:
    """Keep what the own share's mean lost in a round that was certified, in place of what was kept before."""
    attempt, index = butterfly.attempt, butterfly.exchange.index
    mean = attempt.means[index]
    assert mean is not None
    low, high = attempt.bounds[index : index + 2]
    codec = attempt.codec.part(low, high)
    for first, last, exact in butterfly.own_mean_exact or ():  # Each piece is computed from its own losses alone.
        encoded = memoryview(mean)[codec.encoded_bytes(first) : codec.encoded_bytes(last)]
        codec.part(first, last).accumulate_into(encoded, -1.0, exact)
        losses[low + first : low + last].copy_(exact)
