"""A peer that freezes costs the others one grace period and a fifth of a round, once, in whichever phase it freezes.

Frozen means stopped (SIGSTOP): its connections stand, and nothing more comes. Covers fault 52. The round in which it
freezes is measured in virtual time, and the two after it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from p2ptrain.averaging.commit.recovery import AttemptRecovery
from p2ptrain.averaging.grouping.membership import rank
from p2ptrain.averaging.timing.deadlines import keepalive_seconds, leader_allowance_seconds
from p2ptrain.errors import TemporaryError
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork, simulate
from tests.support.sim.averagers import AveragingPeer, start_averagers, stop_averagers

PHASES = ("matchmaking", "scatter", "reduce", "gather", "commit")
SLACK = 0.2
"""Of a normal round."""
ROUNDS_BEFORE = 3
ROUNDS_AFTER = 2
VOTE_SECONDS = 0.1  # the founder's vote, when it is needed
COMPUTE_SECONDS = 2.0


@dataclass(frozen=True)
class Swarm:
    """The peers of one measurement; ``rate`` is of each peer's links, in bytes per second."""

    peers: int
    values: int = 2_000_000
    rate: float = 12.5e6
    latency_seconds: tuple[float, float] = (0.005, 0.08)
    spec: AveragingSpec = field(default_factory=lambda: AveragingSpec(codec="int8"))
    seed: int = 1


@dataclass
class Cost:
    """The cost of frozen peers, in virtual seconds.

    Attributes:
        normal: The last round before.
        frozen_at: When the first peer froze, after the beginning of its round.
        rounds: The round in which peers froze and those after it, until the last of the others had its result.
        lineages: In how many lineages the others ended.
        members: Of the group that ended the first of these rounds.
        slowest: What the others gave as failures, if any round needed another call.
    """

    normal: float = 0.0
    frozen_at: float = 0.0
    rounds: list[float] = field(default_factory=list)
    lineages: int = 0
    members: int = 0
    slowest: list[str] = field(default_factory=list)
    leader_seconds: float = 0.0
    """For which the next round's leader is waited for, before the one after it misses another peer."""

    @property
    def delay_seconds(self) -> float:
        """Seconds by which all these rounds together took longer than normal ones."""
        return sum(max(0.0, seconds - self.normal) for seconds in self.rounds)


Arm = Callable[[AveragingPeer, Callable[[], None]], None]
"""Given a peer, and what freezes it: has that called at the right moment."""


def in_phase(phase: str) -> Arm:
    def arm(each: AveragingPeer, freeze: Callable[[], None]) -> None:
        each.averager.phase_listeners = [lambda entered, round_: freeze() if entered == phase else None]

    return arm


def measure(swarm: Swarm, arm: Arm, role: str = "follower", frozen: int = 1) -> Cost:
    """Run rounds until all is usual, freeze peers in the next one, and go on without them.

    With ``leader`` those freeze that lead the round, or would next; with ``follower`` those that would last.
    """
    cost = Cost()

    async def main(network: SimulatedNetwork) -> None:
        peers = [
            network.add_peer(f"p{i}", up_bytes_per_second=swarm.rate, down_bytes_per_second=swarm.rate)
            for i in range(swarm.peers)
        ]
        started = await start_averagers(network, peers, swarm.spec, swarm.values)
        for _ in range(ROUNDS_BEFORE):
            cost.normal = await _round(network, started, cost)
        key = started[0].averager.matchmaker.position.key
        order = sorted(started, key=lambda each: rank(each.peer.peer_id, key))
        victims = order[:frozen] if role == "leader" else order[-frozen:]
        survivors = [each for each in started if each not in victims]
        began, hit = network.loop.time(), list[float]()
        for each in victims:
            arm(each, lambda each=each: _freeze(network, each, hit))  # type: ignore[misc]
        left = [each.peer.spawn(each.try_round()) for each in victims]
        cost.rounds.append(await _round(network, survivors, cost))
        cost.members = len(survivors[0].outcomes[-1].result.certificate.body.members)
        cost.frozen_at = min(hit) - began
        key = survivors[0].averager.matchmaker.position.key
        if frozen > 1 and min(started, key=lambda each: rank(each.peer.peer_id, key)) in victims:
            grace = swarm.spec.grace_seconds
            cost.leader_seconds = leader_allowance_seconds(grace) + keepalive_seconds(grace)
        for _ in range(ROUNDS_AFTER):
            cost.rounds.append(await _round(network, survivors, cost))
        cost.lineages = len({each.averager.head.lineage for each in survivors})
        for each in victims:
            network.resume(each.peer)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await stop_averagers(started)

    simulate(main, swarm.seed, model=LinkModel(latency_seconds=swarm.latency_seconds))
    return cost


