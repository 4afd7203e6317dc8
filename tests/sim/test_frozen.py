"""A peer that freezes costs the others one grace period and a fifth of a round, once, in whichever phase it freezes.

Frozen means stopped (SIGSTOP): its connections stand, and nothing more comes. Covers fault 52.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from p2ptrain.averaging.commit.recovery import AttemptRecovery
from p2ptrain.manifest import AveragingSpec
from tests.support.sim.averagers import AveragingPeer
from tests.support.sim.frozen import Arm, Cost, Swarm, in_phase, measure

PHASES = ("matchmaking", "scatter", "reduce", "gather", "commit")
SLACK = 0.2
"""Of a normal round."""

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


def check(swarm: Swarm, cost: Cost, before_freezing: float = 0.0) -> None:
    """The promise; what the round took before anybody froze comes on top where rounds are long."""
    assert cost.lineages == 1
    assert cost.slowest == []
    most = before_freezing + SLACK * cost.normal + swarm.spec.grace_seconds
    assert cost.rounds[0] <= cost.normal + most, cost
    assert cost.delay_seconds <= most, cost


@pytest.mark.fault(52)
@pytest.mark.parametrize("role", ["leader", "follower"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_frozen_peer_costs_two_others_a_grace_period_once(phase: str, role: str) -> None:
    swarm = Swarm(3)
    check(swarm, measure(swarm, in_phase(phase), role))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("swarm", FAST, ids=lambda swarm: f"seed{swarm.seed}")
def test_whatever_the_links_and_however_many_the_others_are(swarm: Swarm, phase: str) -> None:
    role = ("leader", "follower")[(swarm.seed + PHASES.index(phase)) % 2]
    check(swarm, measure(swarm, in_phase(phase), role))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("swarm", SLOW, ids=lambda swarm: f"seed{swarm.seed}")
def test_where_rounds_are_long_the_next_attempt_begins_within_a_grace_period(swarm: Swarm, phase: str) -> None:
    role = ("leader", "follower")[(swarm.seed + PHASES.index(phase)) % 2]
    cost = measure(swarm, in_phase(phase), role)
    check(swarm, cost, cost.frozen_at)


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
