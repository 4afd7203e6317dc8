"""Averagers on a simulated network, without a model: they average vectors round after round."""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import torch

from p2ptrain.averaging.averager import Averager, RoundOutcome
from p2ptrain.averaging.commit.attempt import decode_means
from p2ptrain.averaging.commit.round_log import RoundLog
from p2ptrain.averaging.context import PeerContext, Unconcerned
from p2ptrain.averaging.grouping.cells import Key
from p2ptrain.averaging.grouping.leaders import Leaders
from p2ptrain.averaging.grouping.matchmaker import BehindError, Matchmaker
from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.averaging.protocol.certificate import Head, Roster, genesis
from p2ptrain.averaging.timing.goal import NO_GOAL, Goal
from p2ptrain.codecs import Codec, get_codec
from p2ptrain.errors import TemporaryError
from p2ptrain.manifest import AveragingSpec, SecureAggregationSpec
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.simulated import SimulatedNetwork, SimulatedPeer
from p2ptrain.network.transport import Transport
from tests.support.coroutines import at_end
from tests.support.records import record_of
from tests.support.sim.averaging import HEAD, make_ticket
from tests.support.sim.peers import SWARM, Member, members
from tests.support.sim.seed import SimulatedSeed

LAYOUT = b"y" * 32
RECORD_SECONDS = 120.0
"""How long a record counts; the real ones are renewed all the time."""


@dataclass(eq=False, repr=False)
class AveragingPeer:
    """A peer that has a vector to average and nothing else.

    ``outcomes`` has what each round gave here, and ``seconds`` how long it took from the roster to the certificate.
    ``sizes`` says how much of ``vector`` rounds average, in turn; all of it if empty.
    """

    peer: SimulatedPeer
    rpc: Rpc
    membership: Membership
    averager: Averager
    spec: AveragingSpec
    vector: torch.Tensor
    others: list["AveragingPeer"] = field(default_factory=list)
    outcomes: list[RoundOutcome] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    sizes: tuple[int, ...] = ()
    owner: Unconcerned = field(default_factory=Unconcerned)
    founder: SimulatedSeed | None = None

    def follow(self) -> None:
        """Learn where the others in reach are, and go to the best head among them, as if that took no time."""
        for other in self.others:
            if other.peer.is_running and self.peer._network.connected(self.peer, other.peer):
                runtime, head = self.peer.runtime, other.averager.head
                self.membership.update(
                    record_at(other.peer, head), round(1e3 * runtime.now()), runtime.now() + RECORD_SECONDS
                )
                if head.outranks(self.averager.head):
                    self.averager.matchmaker.set_head(head)

    async def round(self, tokens: int = 10) -> RoundOutcome:
        """Average once, and go on to the next head; catch up first when the others are ahead."""
        self.follow()
        try:
            size = self.sizes[self.averager.head.round % len(self.sizes)] if self.sizes else len(self.vector)
            outcome = await self.averager.average(self.vector[:size], tokens, 1)
        except BehindError:
            return await self.round(tokens)
        self.outcomes.append(outcome)
        self.seconds.append(outcome.transfer_seconds)
        certificate = outcome.result.certificate
        before = self.averager.head
        self.averager.matchmaker.set_head(before.after(certificate, b"d" * 32))
        self.averager.round_log.add(outcome.result, before)
        return outcome

    async def try_round(self) -> bool:
        """As `round`; whether it was committed."""
        try:
            await self.round()
        except TemporaryError:
            return False
        return True

    async def round_until_committed(self) -> None:
        """As `round`, again and again until it is committed; `seconds` then tells of all of it but the matchmaking."""
        while not await self.try_round():
            pass

    def mean(self) -> torch.Tensor:
        result, out = self.outcomes[-1].result, torch.zeros_like(self.vector)
        decode_means(self.spec, get_codec(self.spec.codec), result.certificate.body, result.means, out)
        return out


def record_at(peer: SimulatedPeer, head: Head) -> PeerRecord:
    return record_of(
        peer.peer_id, name=peer.name, round=head.round, lineage=head.lineage, digest=head.digest,
        lineage_full=head.full, lineage_returned=head.returned,
    )  # fmt: skip