def _freeze(network: SimulatedNetwork, each: AveragingPeer, hit: list[float]) -> None:
    if not network.loop.is_frozen(each.peer):
        hit.append(network.loop.time())
        network.stall(each.peer)


async def _round(network: SimulatedNetwork, taking_part: list[AveragingPeer], cost: Cost) -> float:
    """Average until each peer has a result, then compute; return the seconds until the last result."""

    async def until_committed(each: AveragingPeer) -> None:
        while True:
            try:
                await each.round()
                return
            except TemporaryError as error:
                cost.slowest.append(f"{each.peer.name}: {error}")

    began = network.loop.time()
    await asyncio.gather(*(each.peer.spawn(until_committed(each)) for each in taking_part))
    seconds = network.loop.time() - began
    await asyncio.sleep(COMPUTE_SECONDS)
    return seconds


FAST = (
    Swarm(4, 300_000, 4e6, (0.02, 0.1), seed=11),
    Swarm(5, 1_000_000, 12.5e6, (0.001, 0.03), seed=12),
    Swarm(8, 500_000, 12.5e6, seed=13),
    Swarm(3, 1_000_000, 12.5e6, spec=AveragingSpec(codec="int8", spot_checks=4), seed=14),
    Swarm(5, 200_000, 12.5e6, spec=AveragingSpec(codec="fp32", spot_checks=4, grace_seconds=4.0), seed=15),
)
"""A round takes a part of the grace period."""
SLOW = (
    Swarm(3, 2_000_000, 0.5e6, seed=21),
    Swarm(5, 2_000_000, 1e6, seed=22),
    Swarm(4, 600_000, 0.2e6, (0.05, 0.2), seed=23),
)
"""A round takes longer than the grace period."""


def check(swarm: Swarm, cost: Cost) -> None:
    """The promise; what the round took before anybody froze comes on top where rounds are long."""
    assert cost.lineages == 1
    assert cost.slowest == []
    most = (cost.frozen_at if swarm in SLOW else 0.0) + SLACK * cost.normal + swarm.spec.grace_seconds
    most += VOTE_SECONDS + cost.leader_seconds
    assert cost.rounds[0] <= cost.normal + most, cost
    assert cost.delay_seconds <= most, cost


@pytest.mark.fault(52)
@pytest.mark.parametrize("role", ["leader", "follower"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_frozen_peer_costs_two_others_a_grace_period_once(phase: str, role: str) -> None:
    swarm = Swarm(3)
    check(swarm, measure(swarm, in_phase(phase), role))


@pytest.mark.parametrize("seed", [12, 13, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(14, 18))])
def test_no_follower_of_a_frozen_leader_is_sent_back_to_it(seed: int) -> None:
    """The next leader gets tickets before it has given the frozen one up itself."""
    swarm = Swarm(8, 500_000, 12.5e6, seed=seed)
    check(swarm, measure(swarm, in_phase("scatter"), "leader"))


@pytest.mark.parametrize(
    ("swarm", "phase"),
    [
        pytest.param(swarm, phase, marks=[] if (number + at) % 4 < 2 else pytest.mark.slow)
        for number, swarm in enumerate((*FAST, *SLOW))
        for at, phase in enumerate(PHASES)
    ],
    ids=lambda value: f"seed{value.seed}" if isinstance(value, Swarm) else value,
)
def test_whatever_the_links_and_however_many_the_others_are(swarm: Swarm, phase: str) -> None:
    role = ("leader", "follower")[(swarm.seed + PHASES.index(phase)) % 2]
    check(swarm, measure(swarm, in_phase(phase), role))


@pytest.mark.parametrize("phase", PHASES)
def test_two_peers_that_freeze_at_once_cost_what_one_does(phase: str) -> None:
    swarm = Swarm(5, 1_000_000, seed=31)
    check(swarm, measure(swarm, in_phase(phase), "follower", frozen=2))


def test_a_peer_that_freezes_while_it_settles_what_another_one_broke_costs_another_grace_period(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swarm = Swarm(5, 1_000_000, seed=32)
    freezes: dict[str, Callable[[], None]] = {}
    recover = AttemptRecovery.recover

    async def freeze_and_recover(recovery: AttemptRecovery, *args: Any) -> object:
        freezes.get(recovery._rpc.peer_id, lambda: None)()
        return await recover(recovery, *args)

    monkeypatch.setattr(AttemptRecovery, "recover", freeze_and_recover)

    def arm(each: AveragingPeer, freeze: Callable[[], None]) -> None:
        first: Arm = in_phase("reduce")
        if freezes:
            first(each, freeze)
        else:
            freezes[each.peer.peer_id] = freeze

    cost = measure(swarm, arm, "follower", frozen=2)
    assert cost.members == 3
    assert cost.lineages == 1
    assert cost.delay_seconds <= 2 * swarm.spec.grace_seconds + SLACK * cost.normal, cost
