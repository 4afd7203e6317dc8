"""Members of one roster on a simulated network, below matchmaking."""

import asyncio
import random
from dataclasses import dataclass, field

import torch

from p2ptrain.averaging.allreduce.member import ALLREDUCE
from p2ptrain.averaging.allreduce.messages import Request
from p2ptrain.averaging.allreduce.session import AllReduceSession, Observer, SessionResult
from p2ptrain.averaging.commit.attempt import Attempt, Contribution
from p2ptrain.averaging.commit.recovery import AttemptRecovery
from p2ptrain.averaging.commit.round_log import RoundLog
from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.averaging.protocol.certificate import Certificate, Head, Roster, Ticket, genesis
from p2ptrain.averaging.timing.deadlines import keepalive_seconds
from p2ptrain.codecs import Codec, get_codec
from p2ptrain.manifest import AveragingSpec, SecureAggregationSpec
from p2ptrain.network.rpc.channel import Channel
from tests.support.sim.peers import SWARM, Member

SPEC = AveragingSpec(grace_seconds=1.0, round_seconds=10.0)
HEAD = genesis(SWARM, b"d" * 32)
NUM_VALUES = 60
UNSEEN = Observer(lambda phase: None, lambda *transfer: None, lambda evidence: None)


@dataclass
class RosterMember:
    """One member's side of one attempt; what `run` came to, and when, on the loop's clock."""

    member: Member
    attempt: Attempt
    session: AllReduceSession
    history: RoundLog
    recovery: AttemptRecovery
    result: SessionResult = field(init=False)
    ended_at: float = field(init=False)

    async def run(self) -> Certificate:
        """Take part; raise why the attempt failed, if it did."""
        self.result = await self.session.run()
        self.ended_at = asyncio.get_running_loop().time()
        if self.result.failure is not None:
            raise self.result.failure
        assert self.result.certificate is not None
        return self.result.certificate

    @property
    def refused(self) -> dict[str, str]:
        return {other.peer: other.refusal for other in self.session.others if other.refusal}

    @property
    def refused_by(self) -> dict[int, str]:
        return {owner.index: owner.refused_us for owner in self.session.owners if owner.refused_us}


def make_ticket(
    member: Member,
    tokens: int = 10,
    head: Head = HEAD,
    nonce: bytes = b"",
    *,
    reachable: bool = True,
    is_stalled: bool = False,
) -> Ticket:
    nonce = nonce or random.Random(member.rpc.peer_id).randbytes(16)
    peer = member.rpc.peer_id
    ticket = Ticket(
        peer, head.round, head.lineage, head.digest, b"y" * 32, tokens, 1, 0, reachable, b"", nonce, stalled=is_stalled
    )
    return ticket.signed(SWARM, member.peer.signer)


def make_roster(
    swarm: list[Member],
    vectors: list[torch.Tensor],
    tokens: list[int],
    codec_or_name: str | Codec = "fp32",
    bounds: tuple[int, ...] = (),
    spec: AveragingSpec = SPEC,
) -> list[RosterMember]:
    """Everybody's side of one attempt, in roster order, with equal shares unless ``bounds`` says otherwise."""
    codec = get_codec(codec_or_name) if isinstance(codec_or_name, str) else codec_or_name
    order = sorted(range(len(swarm)), key=lambda i: swarm[i].rpc.peer_id)
    roster = Roster(tuple(make_ticket(swarm[i], tokens[i]) for i in order))
    bounds = bounds or tuple(round(NUM_VALUES * i / len(swarm)) for i in range(len(swarm) + 1))
    result = []
    for i in order:
        member, attempt = swarm[i], Attempt(roster, HEAD, bounds, codec, SWARM, spec)
        context = make_context(member, spec)
        history = RoundLog(context, [(codec, bounds[-1])], 1 << 20)
        result.append(begin(member, context, attempt, Contribution(vectors[i], codec), history))
    return result


def make_context(member: Member, spec: AveragingSpec, secure: SecureAggregationSpec | None = None) -> PeerContext:
    rpc, runtime, signer = member.rpc, member.peer.runtime, member.peer.signer
    membership = Membership(rpc.peer_id, runtime)
    return PeerContext(rpc, runtime, signer, SWARM, spec, membership, secure_aggregation=secure)


def begin(
    member: Member, context: PeerContext, attempt: Attempt, contribution: Contribution, history: RoundLog
) -> RosterMember:
    """A member's side of an attempt, which serves the others from now on."""
    session = AllReduceSession(context, attempt, contribution, UNSEEN, set())
    history.remember(attempt)

    async def serve(channel: Channel, request: Request) -> None:
        channel.heartbeat.beat(keepalive_seconds(context.spec.grace_seconds))
        await session.incoming.serve(channel, request)

    member.rpc.serve_channel(ALLREDUCE, Request, serve)
    return RosterMember(member, attempt, session, history, AttemptRecovery(context, history))


async def run_all(roster: list[RosterMember]) -> list[Certificate | BaseException]:
    """Return what each member comes to when all take part; they linger for each other."""
    results = await asyncio.gather(*(each.run() for each in roster), return_exceptions=True)
    await stop(roster, linger=True)
    return results


def decoded(member: RosterMember) -> torch.Tensor:
    attempt = member.attempt
    bounds, out = attempt.bounds, torch.zeros(attempt.bounds[-1])
    for index, mean in enumerate(attempt.means):
        assert mean is not None
        if mean:
            attempt.mean_codec_of(index).decode_into(mean, out[bounds[index] : bounds[index + 1]])
    return out


async def stop(roster: list[RosterMember], linger: bool = False) -> None:
    for each in roster:
        await each.session.close(linger=linger)