def make_matchmaker(
    member: Member, swarm: Iterable[Member], spec: AveragingSpec, head: Head, goal: Goal = NO_GOAL
) -> tuple[Matchmaker, Membership]:
    """A matchmaker, and its membership, which knows of all peers of the swarm."""
    membership = Membership(member.rpc.peer_id, member.peer.runtime)
    for other in swarm:
        membership.update(record_at(other.peer, head), 1, 1e12)
    context = PeerContext(member.rpc, member.peer.runtime, member.peer.signer, SWARM, spec, membership)
    return Matchmaker(context, head, goal), membership


@dataclass
class GroupingPeer:
    """A peer's side of matchmaking, without a state and without training."""

    member: Member
    matchmaker: Matchmaker
    membership: Membership

    @property
    def peer(self) -> SimulatedPeer:
        return self.member.peer

    @property
    def id(self) -> str:
        return self.member.rpc.peer_id

    @property
    def rpc(self) -> Rpc:
        return self.member.rpc

    @property
    def leaders(self) -> Leaders:
        return self.matchmaker.leaders

    def is_closing(self) -> bool:
        return self.matchmaker.position.is_closing

    async def participate(self) -> None:
        self.matchmaker.participate(True)

    def line(self) -> list[str]:
        """Return who leads the first round, in this order, for all that this peer knows."""
        return self.leaders.candidates(Key(HEAD.round, HEAD.lineage), [])

    async def find_group(self) -> Roster:
        return await self.matchmaker.find_group(lambda: make_ticket(self.member))


@asynccontextmanager
async def grouping_peers(
    network: SimulatedNetwork, count: int, spec: AveragingSpec, goal: Goal = NO_GOAL
) -> AsyncIterator[list[GroupingPeer]]:
    """Peers that know of each other and take part, in the order in which they lead the first round."""
    async with members(network, count) as swarm:
        peers = [GroupingPeer(member, *make_matchmaker(member, swarm, spec, HEAD, goal)) for member in swarm]
        for peer in peers:
            peer.matchmaker.participate(True)
        line = peers[0].line()
        peers.sort(key=lambda peer: line.index(peer.id))
        try:
            yield peers
        finally:
            for peer in peers:
                if peer.peer.alive:
                    await peer.matchmaker.close()


async def start_averagers(
    network: SimulatedNetwork,
    peers: list[SimulatedPeer],
    spec: AveragingSpec,
    num_values: int,
    transport_of: Callable[[SimulatedPeer], Transport] = lambda peer: peer.transport,
    parts: Sequence[tuple[Codec, int]] = (),
    secure: SecureAggregationSpec | None = None,
) -> list[AveragingPeer]:
    """One averager on each of ``peers``, over its transport or what stands before it; all know of each other.

    ``parts`` are codec and size of the parts of the vector that rounds average in turn; all of it if empty.
    """
    founder, started = SimulatedSeed(network), []
    await founder.serve(SWARM, spec)
    head = genesis(SWARM, b"d" * 32, founder.founding)
    for index, peer in enumerate(peers):
        rpc = Rpc(transport_of(peer), peer.runtime, SWARM)
        membership = Membership(peer.peer_id, peer.runtime)
        owner = Unconcerned()
        context = PeerContext(
            rpc, peer.runtime, peer.signer, SWARM, spec, membership, owner, founder.founding, secure_aggregation=secure
        )
        round_log = RoundLog(context, parts or [(get_codec(spec.codec), num_values)])
        averager = Averager(context, head, round_log, LAYOUT)
        averager.matchmaker.participate(True)
        await rpc.start()
        vector = torch.randn(num_values, generator=torch.Generator().manual_seed(index))
        sizes = tuple(size for _, size in parts)
        started.append(
            AveragingPeer(peer, rpc, membership, averager, spec, vector, sizes=sizes, owner=owner, founder=founder)
        )
    for each in started:
        each.others = [other for other in started if other is not each]
    at_end(lambda: stop_averagers(started))
    return started


async def stop_averagers(started: list[AveragingPeer]) -> None:
    for each in started:
        if each.peer.alive:
            await each.averager.close()
            await each.rpc.close()
            await each.peer.close()
        if each.founder is not None:
            await each.founder.close()
